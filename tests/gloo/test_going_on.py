"""Machines that are lost, come back, or were never gone: here parents of one machine. The training stays the same."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from forked import Parent

from shoal.checkpoint import newest_good, read
from shoal.history import NAME, committed, problems

STEPS = 40
LIMIT_S = 90
JOB = f"""
import time
from dataclasses import dataclass
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from shoal import Job, mean_loss

@dataclass(frozen=True, kw_only=True)
class Slow(Job):
    batch_size: int = 6
    steps: int = {STEPS}
    precision: str = "fp64"

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def data(self):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(22, 4, generator=generator, dtype=torch.float64)
        return TensorDataset(inputs, torch.randint(0, 3, (22,), generator=generator))

    def inputs(self, batch):
        pace = Path("pace_s")  # a file of the test's; it may change
        time.sleep(float(pace.read_text()) if pace.exists() else 0)
        return super().inputs(batch)

    def loss(self, output, batch):
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.01)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Host:
    """One parent; `said` is all that it has printed."""

    def __init__(self, folder: Path, rank: int, num: int, port: int, *words: str) -> None:
        meet = f"--nnodes {num} --node-rank {rank} --master-addr 127.0.0.1 --master-port {port}".split()
        self.file = folder / f"node_{rank}_{time.monotonic_ns()}.txt"
        options = ["train", "job.py", "--run", "run", "--save-every", "5"]
        self.process = Parent([*options, *meet, *words], folder, self.file)

    @property
    def said(self) -> str:
        return self.file.read_text()

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def pace(folder: Path, seconds: float) -> None:
    """What a step takes at least, from now on."""
    new = folder / "pace_s.new"
    new.write_text(str(seconds))
    new.replace(folder / "pace_s")


@pytest.fixture
def hosts(tmp_path):
    """Parents of one run; what is left of them at the end is killed."""
    (tmp_path / "job.py").write_text(JOB)
    pace(tmp_path, 0.1)
    port, made = free_port(), []

    def start(num: int, *words: str, only: int | None = None) -> list[Host]:
        new = [Host(tmp_path, rank, num, port, *words) for rank in range(num) if only in (None, rank)]
        made.extend(new)
        return new

    yield start
    for host in made:
        if host.process.poll() is None:
            host.process.send_signal(signal.SIGCONT)
            host.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The state that one process comes to."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "job.py").write_text(JOB)
    assert Parent(["train", "job.py", "--run", "run"], folder, folder / "said").wait(LIMIT_S) == 0
    return folder / "run"


def step_of(run: Path) -> int:
    rows = committed(run / NAME)
    return rows[-1].step if rows else 0


def until(holds: Callable[[], bool], hosts: list[Host]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit, "\n".join(host.said for host in hosts)
        time.sleep(0.02)


def until_step(run: Path, step: int, hosts: list[Host]) -> None:
    until(lambda: step_of(run) >= step, hosts)


def assert_same(run: Path, alone: Path, tolerance: float = 1e-12) -> None:
    ours, theirs = (read(newest_good(folder)[0].path).tree for folder in (run, alone))
    assert ours["position"] == theirs["position"]
    for name, tensor in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], tensor, rtol=tolerance, atol=tolerance)
    rows = committed(run / NAME)
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert problems(rows) == []


def went_on_after(run: Path, hosts: list[Host], harm: Callable[[], None]) -> None:
    """Waits until a step of a later generation is done. In how many seconds: docs/faults.md."""
    first = committed(run / NAME)[-1].generation
    harm()
    until(lambda: any(row.generation > first for row in committed(run / NAME)), hosts)


@pytest.mark.drill
def test_a_rank_that_is_killed_on_one_host_is_started_again_on_all(tmp_path, hosts, alone):
    pair = hosts(2, "--layout", "dp2", "--max-restarts", "2")
    until_step(tmp_path / "run", 6, pair)
    went_on_after(tmp_path / "run", pair, max(pair[1].ranks(), key=lambda process: process.memory_info().rss).kill)
    pace(tmp_path, 0)
    assert [host.wait() for host in pair] == [0, 0], pair[0].said + pair[1].said
    assert all("restart 1: rank 1 failed first" in host.said for host in pair), pair[0].said + pair[1].said
    assert_same(tmp_path / "run", alone)


@pytest.mark.drill
def test_a_host_that_is_lost_ends_the_run_that_is_not_elastic(tmp_path, hosts):
    pair = hosts(2, "--layout", "dp2", "--max-restarts", "2")
    until_step(tmp_path / "run", 2, pair)
    pair[1].kill()
    assert pair[0].wait() == 1
    assert "node 1" in pair[0].said
    assert "is gone" in pair[0].said
    assert "--elastic" in pair[0].said


def test_the_others_go_on_without_a_host_that_is_lost_and_let_it_in_when_it_comes_back(tmp_path, hosts, alone):
    words = ("--layout", "dp3", "--elastic", "1:3")
    first, second, third = trio = hosts(3, *words)
    until_step(tmp_path / "run", 6, trio)
    went_on_after(tmp_path / "run", trio, second.kill)
    pace(tmp_path, 1)  # it takes seconds to come back
    (again,) = hosts(3, *words, only=1)
    until(lambda: "machines came" in first.said, [*trio, again])
    pace(tmp_path, 0)
    assert [host.wait() for host in (first, again, third)] == [0, 0, 0], "\n".join(host.said for host in trio)
    lost, came = [line for line in first.said.splitlines() if line.startswith("restart ")]
    assert "node 1" in lost
    assert "is gone; 2 ranks go on from step " in lost  # 5, or later where the next host had its copies
    assert "machines came; 3 ranks go on from step" in came
    assert "no step lost" in came
    assert "stopped on request" not in first.said  # nor a picture: it has not ended
    assert_same(tmp_path / "run", alone)


@pytest.mark.drill
def test_the_others_go_on_without_the_host_that_leads(tmp_path, hosts, alone):
    trio = hosts(3, "--layout", "dp3", "--elastic", "1:3")
    until_step(tmp_path / "run", 6, trio)
    went_on_after(tmp_path / "run", trio, trio[0].kill)
    pace(tmp_path, 0)
    assert [host.wait() for host in trio[1:]] == [0, 0], "\n".join(host.said for host in trio)
    for host in trio[1:]:
        told = [line for line in host.said.splitlines() if line.startswith("restart ")]
        assert len(told) == 1
        assert "restart 1: node 0" in told[0]
        assert "2 ranks go on from step " in told[0]
    assert_same(tmp_path / "run", alone)


@pytest.mark.drill
def test_of_two_parts_that_do_not_hear_each_other_one_goes_on(tmp_path, hosts, alone):
    """The leader is stopped, not gone: when it wakes up, the run is another's."""
    pair = hosts(2, "--layout", "dp2", "--elastic", "1:2")
    until_step(tmp_path / "run", 6, pair)
    everyone = [pair[0].process.pid, *(rank.pid for rank in pair[0].ranks())]

    def stop() -> None:
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)

    went_on_after(tmp_path / "run", pair, stop)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    assert pair[0].wait() != 0, pair[0].said
    pace(tmp_path, 0)
    assert pair[1].wait() == 0, pair[1].said
    assert_same(tmp_path / "run", alone)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["world"]["size"] == 1
