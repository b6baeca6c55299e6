"""No damage goes unseen: a checkpoint loads exactly as it was written, or is refused by file and tensor."""

import hashlib
import json
import os
import pickle
import random
import shutil

import pytest
import torch
from checkpoint_states import newest_tree, same, state_of

from shoal.checkpoint import newest_good, read, verify, write
from shoal.checkpoint.manifest import FileEntry, Manifest, Slice, TensorEntry, check_tiling
from shoal.checkpoint.tensorfile import Span, header_bytes, parse_header
from shoal.errors import CheckpointError

JOB = {"lr": 1e-3, "width": 8}
DATA = "rank_00000.safetensors"


@pytest.fixture
def saved(tmp_path):
    return write(tmp_path / "checkpoints", state_of(500), step=500, job=JOB, layout="dp2")


def flip(path, bit):
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def reseal(path, change):
    """What a hostile writer can do: edit the manifest and give it a right checksum."""
    fields = json.loads((path / "manifest.json").read_bytes())
    del fields["sha256"]
    change(fields)
    body = b"{" + ",\n".join(f'"{k}":{json.dumps(v, separators=(",", ":"))}' for k, v in fields.items()).encode()
    seal = f',\n"sha256":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()
    (path / "manifest.json").write_bytes(body + seal)


def assert_found(path, *words):
    problems = verify(path)
    assert problems
    for word in words:
        assert any(word in problem for problem in problems), problems
    with pytest.raises(CheckpointError):
        read(path)
    assert newest_good(path.parent)[0] is None


def test_a_checkpoint_comes_back_exactly(saved):
    checkpoint = read(saved)
    assert verify(saved) == []
    assert same(checkpoint.tree, state_of(500))
    assert (checkpoint.step, checkpoint.manifest.job, checkpoint.manifest.layout) == (500, JOB, "dp2")
    assert set(checkpoint.manifest.versions) == {"python", "torch", "shoal", "numpy"}


def test_every_single_flipped_bit_is_found_in_its_file(saved):
    draw = random.Random(0)
    for file in sorted(saved.iterdir()):
        good = file.read_bytes()
        for bit in draw.sample(range(8 * len(good)), 60):
            flip(file, bit)
            assert_found(saved, file.name)
            file.write_bytes(good)
    assert verify(saved) == []


def test_every_bit_of_a_safetensors_prefix_and_header_is_covered(saved):
    file = saved / DATA
    good = file.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    for bit in [*range(64), *random.Random(1).sample(range(64, 8 * length), 30)]:
        flip(file, bit)
        assert_found(saved, f"{DATA}: the header is damaged")
        file.write_bytes(good)


def test_damage_in_the_data_names_the_tensor(saved):
    good = (saved / DATA).read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    for name, span in parse_header(good[8:start]).items():
        flip(saved / DATA, 8 * (start + span.start))
        assert verify(saved) == [f"{DATA}: tensor {name!r} does not match its checksum"]
        with pytest.raises(CheckpointError, match=f"{DATA}: tensor '{name}'"):
            read(saved)
        (saved / DATA).write_bytes(good)


def test_damage_in_the_manifest_is_called_damage(saved):
    size = (saved / "manifest.json").stat().st_size
    for byte in range(40, size, size // 40):
        flip(saved / "manifest.json", 8 * byte)
        assert_found(saved, "manifest.json is damaged: its bytes do not match its checksum")
        flip(saved / "manifest.json", 8 * byte)


def test_bytes_behind_the_last_tensor_are_found_even_if_the_manifest_counts_them(saved):
    with (saved / DATA).open("ab") as file:
        file.write(b"smuggled")
    size = (saved / DATA).stat().st_size
    reseal(saved, lambda fields: fields["files"][DATA].update(num_bytes=size))
    assert_found(saved, f"{DATA}: the header does not list")


def test_two_tensors_cannot_be_one_place_in_a_file(saved):
    reseal(saved, lambda fields: fields["tensors"].update(twin=first(fields)))
    assert_found(saved, "for two tensors")


def test_all_damaged_tensors_are_listed(saved):
    good = (saved / DATA).read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    (saved / DATA).write_bytes(good[:start] + bytes(255 - byte for byte in good[start:]))
    assert len(verify(saved)) == len(parse_header(good[8:start]))


def test_every_truncation_is_found(saved):
    draw = random.Random(2)
    for file in sorted(saved.iterdir()):
        good = file.read_bytes()
        for length in [0, 1, 7, 8, 9, len(good) - 1, *draw.sample(range(len(good)), 20)]:
            file.write_bytes(good[:length])
            assert_found(saved, file.name)
        file.write_bytes(good + b"\0")
        assert_found(saved, file.name)
        file.write_bytes(good)


def test_a_cut_names_the_first_tensor_that_is_lost(saved):
    good = (saved / DATA).read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    name, span = list(parse_header(good[8:start]).items())[1]
    (saved / DATA).write_bytes(good[: start + span.start + 1])
    assert_found(saved, f"cut within tensor {name!r}")


def test_a_zeroed_page_is_found(saved):
    good = (saved / DATA).read_bytes()
    for start in range(0, len(good) - 4096, 2048):
        (saved / DATA).write_bytes(good[:start] + bytes(4096) + good[start + 4096 :])
        assert_found(saved, DATA)


def test_files_swapped_between_two_checkpoints_are_found(saved):
    other = write(saved.parent, state_of(501), step=501, job=JOB, layout="dp2")
    for name in (DATA, "manifest.json"):
        swapped = saved.parent / "swap"
        (saved / name).rename(swapped)
        (other / name).rename(saved / name)
        swapped.rename(other / name)
        assert verify(saved)
        assert verify(other)
        assert newest_good(saved.parent)[0] is None
        (saved / name).rename(swapped)
        (other / name).rename(saved / name)
        swapped.rename(other / name)
    assert verify(saved) == verify(other) == []


def test_a_checkpoint_under_the_name_of_another_step_is_found(saved):
    moved = saved.rename(saved.with_name("step_000600"))
    assert_found(moved, "is of step 500")


def test_a_checkpoint_may_get_a_name_of_its_own(saved):
    assert read(saved.rename(saved.with_name("best"))).step == 500


def test_missing_and_extra_files_are_named(saved):
    (saved / "extra.pkl").write_bytes(pickle.dumps([1]))
    assert_found(saved, "extra.pkl: is not of this checkpoint")
    (saved / "extra.pkl").unlink()
    (saved / DATA).rename(saved.parent / "elsewhere")
    assert_found(saved, f"{DATA}: is missing")
    os.symlink(saved.parent / "elsewhere", saved / DATA)
    assert_found(saved, f"{DATA}: is no regular file")


def test_white_space_and_order_in_the_manifest_are_found_even_with_a_right_checksum(saved):
    raw = (saved / "manifest.json").read_bytes()
    for old, new in [(b'"step":500', b'"step": 500'), (b'"step":500,', b'"step":1,\n"step":500,')]:
        body = raw.replace(old, new)[: -len(b',\n"sha256":""}\n') - 64]
        seal = f',\n"sha256":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()
        (saved / "manifest.json").write_bytes(body + seal)
        assert_found(saved, "is not in the form")


# Each with a right checksum: these must be caught by what they say.
HOSTILE = {
    "the manifest itself": lambda m: rename_file(m, "manifest.json"),
    "huge shape": lambda m: first(m).update(shape=[2**62], slices=[{**first(m)["slices"][0], "shape": [2**62]}]),
    "huge shape of nothing": lambda m: first(m).update(shape=[2**62, 2**62, 0]),
    "huge file": lambda m: m["files"][DATA].update(num_bytes=2**62),
    "edited shape": lambda m: first(m).update(
        shape=[2, 500], slices=[{**first(m)["slices"][0], "shape": [2, 500], "offset": [0, 0]}]
    ),
    "edited dtype": lambda m: first(m).update(dtype="I32"),
    "unknown dtype": lambda m: first(m).update(dtype="F1"),
    "negative": lambda m: first(m).update(shape=[-1000]),
    "a fraction": lambda m: first(m).update(shape=[1000.0]),
    "a slice outside": lambda m: first(m)["slices"][0].update(offset=[1]),
    "no slices": lambda m: first(m).update(slices=[]),
    "a slice twice": lambda m: first(m)["slices"].append(first(m)["slices"][0]),
    "a file unlisted": lambda m: first(m)["slices"][0].update(file="other"),
    "a tensor dropped": lambda m: m["tensors"].pop("model.blocks.0.bias"),
    "two checksums for one block": lambda m: first(m)["slices"][0].update(sha256=2 * [first(m)["slices"][0]["sha256"]]),
    "a list of one checksum": lambda m: first(m)["slices"][0].update(sha256=[first(m)["slices"][0]["sha256"]]),
    "no checksum": lambda m: first(m)["slices"][0].update(sha256=[]),
    "more than its file holds": lambda m: m["tensors"].update(more=larger(m)),
    "a newer format": lambda m: m.update(format=2),
    "no files": lambda m: m.pop("files"),
    "files as a list": lambda m: m.update(files=[]),
    "code": lambda m: m.update(tree={"__reduce__": ["os.system", "true"]}),
    "a complex view of reals": lambda m: m.update(tree={"tensor": "model.blocks.0.weight", "complex": True}),
    "job is a list": lambda m: m.update(job=[1]),
    "step is text": lambda m: m.update(step="500"),
    "nan": lambda m: m.update(tree=float("nan")),
}


def first(fields):
    return fields["tensors"]["model.blocks.0.weight"]


def larger(fields):
    """Another tensor in the same file, with all the bytes that there are."""
    count = fields["files"][DATA]["num_bytes"]
    place = {**first(fields)["slices"][0], "key": "more", "shape": [count]}
    return {"dtype": "U8", "shape": [count], "slices": [place]}


def rename_file(fields, name):
    fields["files"] = {name: fields["files"][DATA]}
    for entry in fields["tensors"].values():
        entry["slices"][0]["file"] = name


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused_without_harm(saved, name):
    reseal(saved, lambda fields: None)
    assert verify(saved) == []  # resealing alone changes nothing
    reseal(saved, HOSTILE[name])
    assert_found(saved)


def test_a_large_slice_with_one_checksum_for_all_of_it_is_read_too(tmp_path):
    """As the first checkpoints of shoal have it."""
    state = {"x": torch.arange(5.0 * (1 << 20)).reshape(5, 1 << 20)}  # 20 MiB
    path = write(tmp_path, state, step=1, job=JOB, layout="lone")
    digest = hashlib.sha256(state["x"].numpy().tobytes()).hexdigest()
    reseal(path, lambda fields: fields["tensors"]["x"]["slices"][0].update(sha256=digest))
    assert same(read(path).tree, state)
    flip(path / DATA, 8 * 10_000_000)
    assert_found(path, f"{DATA}: tensor 'x' does not match its checksum")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".hidden", "a\0b", ""])
def test_a_file_outside_of_the_checkpoint_is_refused_before_the_disk_is_asked(saved, name):
    (saved / DATA).rename(saved.parent / "x")
    reseal(saved, lambda fields: rename_file(fields, name))
    assert_found(saved, "by a plain name")


def test_sizes_are_checked_before_memory_is_taken(saved, monkeypatch):
    reseal(saved, HOSTILE["huge shape"])
    asked = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: asked.append(size) or empty(*size, **kwargs))
    assert_found(saved)
    assert all(size[0] <= 4000 for size in asked)


def test_a_manifest_nested_without_end_is_refused(saved):
    def nest(fields):
        fields["tree"] = "MARK"

    reseal(saved, nest)
    raw = (saved / "manifest.json").read_bytes()
    body = raw.replace(b'"MARK"', b"[" * 100_000 + b"]" * 100_000)[: -len(b',\n"sha256":""}\n') - 64]
    seal = f',\n"sha256":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()
    (saved / "manifest.json").write_bytes(body + seal)
    assert_found(saved, "manifest.json")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a":1}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,5]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
)
def test_headers_with_gaps_overlaps_or_nonsense_are_refused(header):
    with pytest.raises(CheckpointError, match="header"):
        parse_header(header)


def test_foreign_things_are_called_foreign(tmp_path):
    torch.save({"a": 1}, tmp_path / "model.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x04.")
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(b"")
    (tmp_path / "step_000007").mkdir()
    (tmp_path / "step_000007" / "manifest.json").write_text('{"layers": 3}')
    checkpoint, skipped = newest_good(tmp_path)
    assert checkpoint is None
    text = "\n".join(skipped)
    assert "model.pt is foreign: a pickle" in text
    assert "dcp is foreign: a folder of torch.distributed.checkpoint" in text
    assert "step_000007/manifest.json is no manifest of shoal" in text
    for path, words in [("model.pt", "pickle"), ("dcp", "torch.distributed"), ("none", "does not exist")]:
        with pytest.raises(CheckpointError, match=words):
            read(tmp_path / path)


def test_the_newest_good_one_is_taken_and_the_bad_are_named(tmp_path):
    for step in (100, 200, 300):
        write(tmp_path, state_of(step), step=step, job=JOB, layout="lone")
    flip(tmp_path / "step_000300" / DATA, 8 * 5000)
    shutil.rmtree(tmp_path / "step_000200", ignore_errors=True)
    (tmp_path / "step_000200").mkdir()
    checkpoint, skipped = newest_good(tmp_path)
    assert checkpoint.step == 100
    assert same(newest_tree(tmp_path), state_of(100))
    assert len(skipped) == 2
    assert "step_000300 is damaged" in skipped[0]
    assert "step_000200 is no checkpoint of shoal" in skipped[1]


def test_a_run_folder_leads_to_its_checkpoints(saved):
    assert newest_good(saved.parents[1])[0].step == 500
    assert newest_good(saved)[0].step == 500
    assert newest_good(saved.parent / "nothing") == (None, [])


def test_a_tensor_in_slices_of_several_files_is_put_together(saved):
    """What a later version with one file per rank will write must be read as one tensor."""
    whole = torch.arange(12.0).reshape(3, 4)
    boxes = {"rank_00001.safetensors": (0, 2), "rank_00002.safetensors": (2, 1)}
    manifest = read(saved).manifest
    files, slices = dict(manifest.files), []
    for file, (start, count) in boxes.items():
        part = whole[start : start + count].contiguous()
        raw = part.numpy().tobytes()
        header = header_bytes({"shard": Span("F32", (count, 4), 0, len(raw))})
        (saved / file).write_bytes(header + raw)
        header_hash = hashlib.sha256(header).hexdigest()
        files[file] = FileEntry(num_bytes=len(header) + len(raw), header_sha256=header_hash)
        digest = hashlib.sha256(raw).hexdigest()
        slices.append(Slice(file=file, key="shard", offset=(start, 0), shape=(count, 4), sha256=digest))
    entry = TensorEntry(dtype="F32", shape=(3, 4), slices=tuple(slices))
    sharded = Manifest(
        step=500,
        layout="fsdp2",
        job=JOB,
        files=files,
        tensors={**manifest.tensors, "whole": entry},
        skeleton={"dict": {"whole": {"tensor": "whole"}}},
    )
    (saved / "manifest.json").write_bytes(sharded.to_bytes())
    assert torch.equal(read(saved).tree["whole"], whole)


@pytest.mark.parametrize(
    ("shape", "boxes", "tiles"),
    [
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))], True),
        ((4, 4), [((0, 0), (4, 1)), ((0, 1), (4, 3))], True),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 3)), ((2, 3), (2, 1))], True),
        ((3,), [((0,), (0,)), ((0,), (3,)), ((3,), (0,))], True),
        ((), [((), ())], True),
        ((), [((), ()), ((), ())], False),
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))], False),
        ((4, 4), [((0, 0), (2, 4))], False),
        ((4,), [((0,), (2,)), ((3,), (2,))], False),
        ((4,), [((0, 0), (4, 1))], False),
    ],
)
def test_slices_must_tile_their_tensor(shape, boxes, tiles):
    slices = tuple(Slice(file="f", key="k", offset=o, shape=s, sha256="0" * 64) for o, s in boxes)
    entry = TensorEntry(dtype="F32", shape=shape, slices=slices)
    if tiles:
        check_tiling("x", entry)
    else:
        with pytest.raises(CheckpointError, match="slice"):
            check_tiling("x", entry)
