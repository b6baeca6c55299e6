"""Exported weights load in plain PyTorch under the user's own names; a resume that would mix things up is refused."""

import copy
import errno
import os

import pytest
import torch
from checkpoint_states import same, state_of
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from shoal.checkpoint import export, identity_difference, read, write
from shoal.checkpoint.state import capture, restore
from shoal.errors import CheckpointError

FACTS = {"job": {}, "layout": "lone"}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


@pytest.fixture
def trained(tmp_path):
    model = Tied()
    model(torch.arange(7))  # moves the running statistics
    write(tmp_path / "run" / "checkpoints", {"model": model.state_dict()}, step=5, **FACTS)
    return model, tmp_path / "run"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_the_export_holds_every_name_of_the_state_dict_exactly(trained, tmp_path, suffix):
    model, run = trained
    to = tmp_path / "out" / f"model{suffix}"
    exported = export(run, to)
    loaded = load_file(to) if suffix == ".safetensors" else torch.load(to, weights_only=True)
    wanted = model.state_dict()
    assert set(loaded) == set(wanted)
    assert all(same(loaded[name], wanted[name]) for name in wanted)
    assert (exported.step, exported.num_tensors, exported.num_bytes) == (5, len(wanted), to.stat().st_size)
    fresh = Tied()
    fresh.load_state_dict(loaded)
    assert fresh.head.weight is fresh.embed.weight
    assert same(dict(fresh.state_dict()), dict(wanted))
    assert sorted(path.name for path in to.parent.iterdir()) == [to.name]


def test_a_safetensors_export_says_that_it_is_of_pytorch(trained, tmp_path):
    export(trained[1], tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_one_checkpoint_can_be_exported_too(trained, tmp_path):
    model, run = trained
    write(run / "checkpoints", {"model": Tied().state_dict()}, step=6, **FACTS)
    assert export(run / "checkpoints" / "step_000005", tmp_path / "old.pt").step == 5
    assert same(torch.load(tmp_path / "old.pt", weights_only=True)["embed.weight"], model.embed.weight.data)
    assert export(run, tmp_path / "new.pt").step == 6


def test_a_damaged_newer_checkpoint_is_passed_over_and_named(trained, tmp_path):
    _, run = trained
    (write(run / "checkpoints", {"model": {}}, step=6, **FACTS) / "manifest.json").write_text("{}")
    exported = export(run, tmp_path / "model.pt")
    assert exported.step == 5
    assert "step_000006" in exported.skipped[0]


def test_an_existing_file_is_overwritten_only_by_force(trained, tmp_path):
    _, run = trained
    to = tmp_path / "model.pt"
    to.write_text("precious")
    with pytest.raises(CheckpointError, match=r"exists.*--force"):
        export(run, to)
    assert to.read_text() == "precious"
    export(run, to, force=True)
    assert "embed.weight" in torch.load(to, weights_only=True)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_failing_export_leaves_the_file_that_was_there(trained, tmp_path, monkeypatch, suffix):
    _, run = trained
    to = tmp_path / f"model{suffix}"
    to.write_text("precious")

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="was not written: No space left on device"):
        export(run, to, force=True)
    assert to.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == [to.name, "run"]


def test_exports_that_cannot_be_are_refused(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    write(checkpoints, {"model": {"phase": torch.ones(1, dtype=torch.complex128), "note": "x"}}, step=1, **FACTS)
    with pytest.raises(CheckpointError, match=r"'\.onnx'"):
        export(checkpoints, tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match=r"phase is torch.complex128.*\.pt"):
        export(checkpoints, tmp_path / "model.safetensors")
    export(checkpoints, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=True)["note"] == "x"
    write(checkpoints, {"step": 2}, step=2, **FACTS)
    with pytest.raises(CheckpointError, match="holds no model"):
        export(checkpoints, tmp_path / "none.pt")
    assert not (tmp_path / "none.pt").exists()


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ([], "is not there. Name a run's folder, such as runs/digits, or one checkpoint of it."),
        (["notes.txt"], "has no good checkpoint to export: .*notes.txt is foreign"),
        (["checkpoints/.lock"], "is the folder of a run that has saved no checkpoint. Train in it"),
        (["run.json", "metrics.jsonl", "logs/rank_0.log"], "saved no checkpoint. .*shoal train JOB --run .*/run;"),
        (["checkpoints/step_000003/data"], "has no good checkpoint to export: .*step_000003 is no checkpoint"),
    ],
)
def test_a_place_without_a_checkpoint_is_said_to_be_what_it_is(tmp_path, made, told):
    for name in made:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(CheckpointError, match=told) as caught:
        export(tmp_path / "run", tmp_path / "model.pt")
    assert str(caught.value).startswith(f"{tmp_path / 'run'} ")
    assert not (tmp_path / "model.pt").exists()


# ---- resume through the disk ----


def train(model, optimizer, scheduler, steps):
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def assemble(seed, optimizer="AdamW"):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    kwargs = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **kwargs)
    return model, made, torch.optim.lr_scheduler.StepLR(made, 2)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad", "NAdam"])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resume_from_disk_is_bit_equal_to_the_uninterrupted_training(tmp_path, optimizer, stop):
    """D065: step counters come back as they were; none is advanced to allocate state."""
    whole = assemble(0, optimizer)
    train(*whole, range(6))
    first = assemble(0, optimizer)
    train(*first, range(stop))
    path = write(tmp_path, capture(*first, None), step=stop, **FACTS)
    second = assemble(1, optimizer)
    tree = read(path).tree
    restore(tree, *second, None)
    assert same(capture(*second, None), capture(*first, None))
    train(*second, range(stop, 6))
    assert same(capture(*second, None), capture(*whole, None))


def test_parameters_swapped_in_the_optimizer_are_not_given_each_others_moments(tmp_path):
    """D128: state is kept by name, so another order is refused instead of exchanged."""
    model, optimizer, scheduler = assemble(0)
    train(model, optimizer, scheduler, range(2))
    tree = read(write(tmp_path, capture(model, optimizer, scheduler, None), step=2, **FACTS)).tree
    assert set(tree["optimizer"]["state"]) == {name for name, _ in model.named_parameters()}
    swapped = torch.optim.AdamW(reversed(list(model.parameters())), lr=0.01)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match="another order"):
        restore(tree, model, swapped, None, None)
    assert not swapped.state
    assert same(model.state_dict(), before)


def test_a_checkpoint_of_another_model_is_refused_by_names(tmp_path):
    """D128."""
    model, optimizer, scheduler = assemble(0)
    tree = read(write(tmp_path, capture(model, optimizer, scheduler, None), step=0, **FACTS)).tree
    larger = nn.Sequential(*model, nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match=r"lacks \['3.bias', '3.weight'\]"):
        restore(tree, larger, torch.optim.AdamW(larger.parameters()), None, None)


@pytest.mark.parametrize(
    ("saved", "current", "lines"),
    [
        ({"lr": 1e-3}, {"lr": 1e-3}, []),
        ({"lr": 1e-3}, {"lr": 3e-3}, ["lr: saved 0.001, now 0.003"]),
        ({"a": 1, "b": 2}, {"b": 2, "c": 3}, ["a: saved 1, now absent", "c: not saved, now 3"]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["a.c: saved 2, now 3"]),
        ({"a": (1, 2)}, {"a": [1, 2]}, []),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a: saved [1, 2], now [1, 3]"]),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": float("nan")}, {"a": 1.0}, ["a: saved nan, now 1.0"]),
        ({"a": True}, {"a": 1}, ["a: saved True, now 1"]),
        ({"a": None}, {}, ["a: saved None, now absent"]),
        ({"a": 1}, {"a": 1.0}, []),
    ],
)
def test_the_differing_fields_of_two_jobs_are_listed(saved, current, lines):
    assert identity_difference(saved, current) == lines


def test_the_identity_comes_back_as_it_was_given(tmp_path):
    job = {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "clip": float("inf"),
        "name": "é\ud800",
        "seed": 2**70,
        "plan": {"*": None},
    }
    assert same(read(write(tmp_path, state_of(1), step=1, job=job, layout="dp2")).manifest.job, job)
