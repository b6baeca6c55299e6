"""How a comparison ends: a layout that fails ends alone, and what was measured until somebody stops it is kept."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from planted import Slow

from shoal.verbs.bench import BenchError, claimed, command, keep

LAYOUTS = ["lone", "dp2", "dp3"]


@dataclass(frozen=True, kw_only=True)
class Breaks(Slow):
    """On rank 1 of two, in its nth forward: an error, or an end without a word."""

    how: str = "raise"
    after: int = 16
    batch_size: int = 6

    def loss(self, output, batch):
        if dist.is_initialized() and dist.get_world_size() == 2 and dist.get_rank() == 1 and self.is_due(output):
            if self.how == "raise":
                raise ValueError("no such sample\nand more of it")
            if self.how == "leave":
                raise SystemExit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(output, batch)

    def is_due(self, output):
        if output.requires_grad:
            calls.append(1)
        return len(calls) > self.after


calls: list[int] = []  # of the process that looks


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", r"ValueError: no such sample \(rank 1, step 13, compute.*, at .*test_bench_ends.py:\d+ in loss\)"),
        ("leave", r"called sys.exit\(0\)"),
        ("kill", "killed by SIGKILL"),
    ],
)
def test_a_layout_that_breaks_in_the_middle_is_a_failed_row_and_the_others_go_on(how, reason, tmp_path, capfd):
    found = command(Breaks(how=how), LAYOUTS, rounds=3, block=2)
    _, failed, _ = found.rows
    assert re.search(reason, failed.error)
    assert "\n" not in failed.error
    assert 0 < len(failed.times_s) < 3  # what it had measured is there
    assert [(row.layout, len(row.times_s)) for row in found.good] == [("lone", 3), ("dp3", 3)]
    assert found.exit_code == 1
    assert f"dp2 failed: {failed.error} (its log: logs/dp2_rank_1.log)" in " ".join(str(found).split())
    assert f"dp2 failed: {failed.error}" in capfd.readouterr().err  # when it happens

    folder = keep(found, tmp_path / "bench")
    rows = csv.DictReader((folder / "bench.csv").read_text().splitlines())
    assert [row["layout"] for row in rows] == ["lone", "dp3"]
    log = (folder / "logs" / failed.log).read_text()
    assert ("and more of it" in log) == (how == "raise")


def test_a_layout_that_breaks_while_worlds_are_made_one_at_a_time_keeps_the_rounds_before():
    found = command(Breaks(after=4), ["lone", "dp2"], rounds=2, block=2, apart=True, quiet=True)
    assert "no such sample" in found.rows[1].error
    assert len(found.rows[0].times_s) == 2


JOB = """
import sys
sys.path[:0] = {path!r}
from planted import Slow

class Mine(Slow):
    pass
"""


@pytest.fixture
def start(tmp_path):
    """`shoal bench` in a process of its own; returns it once its second round has begun."""
    started = []

    def run(*flags):
        (tmp_path / "mine.py").write_text(JOB.format(path=[os.path.dirname(__file__)]))
        words = ["bench", "mine.py:Mine", "--layouts", "lone,dp2", "--rounds", "500", "--block", "2", *flags]
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        lines = iter(process.stderr.readline, b"")
        seen = next((line for line in lines if line.startswith(b"round 2/")), b"")
        assert seen, process.stderr.read()
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.drill)]
)
def test_who_ends_it_early_has_the_rounds_that_are_complete(number, exit_code, start, tmp_path):
    process = start("--run", "here")
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == exit_code, err
    assert time.monotonic() - began < 45
    assert f"Ended early (exit code {exit_code}): the figures are of ".encode() in out
    told = json.loads((tmp_path / "here" / "bench.json").read_text())
    assert told["exit_code"] == exit_code
    rounds = {len(row["times_s"]) for row in told["measured"]}
    assert len(rounds) == 1
    assert 1 <= rounds.pop() < 500
    assert [row["layout"] for row in told["table"]] == ["lone", "dp2"]
    assert (tmp_path / "here" / "bench.csv").exists()
    assert not list((tmp_path / "here").glob(".bench*"))


def test_two_benchmarks_never_share_a_folder(start, tmp_path):
    process = start("--run", "here")
    with pytest.raises(BenchError, match="belongs to a benchmark that runs now"), claimed(tmp_path / "here"):
        pass
    process.kill()
    process.wait()
    with claimed(tmp_path / "here"):  # the kernel has freed it
        pass


def test_a_folder_that_cannot_take_the_files_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "bench.json").touch()
    for folder, reason in ((tmp_path / "file", "cannot be made"), (tmp_path, "holds a run or a benchmark already")):
        with pytest.raises(BenchError, match=reason), claimed(folder):
            pass
    with pytest.raises(BenchError, match="refused later"), claimed(tmp_path / "a" / "b"):
        raise BenchError("refused later")
    assert not (tmp_path / "a").exists()
