"""Harm that is done to a run: it is named, and nothing is lost; and the drill sees it where something is."""

import json
import shutil
from pathlib import Path

import pytest

from shoal.errors import LaunchError
from shoal.history import NAME as HISTORY
from shoal.verbs.drill import damage
from shoal.verbs.drill.command import Card, Row, drill, undisturbed
from shoal.verbs.drill.faults import FAULTS
from shoal.verbs.drill.follow import Measured, SilentError
from shoal.verbs.drill.trial import Watched

# What no other test does to a run; `make drill` does all, often.
TRIED = ("a rank that leaves with 0", "a gradient that is not finite")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in TRIED], ids=lambda fault: fault.name)
def test_after_harm_a_run_ends_as_if_nothing_had_happened(fault, reference, tmp_path):
    found = fault.run(tmp_path, reference, 7)
    assert found.lost is not None
    assert found.lost <= 20


@pytest.mark.parametrize("name", damage.DAMAGES)
def test_every_damage_to_a_checkpoint_is_found(name, reference, tmp_path):
    for seed in range(25):
        damage.run(name, tmp_path / str(seed), reference, seed)


def test_damage_that_nobody_sees_would_be_told(reference, tmp_path, monkeypatch):
    monkeypatch.setitem(damage.DAMAGES, "a missing file", lambda folder, chance: None)
    with pytest.raises(SilentError, match="a missing file was not seen"):
        damage.run("a missing file", tmp_path, reference, 0)


@pytest.fixture
def copied(reference, tmp_path):
    shutil.copytree(reference.parent, tmp_path / "copy")
    return Watched(tmp_path / "copy")


def test_a_run_is_as_it_must_be_where_all_is_the_same(copied, reference):
    assert copied.wrong(reference) == ""
    assert (copied.step, copied.generation) == (120, 1)


def test_a_sample_that_is_lost_or_comes_twice_is_seen(copied, reference):
    path = copied.run / HISTORY
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:50] + lines[51:]))
    assert "follows step" in copied.wrong(reference)
    row = json.loads(lines[50])
    path.write_text("".join([*lines[:50], json.dumps({**row, "first": row["first"] + 1}) + "\n", *lines[51:]]))
    assert "begins at sample" in copied.wrong(reference)


def test_another_end_is_seen(copied, reference):
    for step in ("step_000120", "step_000100"):
        shutil.rmtree(copied.run / "checkpoints" / step)
    assert "is off by" in copied.wrong(reference)
    assert copied.wrong(reference, relative=1e3).startswith("step: 80 and 120")


def test_the_card_counts_and_says_what_was_wrong():
    good, bad = Measured(told_s=0.5, again_s=2.0, lost=1), SilentError("seed 3: w is off")
    card = Card([Row("a", [good, Measured(told_s=0.25, lost=0)], []), Row("b", [good], [str(bad)], num_silent=1)])
    assert card.exit_code == 1
    assert card.table()[1] == ("a", "2 of 2", "375 ms (500 ms)", "2 s (2 s)", "0 (1)")
    assert str(card).endswith(
        "b: seed 3: w is off\n4 trials, 1 not as they must be, 1 silent (ended with 0, and wrong)"
    )
    assert Card([Row("a", [good], [])]).exit_code == 0


def test_the_drill_refuses_a_name_that_is_no_fault():
    with pytest.raises(LaunchError, match="no fault is named"):
        drill(say=print, only="earthquake")
