"""`shoal why` of a run whose files something has damaged: a lesson that names it, or what is known without it."""

import json
import os
import random
from pathlib import Path

import pytest
from report_samples import run_folder
from test_report_damage import change

from shoal.errors import LaunchError, ShoalError
from shoal.launch.outcome import Failure, Outcome, keep_failure
from shoal.verbs.why import tell


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    folder = run_folder(tmp_path / "run", "dp2", num_steps=4)
    failure = Failure(rank=1, exit_code=1, type="ValueError", message="no", step=4, at_s=2.0)
    keep_failure(folder, Outcome(exit_code=1, failures=(failure,), others=("rank 0: was ended",)), 1.0)
    os.utime(folder / "failure.json", (4e9, 4e9))  # later than run.json
    return folder


def test_a_failure_that_is_damaged_is_named_with_its_field(failed: Path) -> None:
    assert "ValueError: no" in str(tell(failed))
    told = json.loads((failed / "failure.json").read_text())
    told["failures"][0]["rank"] = "one"
    (failed / "failure.json").write_text(json.dumps(told))
    os.utime(failed / "failure.json", (4e9, 4e9))
    with pytest.raises(LaunchError, match=r"failure\.json is damaged: failures\.0\.rank: "):
        tell(failed)


def test_whatever_is_damaged_is_a_lesson_or_told_without(failed: Path) -> None:
    whole = {name: (failed / name).read_text() for name in ("failure.json", "run.json")}
    for seed in range(20):
        chance = random.Random(seed)
        name = chance.choice(sorted(whole))
        told = json.loads(whole[name])
        change(told, chance)
        (failed / name).write_text(json.dumps(told))
        os.utime(failed / "failure.json", (4e9, 4e9))
        try:
            lesson = str(tell(failed)) and ""
        except ShoalError as error:
            lesson = str(error)
        assert not lesson or name in lesson, seed
        (failed / name).write_text(whole[name])
