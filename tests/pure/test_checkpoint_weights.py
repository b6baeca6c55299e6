"""Weights come in from plain PyTorch and Hugging Face, and go out to them, slice by slice and tensor by tensor."""

import json
import re
import subprocess
import sys

import pytest
import torch
from checkpoint_states import bits
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.checkpoint import export, load_weights, write
from shoal.checkpoint.state import capture
from shoal.errors import CheckpointError
from shoal.parallel.parts import Part, cut, keep_parts


class Tied(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def source():
    torch.manual_seed(0)
    model = Tied()
    model.norm.running_mean += 0.5
    return model


@pytest.fixture
def target():
    torch.manual_seed(1)
    return Tied()


def untied(model):
    """What safetensors' own writer takes: no two names of one memory."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}


def assert_same(model, source):
    for name, tensor in source.state_dict().items():
        assert bits(model.state_dict()[name]) == bits(tensor), name
    assert model.head.weight is model.embed.weight


def as_safetensors(path, source):
    save_file(untied(source), path / "model.safetensors")
    return path / "model.safetensors"


def as_pt(path, source):
    torch.save(source.state_dict(), path / "model.pt")
    return path / "model.pt"


def as_hugging_face(path, source):
    """Sharded files and the index that says what is where."""
    folder, places = path / "hub", {}
    folder.mkdir()
    for number, names in enumerate(
        (["embed.weight", "qkv.bias"], sorted(set(untied(source)) - {"embed.weight", "qkv.bias"}))
    ):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: untied(source)[name] for name in names}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def as_folder(path, source):
    """The same files without their index."""
    folder = as_hugging_face(path, source)
    (folder / "model.safetensors.index.json").unlink()
    return folder


def as_run(path, source):
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    write(path / "run" / "checkpoints", capture(source, optimizer, None, None), step=5, job={}, layout="lone")
    return path / "run"


def as_export(path, source):
    export(as_run(path, source), path / "exported.safetensors")
    return path / "exported.safetensors"


FORMS = [as_safetensors, as_pt, as_hugging_face, as_folder, as_run, as_export]


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_every_form_fill_the_model_bit_by_bit(form, source, target, tmp_path):
    loaded = load_weights(form(tmp_path, source), target)
    assert_same(target, source)
    assert (loaded.num_tensors, loaded.converted) == (len(untied(source)), {})


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_takes_its_slices_of_every_form(form, source, target, tmp_path):
    parts = {name: Part.whole(tensor.shape) for name, tensor in source.state_dict().items()}
    parts["qkv.weight"] = parts["qkv.weight"].take(0, [(2, 4), (6, 8), (10, 12)], "tp").take(0, [(1, 5)], "fsdp")
    parts["embed.weight"] = parts["head.weight"] = parts["embed.weight"].take(1, [(1, 3)], "tp")
    for module, name in ((target.qkv, "qkv.weight"), (target.embed, "embed.weight")):
        module.weight = nn.Parameter(torch.zeros(parts[name].local_shape))
    target.head.weight = target.embed.weight
    keep_parts(target, parts)
    load_weights(form(tmp_path, source), target)
    for name, tensor in target.state_dict().items():
        assert bits(tensor) == bits(cut(source.state_dict()[name], parts[name])), name


def test_floating_point_numbers_become_those_of_the_model_and_it_is_told(source, target, tmp_path):
    state = {n: t.bfloat16() if t.is_floating_point() else t for n, t in untied(source).items()}
    save_file(state, tmp_path / "half.safetensors")
    loaded = load_weights(tmp_path / "half.safetensors", target)
    assert str(loaded) == f"8 tensors from {tmp_path / 'half.safetensors'}, 7 of them from bfloat16 to float32"
    assert torch.equal(target.qkv.weight, state["qkv.weight"].float())


def test_a_file_without_padding_is_read_too(source, target, tmp_path):
    """Its data begin at an odd byte, where no view of floats may begin."""
    path = as_safetensors(tmp_path, source)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip()
    header += b" " * ((1 - len(header)) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    assert torch.equal(load_file(path)["qkv.weight"], source.qkv.weight)
    load_weights(path, target)
    assert_same(target, source)


def changed(source, **values):
    state = {**untied(source), **values}
    return {name.replace("__", "."): tensor for name, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda s: {n: t for n, t in untied(s).items() if n != "qkv.bias"}, r"8 tensors\. It lacks 1: 'qkv.bias'\.$"),
        (lambda s: changed(s, qkv__bais=torch.ones(12)), r"model lacks: 1: 'qkv.bais' \(near: 'qkv.bias'\)"),
        (
            lambda s: {f"model.{n}": t for n, t in untied(s).items()},
            r"lacks 8: 'embed.weight' \(near: 'model.embed.weight'\), .*, \.\.\.\. .* lacks: 8: 'model.embed.weight'",
        ),
        (lambda s: untied(Tied(8)), r"embed.weight is \[7, 8\] torch.float32 there, \[7, 4\] .*; .*, and 4 more\.$"),
        (
            lambda s: changed(s, **{"norm.num_batches_tracked": torch.ones(())}),
            r"num_batches_tracked is \[\] torch.float32 there, \[\] torch.int64 in the model",
        ),
        (lambda s: changed(s, **{"head.weight": torch.ones(7, 4)}), "two values for embed.weight and head.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(make, told, source, target, tmp_path):
    save_file(make(source), tmp_path / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(CheckpointError, match=told):
        load_weights(tmp_path / "model.safetensors", target)
    assert all(bits(tensor) == bits(before[name]) for name, tensor in target.state_dict().items())


def cut_off(path, source):
    file = as_safetensors(path, source)
    file.write_bytes(file.read_bytes()[:-1])
    return file


def no_header(path, source):
    (path / "x.safetensors").write_bytes(b"hello")
    return path / "x.safetensors"


def training_state(path, source):
    torch.save({"epoch": 3, "state_dict": source.state_dict()}, path / "x.pt")
    return path / "x.pt"


def dangerous(path, source):
    torch.save({"a": print}, path / "x.pt")
    return path / "x.pt"


def legacy(path, source):
    torch.save(source.state_dict(), path / "x.pt", _use_new_zipfile_serialization=False)
    return path / "x.pt"


def twice(path, source):
    folder = as_folder(path, source)
    save_file(untied(source), folder / "more.safetensors")
    return folder


def index_of_nowhere(path, source):
    folder = as_hugging_face(path, source)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["qkv.bias"] = index["weight_map"]["qkv.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def index_of_elsewhere(path, source):
    folder = as_hugging_face(path, source)
    text = (folder / "model.safetensors.index.json").read_text().replace("model-", "../model-")
    as_safetensors(path, source).rename(path / "model-00001-of-00002.safetensors")
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path, _: path / "none.pt", "there are no weights at .*none.pt: it does not exist"),
        (lambda path, _: path, "is a folder without .safetensors"),
        (
            lambda path, _: (path / "x.onnx").write_text("") or path / "x.onnx",
            r"ends in '\.onnx'; weights are read from",
        ),
        (cut_off, "is no whole safetensors file: it has .* cut off"),
        (no_header, "is no whole safetensors file"),
        (training_state, r"holds no state dict, but: epoch, state_dict\. Save it alone"),
        (dangerous, "is no file of torch.save that can be read safely"),
        (legacy, "is no file of torch.save that can be read safely and in parts"),
        (twice, "in two files, and has no index"),
        (index_of_nowhere, "names the tensor 'qkv.bias' in a file that does not hold it"),
        (index_of_elsewhere, r"hub/model-00001-of-00002.safetensors cannot be read: No such file"),
    ],
)
def test_what_holds_no_weights_is_said_to_be_what_it_is(make, told, source, target, tmp_path):
    with pytest.raises(CheckpointError, match=told):
        load_weights(make(tmp_path, source), target)


def test_a_damaged_run_gives_no_weights(source, target, tmp_path):
    run = as_run(tmp_path, source)
    (data,) = run.glob("checkpoints/*/*.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=f"no good checkpoint in {re.escape(str(run))}.*\n.*is damaged"):
        load_weights(run, target)


PEAK = """
import resource, sys, torch
from pathlib import Path
from shoal.checkpoint import export, write
folder = Path(sys.argv[1])
if sys.argv[2] == "write":
    state = {"model": {f"layers.{i}": torch.full((2 << 20,), float(i)) for i in range(24)}}  # 24 x 8 MiB
    write(folder / "run" / "checkpoints", state, step=1, job={}, layout="lone")
else:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export(folder / "run", folder / "model.safetensors")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_an_export_takes_the_memory_of_a_tensor_not_of_the_model(tmp_path):
    def run(what):
        command = [sys.executable, "-c", PEAK, str(tmp_path), what]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout

    run("write")
    grown_kib = int(run("export"))
    assert grown_kib < 64 * 1024  # of 192 MiB
    assert torch.equal(load_file(tmp_path / "model.safetensors")["layers.7"], torch.full((2 << 20,), 7.0))
