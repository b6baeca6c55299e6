"""checkpoint verify, diff and gc: what differs is found to the bit, and what is needed is never deleted."""

import math
import subprocess
import sys

import pytest
import torch
from checkpoint_states import state_of

from shoal.checkpoint import Writer, collect, compare, list_checkpoints, write
from shoal.errors import CheckpointError
from shoal.verbs.checkpoint import difference, make_room, verified

FACTS = {"job": {"lr": 1e-3}, "layout": "lone"}


def saved(folder, step=1, change=lambda tree: None, **facts):
    tree = state_of(step)
    change(tree)
    write(folder, tree, step=step, **{**FACTS, **facts})
    return folder


def damage(path):
    file = next(file for file in path.iterdir() if file.suffix == ".safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_equal_checkpoints_are_equal_whatever_layout_saved_them(tmp_path):
    found = compare(saved(tmp_path / "a"), saved(tmp_path / "b", layout="fsdp2"))
    assert found.is_same
    assert found.num_equal > 3
    assert difference(tmp_path / "a", tmp_path / "b")["exit_code"] == 0


def test_one_flipped_value_is_found_with_its_place_and_size(tmp_path):
    def change(tree):
        tree["model"]["blocks.0.weight"][17] = 3.0

    found = compare(saved(tmp_path / "a"), saved(tmp_path / "b", change=change))
    (tensor,) = found.tensors
    assert (tensor.name, tensor.absolute, tensor.relative, tensor.first) == ("model.blocks.0.weight", 2.0, 2.0, (17,))
    told = difference(tmp_path / "a", tmp_path / "b")
    assert told["exit_code"] == 1
    assert "model.blocks.0.weight: differs by 2, 2 of its largest value, at [17]" in told["text"]


def test_values_that_are_no_numbers_are_compared_too(tmp_path):
    def both(tree):
        tree["model"]["blocks.0.weight"][:2] = torch.tensor([math.nan, math.inf])

    def one(tree):
        both(tree)
        tree["model"]["blocks.0.bias"][1] = math.nan

    found = compare(saved(tmp_path / "a", change=both), saved(tmp_path / "b", change=one))
    assert [(tensor.name, tensor.first) for tensor in found.tensors] == [("model.blocks.0.bias", (1,))]


def test_what_only_one_has_and_other_shapes_and_facts_are_told(tmp_path):
    def change(tree):
        tree["model"]["new"] = torch.zeros(2)
        tree["model"]["blocks.0.bias"] = torch.zeros(4)

    found = compare(saved(tmp_path / "a"), saved(tmp_path / "b", step=1, change=change, job={"lr": 2e-3}))
    assert found.facts == ["lr: saved 0.001, now 0.002"]
    assert "model.new: in the second alone" in found.only
    assert any("model.blocks.0.bias" in line and "[3]" in line and "[4]" in line for line in found.only)
    assert not found.is_same


def test_a_damaged_checkpoint_is_compared_with_nothing(tmp_path):
    path = saved(tmp_path / "a")
    (found,) = list_checkpoints(path)
    damage(found.path)
    with pytest.raises(CheckpointError, match="holds no good checkpoint"):
        compare(path, saved(tmp_path / "b"))


def test_every_damaged_file_is_named(tmp_path):
    for step in (1, 2):
        saved(tmp_path, step)
    assert verified(tmp_path)["exit_code"] == 0
    damage(tmp_path / "step_000002")
    told = verified(tmp_path)
    assert told["exit_code"] == 1
    assert told["problems"][str(tmp_path / "step_000001")] == []
    assert "safetensors" in told["problems"][str(tmp_path / "step_000002")][0]
    assert verified(tmp_path / "step_000001")["exit_code"] == 0


def test_the_newest_good_ones_stay_and_a_damaged_one_does_not_count(tmp_path):
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    damage(tmp_path / "step_000004")
    (tmp_path / "step_000009.tmp-3f9a1c").mkdir()
    would = make_room(tmp_path, 2, dry_run=True)
    assert [found.step for found in list_checkpoints(tmp_path)] == [4, 3, 2, 1]
    done = make_room(tmp_path, 2, dry_run=False)
    assert done["removed"] == would["removed"]
    assert done["num_bytes"] == would["num_bytes"] > 0
    assert [found.step for found in list_checkpoints(tmp_path)] == [3, 2]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_nothing_is_deleted_while_a_run_writes(tmp_path):
    for step in (1, 2):
        saved(tmp_path, step)
    command = [sys.executable, "-m", "shoal", "checkpoint", "gc", str(tmp_path)]
    with Writer(tmp_path, keep=2):
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "is being written by another process" in refused.stderr
    assert len(list_checkpoints(tmp_path)) == 2
    assert subprocess.run([*command, "--json"], capture_output=True, check=False).returncode == 0
    assert [found.step for found in list_checkpoints(tmp_path)] == [2]


def test_nothing_is_deleted_where_none_is_good(tmp_path):
    saved(tmp_path, 1)
    damage(tmp_path / "step_000001")
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* is good, so none is deleted"):
        collect(tmp_path, 1)
    assert len(list_checkpoints(tmp_path)) == 1
    with pytest.raises(CheckpointError, match="at least the newest"):
        collect(tmp_path, 0)
    with pytest.raises(CheckpointError, match="no run folder"):
        collect(tmp_path / "none", 1)
