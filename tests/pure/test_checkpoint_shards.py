"""Whatever the layout that saved, every rank of another one gets the bits that cutting the whole would give it.

Ranks are played one after the other in this process: each holds its parts, writes its file, reads its slices.
"""

import contextlib
import math
import os
import random
import re
import shutil
from collections import Counter

import pytest
import torch
from checkpoint_states import bits, same
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from shoal.checkpoint import Shard, export, pack, read, read_manifest, verify
from shoal.checkpoint.deal import pieces_to_write
from shoal.checkpoint.pack import in_pairs
from shoal.checkpoint.snapshot import HostBuffer
from shoal.checkpoint.state import capture, reading_plan, restore
from shoal.checkpoint.together import Patience, open_slot
from shoal.checkpoint.write import commit, hand_over, new_header
from shoal.errors import CheckpointError
from shoal.layout import Layout
from shoal.mesh import Mesh
from shoal.parallel.parts import Part, cut, keep_parts

LAYOUTS = ["lone", "dp2", "dp3", "fsdp2", "fsdp4", "tp2", "tp3", "dp2.fsdp2", "dp2.tp2", "fsdp2.tp2", "dp2.fsdp3.tp2"]
KINDS = ["whole", "dim 0", "dim 1", "fused", "heads"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn]


def mesh_of(layout):
    return Mesh.of(Layout.parse(layout))


def spans_of(size, degree, place):
    """Rows as torch.chunk deals them: the last rank gets fewer, or none."""
    step = -(-size // degree)
    return min(place * step, size), min((place + 1) * step, size)


def part_of(shape, kind, mesh, rank):
    """What a rank holds of a tensor that tp cuts in the way of `kind`, and fsdp then by rows."""
    part = Part.whole(shape)
    tp, fsdp = mesh.sizes["tp"], mesh.sizes["fsdp"]
    place = mesh.coordinate(rank, "tp")
    dim = 1 if kind == "dim 1" and len(shape) > 1 else 0
    if tp > 1 and kind != "whole" and shape:
        if kind == "fused" and shape[0] % 3 == 0:  # q, k and v, one behind the other, each cut alike
            third = shape[0] // 3
            low, high = spans_of(third, tp, place)
            spans = [(third * i + low, third * i + high) for i in range(3)]
        elif kind == "heads":  # every tp-th row
            spans = [(row, row + 1) for row in range(place, shape[0], tp)]
        else:
            spans = [spans_of(shape[dim], tp, place)]
        part = part.take(dim, spans, "tp")
    if fsdp > 1 and shape:
        rows = spans_of(part.local_shape[0], fsdp, mesh.coordinate(rank, "fsdp"))
        part = part.take(0, [rows], "fsdp")
    return part


def random_tensor(draw, shape, dtype):
    """All bit patterns, nan payloads too."""
    if dtype == torch.bool:
        return torch.tensor([draw.random() < 0.5 for _ in range(math.prod(shape))], dtype=dtype).reshape(shape)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.frombuffer(bytearray(draw.randbytes(num_bytes)) or bytearray(1), dtype=torch.uint8)[:num_bytes]
    return raw.view(dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)


def held_by(whole, kinds, mesh, rank):
    """A rank's tree, given the tree's tensors and how each is cut."""
    tree = {}
    for name, tensor in whole.items():
        part = part_of(tuple(tensor.shape), kinds[name], mesh, rank)
        tree[name] = tensor if part.is_whole else Shard(cut(tensor, part), part)
    return {"model": tree, "step": 3}


def save(folder, trees, mesh, *, step=1):
    """Every rank writes what it is to write, the last first; rank 0 joins."""
    header, slot = new_header(step, {}, "played"), open_slot(folder, step)
    images = [HostBuffer().take(tree, mesh, rank) for rank, tree in enumerate(trees)]
    others = [r for r, image in enumerate(images) if r and (image.spans or image.skeleton != images[0].skeleton)]
    for rank in reversed(others):
        hand_over(slot, rank, images[rank], header)
    return commit(slot, images[0], header, others, Patience(0.0))


def plan_for(whole, kinds, mesh, rank):
    parts = {name: part_of(tuple(tensor.shape), kinds[name], mesh, rank) for name, tensor in whole.items()}
    return {f"model.{name}": in_pairs(part) if whole[name].is_complex() else part for name, part in parts.items()}


@contextlib.contextmanager
def small_blocks(block_bytes, share_bytes):
    """Blocks and shares of a few bytes, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.checkpoint.tensorfile.BLOCK_BYTES", block_bytes)
        patch.setattr("shoal.checkpoint.deal._SHARE_BYTES", share_bytes)
        yield


TENSOR = st.tuples(st.lists(st.integers(0, 7), max_size=3), st.sampled_from(DTYPES), st.sampled_from(KINDS))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(TENSOR, min_size=1, max_size=5),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**32),
    st.sampled_from([16, 100, 1 << 20]),
)
def test_any_layout_reads_what_any_other_wrote_as_cutting_the_whole_would(
    tmp_path_factory, tensors, before, after, seed, block_bytes
):
    draw = random.Random(seed)
    whole = {f"t{i}": random_tensor(draw, tuple(shape), dtype) for i, (shape, dtype, _) in enumerate(tensors)}
    kinds = {f"t{i}": kind for i, (_, _, kind) in enumerate(tensors)}
    later = {name: draw.choice(KINDS) for name in kinds}
    old, new = mesh_of(before), mesh_of(after)
    folder = tmp_path_factory.mktemp("layouts")
    with small_blocks(block_bytes, draw.choice([1, 50, 1 << 20])):
        path = save(folder, [held_by(whole, kinds, old, rank) for rank in range(old.size)], old)
        assert verify(path) == []
        assert same(read(path).tree, {"model": whole, "step": 3})
        for rank in range(new.size):
            found = read(path, plan_for(whole, later, new, rank)).tree["model"]
            expected = {n: cut(t, part_of(tuple(t.shape), later[n], new, rank)) for n, t in whole.items()}
            assert same(found, expected)
    assert [item.name for item in folder.iterdir()] == ["step_000001"]


# ---- one fixed state under fsdp2.tp2 ----

WHOLE = {
    "a": torch.arange(60.0).reshape(10, 6),
    "b": torch.arange(7, dtype=torch.int64),
    "norm": torch.randn(5, dtype=torch.float64),
}
CUTS = {"a": "dim 1", "b": "dim 0", "norm": "whole"}


@pytest.fixture
def saved(tmp_path):
    mesh = mesh_of("fsdp2.tp2")
    with small_blocks(64, 1):
        yield save(tmp_path, [held_by(WHOLE, CUTS, mesh, rank) for rank in range(4)], mesh)


def test_every_rank_writes_a_file_of_its_own_and_no_byte_twice(saved):
    assert sorted(path.name for path in saved.iterdir()) == [
        "manifest.json",
        *(f"rank_{rank:05d}.safetensors" for rank in range(4)),
    ]
    manifest = read_manifest(saved)
    assert {name: len(entry.slices) for name, entry in manifest.tensors.items()} == {
        "model.a": 4,
        "model.b": 4,
        "model.norm": 2,  # whole on tp, in two shards on fsdp
    }
    files = Counter(part.file for entry in manifest.tensors.values() for part in entry.slices)
    assert len(files) == 4


def test_every_flipped_bit_is_found_by_one_of_the_ranks_that_share_the_reading(saved):
    draw = random.Random(0)
    plans = [plan_for(WHOLE, CUTS, mesh_of("dp2.tp2"), rank) for rank in range(4)]
    for file in sorted(saved.iterdir()):
        good = file.read_bytes()
        for bit in draw.sample(range(8 * len(good)), 40):
            raw = bytearray(good)
            raw[bit // 8] ^= 1 << bit % 8
            file.write_bytes(raw)
            problems = [verify(saved, rank=rank, size=3) for rank in range(3)]
            assert any(file.name in line for lines in problems for line in lines)
            assert refused(read, saved)
            for plan in plans:  # who does not touch the place reads on, and reads right
                if not refused(read, saved, plan):
                    assert_parts(read(saved, plan).tree["model"], plan)
            file.write_bytes(good)
    assert [verify(saved, rank=rank, size=3) for rank in range(3)] == [[], [], []]


def refused(function, *args):
    try:
        function(*args)
    except CheckpointError:
        return True
    return False


def assert_parts(tree, plan):
    for name, tensor in WHOLE.items():
        assert bits(tree[name]) == bits(cut(tensor, plan[f"model.{name}"]))


def test_damage_is_told_by_file_and_tensor_to_those_who_need_the_place(saved):
    (file,) = {part.file for part in read_manifest(saved).tensors["model.b"].slices if part.offset == (0,)}
    raw = (saved / file).read_bytes()
    at = raw.index(WHOLE["b"][:2].numpy().tobytes())
    (saved / file).write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
    mesh = mesh_of("fsdp4")
    first, last = (plan_for(WHOLE, CUTS, mesh, rank) for rank in (0, 3))
    with pytest.raises(CheckpointError, match=rf"damaged: {file}: tensor 'model.b' does not match its checksum"):
        read(saved, first)
    assert_parts(read(saved, last).tree["model"], last)


def test_the_file_of_a_missing_rank_is_named(saved):
    (saved / "rank_00002.safetensors").unlink()
    assert verify(saved) == ["rank_00002.safetensors: is missing"]
    with pytest.raises(CheckpointError, match=r"rank_00002.safetensors: is missing"):
        read(saved, plan_for(WHOLE, CUTS, mesh_of("fsdp4"), 0))


def test_files_of_two_saves_do_not_mix(saved, tmp_path):
    mesh = mesh_of("fsdp2.tp2")
    changed = {name: tensor + 1 for name, tensor in WHOLE.items()}
    other = save(tmp_path, [held_by(changed, CUTS, mesh, rank) for rank in range(4)], mesh, step=2)
    (saved / "rank_00003.safetensors").write_bytes((other / "rank_00003.safetensors").read_bytes())
    assert all("rank_00003.safetensors" in line for line in verify(saved))
    assert refused(read, saved)


def count_bytes_read(monkeypatch):
    """Of the data of tensors, as they are read."""
    count, preadv = [0], os.preadv

    def counting(descriptor, buffers, offset):
        count[0] += sum(map(len, buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    return count


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 400])
def test_ranks_that_share_the_reading_read_every_byte_once(size, tmp_path, monkeypatch):
    mesh, whole = mesh_of("fsdp2"), {"a": torch.randn(90, 3), "b": torch.randn(33), "c": torch.ones(1)}
    with small_blocks(64, 1):
        trees = [held_by(whole, dict.fromkeys(whole, "whole"), mesh, rank) for rank in range(2)]
        path = save(tmp_path, trees, mesh)
        count = count_bytes_read(monkeypatch)
        assert not any(verify(path, rank=rank, size=size) for rank in range(size))
    assert count == [sum(tensor.nbytes for tensor in whole.values())]


def test_a_rank_reads_the_blocks_that_hold_its_part_and_no_others(tmp_path, monkeypatch):
    whole = {"big": torch.randn(1000, 8), "other": torch.randn(1000)}
    with small_blocks(3200, 1 << 20):  # 100 rows
        path = save(tmp_path, [held_by(whole, dict.fromkeys(whole, "whole"), mesh_of("lone"), 0)], mesh_of("lone"))
        count = count_bytes_read(monkeypatch)
        rows = Part.whole((1000, 8)).take(0, [(250, 260)], "fsdp")
        found = read(path, {"model.big": rows, "model.other": None}).tree["model"]
    assert torch.equal(found["big"], whole["big"][250:260])
    assert found["other"] is None
    assert count == [3200]


def test_large_slices_have_a_checksum_for_each_16_mib_and_small_ones_a_single_one(tmp_path):
    whole = {"large": torch.zeros(5, 1 << 20), "small": torch.zeros(3)}  # 20 MiB
    path = save(tmp_path, [{"model": whole}], mesh_of("lone"))
    tensors = read_manifest(path).tensors
    assert [len(tensors[f"model.{name}"].slices[0].sha256) for name in whole] == [2, 1]
    assert '"sha256":"' in (path / "manifest.json").read_text()
    assert same(read(path).tree["model"], whole)


# ---- who writes ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share_bytes", [1, 1000, 1 << 30])
def test_each_element_is_written_by_exactly_one_rank(layout, share_bytes):
    mesh = mesh_of(layout)
    whole = {f"{kind} {n}": torch.zeros(n, 6) for kind in KINDS for n in (1, 6, 40)}
    kinds = {name: name.rsplit(" ", 1)[0] for name in whole}
    counts = {f"model.{name}": torch.zeros(tensor.shape) for name, tensor in whole.items()}
    with small_blocks(1 << 20, share_bytes):
        for rank in range(mesh.size):
            tree = held_by(whole, kinds, mesh, rank)["model"]
            for piece, tensor in pieces_to_write({f"model.{n}": t for n, t in tree.items()}, mesh, rank).values():
                rows, cols = (slice(at, at + n) for at, n in zip(piece.offset, tensor.shape, strict=True))
                counts[piece.name][rows, cols] += 1
    assert all((count == 1).all() for count in counts.values())


def test_replicas_share_the_bytes_evenly_once_they_are_many():
    mesh = mesh_of("dp4")
    tensors = {f"t{i}": torch.empty(1 << 20, i % 5 + 1, dtype=torch.uint8) for i in range(100)}
    loads = []
    for rank in range(4):
        with small_blocks(1 << 20, 1 << 20):
            loads.append(sum(tensor.numel() for _, tensor in pieces_to_write(tensors, mesh, rank).values()))
    assert sum(loads) == sum(tensor.numel() for tensor in tensors.values())
    assert max(loads) - min(loads) <= 5 << 20
    alone = [len(pieces_to_write(dict(list(tensors.items())[:9]), mesh, rank)) for rank in range(4)]
    assert alone == [9, 0, 0, 0]  # a small state is one file


# ---- a rank that does not deliver ----


def test_a_rank_that_never_tells_is_named_and_nothing_is_left(tmp_path):
    mesh = mesh_of("fsdp2")
    trees = [held_by(WHOLE, CUTS, mesh, rank) for rank in range(2)]
    header, slot = new_header(1, {}, "fsdp2"), open_slot(tmp_path, 1)
    with pytest.raises(OSError, match=r"rank 1 has not told within 0.05 s"):
        commit(slot, HostBuffer().take(trees[0], mesh, 0), header, [1], Patience(0.05))
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_disk_is_full_says_so_and_nothing_is_left(tmp_path, monkeypatch):
    mesh = mesh_of("fsdp2")
    images = [HostBuffer().take(held_by(WHOLE, CUTS, mesh, rank), mesh, rank) for rank in range(2)]
    header, slot = new_header(1, {}, "fsdp2"), open_slot(tmp_path, 1)
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: full)
        with pytest.raises(OSError, match="No space left"):
            hand_over(slot, 1, images[1], header)
        told = (slot.temporary / "rank_00001.failed").read_text()
    assert [path.name for path in slot.temporary.iterdir()] == ["rank_00001.failed"]
    assert re.fullmatch(r"No space left on device \(needs .*, 10 B free\)", told)
    with pytest.raises(OSError, match=f"rank 1: {re.escape(told)}"):
        commit(slot, images[0], header, [1], Patience(5.0))
    assert list(tmp_path.iterdir()) == []


def test_parts_that_do_not_make_up_the_whole_are_never_committed(tmp_path):
    mesh = mesh_of("fsdp2")
    trees = [held_by(WHOLE, CUTS, mesh, 0), held_by(WHOLE, CUTS, mesh, 0)]  # rank 1 thinks that it is rank 0
    with pytest.raises(CheckpointError, match="do not tile"):
        save(tmp_path, trees, mesh)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_differ_in_shape_are_never_committed(tmp_path):
    mesh = mesh_of("fsdp2")
    rows = [Part.whole((4, n)).take(0, [(2 * i, 2 * i + 2)], "fsdp") for i, n in enumerate((3, 5))]
    trees = [{"model": {"w": Shard(torch.ones(part.local_shape), part)}} for part in rows]
    with pytest.raises(CheckpointError, match=r"'model.w' is F32 \[4, 3\] and F32 \[4, 5\]"):
        save(tmp_path, trees, mesh)


# ---- a model and its optimizer ----


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


CUT_OF = {"embed.weight": "dim 0", "head.weight": "dim 0", "qkv.weight": "fused", "qkv.bias": "fused"}


def trained(seed):
    """A whole model, and an optimizer with state that no two elements share."""
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return model, optimizer


def placed(layout, rank, source):
    """A rank's model and optimizer: what it would hold of the source under a layout."""
    model, optimizer = Tied(), None
    state, mesh, parts = source[0].state_dict(), mesh_of(layout), {}
    for name, tensor in state.items():
        parts[name] = part_of(tuple(tensor.shape), CUT_OF.get(name, "whole"), mesh, rank)
    for name, _ in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(cut(state[name], parts[name]).clone()))
    model.head.weight = model.embed.weight
    for name, buffer in model.named_buffers():
        buffer.data = cut(state[name], parts[name]).clone()
    keep_parts(model, parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sources = dict(source[0].named_parameters())
    for name, param in model.named_parameters():
        held = source[1].state[sources[name]]
        optimizer.state[param] = {k: (cut(v, parts[name]) if v.dim() else v).clone() for k, v in held.items()}
    return model, optimizer


def captured(model, optimizer, **options):
    return capture(model, optimizer, None, None, **options)


def unwrapped(tree):
    """Shards as plain tensors."""
    if isinstance(tree, Shard):
        return tree.local
    if isinstance(tree, dict):
        return type(tree)((key, unwrapped(value)) for key, value in tree.items())
    return tree


@pytest.mark.parametrize("before", ["lone", "dp2", "fsdp4", "tp2", "tp3", "dp2.fsdp2", "fsdp3.tp2"])
@pytest.mark.parametrize("after", ["lone", "dp2", "fsdp4", "tp2", "fsdp2.tp2"])
def test_a_model_and_its_optimizer_go_on_in_any_layout(before, after, tmp_path):
    """D125, D136: optimizer state too, by name, as cutting the whole would give it; shards of no rows too."""
    source, old, new = trained(0), mesh_of(before), mesh_of(after)
    path = save(tmp_path, [captured(*placed(before, rank, source)) for rank in range(old.size)], old)
    assert same(read(path).tree, captured(*source))
    for rank in range(new.size):
        model, optimizer = placed(after, rank, trained(1))
        plan = reading_plan(read_manifest(path), model)
        restore(read(path, plan).tree, model, optimizer, None, None)
        assert same(unwrapped(captured(model, optimizer)), unwrapped(captured(*placed(after, rank, source))))
        assert model.head.weight is model.embed.weight


def test_a_tie_is_one_tensor_in_the_checkpoint_though_a_rank_holds_no_rows_of_it(tmp_path):
    source, mesh = trained(0), mesh_of("fsdp4")
    trees = [captured(*placed("fsdp4", rank, source)) for rank in range(4)]
    assert trees[3]["model"]["qkv.weight"].local.shape == (3, 4)
    trees = [captured(*placed("fsdp12", rank, source)) for rank in range(12)]
    assert trees[11]["model"]["embed.weight"].local.shape == (0, 4)
    assert [set(pack(tree)[0]) for tree in trees] == [set(pack(trees[0])[0])] * 12
    path = save(tmp_path, trees, mesh_of("fsdp12"))
    entries = read_manifest(path).tensors
    assert "model.head.weight" not in entries
    assert all(math.prod(part.shape) for entry in entries.values() for part in entry.slices)  # no empty ones
    assert same(read(path).tree, captured(*source))
    assert mesh.size == 4


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_an_export_puts_the_shards_together_under_every_name(suffix, tmp_path):
    source, mesh = trained(0), mesh_of("fsdp3.tp2")
    save(tmp_path, [captured(*placed("fsdp3.tp2", rank, source)) for rank in range(6)], mesh)
    to = tmp_path / "out" / f"model{suffix}"
    export(tmp_path, to)
    loaded = load_file(to) if suffix == ".safetensors" else torch.load(to, weights_only=True)
    assert same({name: loaded[name] for name in source[0].state_dict()}, dict(source[0].state_dict()))
    assert len(loaded) == len(source[0].state_dict())
    assert [path.name for path in to.parent.iterdir()] == [to.name]
    if suffix == ".pt":  # tied as the model has it, and no more bytes than it needs
        assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
        assert loaded["qkv.bias"].untyped_storage().nbytes() == 48


def owned(layout, rank, source):
    """ZeRO-1: each dp rank keeps the optimizer state of every second parameter, and no other."""
    model, optimizer = placed(layout, rank, source)
    mesh, parts = mesh_of(layout), {}
    for index, (name, param) in enumerate(model.named_parameters()):
        if index % mesh.sizes["dp"] == mesh.coordinate(rank, "dp"):
            part = part_of(tuple(source[0].state_dict()[name].shape), CUT_OF.get(name, "whole"), mesh, rank)
            parts[name] = Part(part.shape, part.boxes, (*part.axes, "dp"))
        else:
            del optimizer.state[param]
    return model, optimizer, parts


@pytest.mark.parametrize("layout", ["dp2", "dp3", "dp2.tp2"])
def test_optimizer_state_that_only_its_owner_holds_is_saved_whole_and_given_back_to_owners(layout, tmp_path):
    source, mesh = trained(0), mesh_of(layout)
    ranks = [owned(layout, rank, source) for rank in range(mesh.size)]
    trees = [captured(model, optimizer, state_parts=parts) for model, optimizer, parts in ranks]
    path = save(tmp_path, trees, mesh)
    whole = captured(*source)
    found = read(path).tree
    assert same(dict(sorted(found["optimizer"]["state"].items())), dict(sorted(whole["optimizer"]["state"].items())))
    for rank in range(mesh.size):
        model, optimizer, parts = owned(layout, rank, trained(1))
        plan = reading_plan(read_manifest(path), model, state_parts=parts)
        restore(read(path, plan).tree, model, optimizer, None, None, state_parts=parts)
        again = captured(model, optimizer, state_parts=parts)
        assert same(unwrapped(again), unwrapped(trees[rank]))
        assert set(again["optimizer"]["state"]) == set(parts)
        assert len(optimizer.state) == len(parts)  # nothing is kept of the rest, which would cost its memory
    lone = trained(2)
    restore(found, *lone, None, None)
    assert same(captured(*lone), whole)


def test_an_owner_that_has_no_tensors_is_heard_too(tmp_path):
    """Plain SGD keeps `momentum_buffer: None`: a state of values alone, known to one rank."""
    source, mesh = trained(0), mesh_of("dp2")
    trees = []
    for rank in range(2):
        tree = captured(*placed("dp2", rank, source))
        states = {name: {"momentum_buffer": None} for name in tree["optimizer"]["state"]}
        tree["optimizer"]["state"] = dict(list(states.items())[rank::2])
        trees.append(tree)
    path = save(tmp_path, trees, mesh)
    assert set(read(path).tree["optimizer"]["state"]) == set(captured(*source)["optimizer"]["state"])


def test_state_that_cannot_be_cut_is_refused_at_the_save_and_at_the_resume(tmp_path):
    """Adafactor keeps a row and a column for a matrix: of a shard these are no part of the whole's."""
    source = trained(0)

    def with_rows(model, optimizer):
        for param in model.parameters():
            optimizer.state[param] = {"step": torch.tensor(1.0), "row_var": torch.ones(param.shape[0], 1)}
        return model, optimizer

    with pytest.raises(CheckpointError, match=r"state of embed.weight: row_var has shape .* is cut over tp.*dpN"):
        captured(*with_rows(*placed("tp2", 0, source)))
    whole = captured(*with_rows(*trained(0)))
    for layout in ("dp2", "tp2"):
        path = save(tmp_path, [whole], mesh_of("lone"), step=len(layout))
        model, _ = placed(layout, 0, trained(1))
        if layout == "dp2":
            assert same(read(path, reading_plan(read_manifest(path), model)).tree, whole)
        else:
            with pytest.raises(CheckpointError, match=r"embed.weight: row_var .* is cut over tp"):
                reading_plan(read_manifest(path), model)


def test_state_without_a_parameter_is_refused_because_it_has_no_name():
    model, optimizer = trained(0)
    optimizer.state["global"] = {"step": 1}
    with pytest.raises(CheckpointError, match="AdamW keeps state that belongs to no parameter"):
        captured(model, optimizer)


def test_another_model_is_refused_by_its_whole_shapes_before_anything_is_read(tmp_path):
    path = save(tmp_path, [captured(*placed("tp2", rank, trained(0))) for rank in range(2)], mesh_of("tp2"))
    manifest = read_manifest(path)

    class Wider(Tied):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 24)

    with pytest.raises(CheckpointError, match=r"qkv.weight is \(12, 4\) torch.float32 in .*, \(24, 4\)"):
        reading_plan(manifest, Wider())
    with pytest.raises(CheckpointError, match=r"embed.weight is .* torch.float32 in the .*, \(7, 4\) torch.float64"):
        reading_plan(manifest, Tied().double())
    model = Tied()
    model.more = nn.Linear(1, 1, bias=False)
    with pytest.raises(CheckpointError, match=r"lacks \['more.weight'\]"):
        reading_plan(manifest, model)
