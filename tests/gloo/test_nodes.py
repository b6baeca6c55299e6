"""One run on two machines, here two parents of this one: the same training, and nobody left when one of them goes."""

import json
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from forked import Parent

from shoal.verbs.checkpoint import difference

SLOW_TO_SAVE = """
import os, time
from dataclasses import dataclass
from shoal.checkpoint import Writer
from shoal.models.digits import Digits

def late(*args, _submit=Writer.submit, **options):
    _submit(*args, **options)
    time.sleep(3 if os.environ["RANK"] == "0" else 0)  # the other machine's ranks have ended by then

Writer.submit = late

@dataclass(frozen=True, kw_only=True)
class Slow(Digits):
    pass
"""
SCRIPT = """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
seen = torch.ones(1)
dist.all_reduce(seen)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "on", os.environ["GROUP_RANK"], int(seen), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Node:
    """One parent; `said` is all that it has printed."""

    def __init__(self, folder: Path, rank: int, port: int, *words: str) -> None:
        meet = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        self.file = folder / f"node_{rank}.txt"
        self.process = Parent([words[0], *meet, *words[1:]], folder, self.file)

    @property
    def said(self) -> str:
        return self.file.read_text()

    def wait(self) -> int:
        return self.process.wait(90)

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def two(folder: Path, *words: str) -> tuple[Node, Node]:
    port = free_port()
    return Node(folder, 0, port, *words), Node(folder, 1, port, *words)


def in_step(folder: Path, nodes: tuple[Node, Node]) -> None:
    """Wait until the run has logged a step."""
    until = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        assert time.monotonic() < until, nodes[0].said + nodes[1].said
        time.sleep(0.1)


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_two_nodes_train_what_one_does(tmp_path):
    options = ("train", "digits", "--steps", "4")
    nodes = two(tmp_path, *options, "--layout", "dp2", "--run", "runs/two")
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].said + nodes[1].said
    assert Parent([*options, "--layout", "dp2", "--run", "runs/one"], tmp_path, tmp_path / "one.txt").wait(90) == 0
    told = difference(tmp_path / "runs/one", tmp_path / "runs/two")
    assert told["exit_code"] == 0, told["text"]
    assert json.loads((tmp_path / "runs/two/run.json").read_text())["world"]["size"] == 2


def test_a_plain_script_runs_on_two_nodes_with_different_numbers_of_processes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    port = free_port()
    nodes = [
        Node(tmp_path, rank, port, "launch", "--log-dir", "logs", "--nproc-per-node", str(2 - rank), "script.py")
        for rank in (0, 1)
    ]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].said + nodes[1].said
    assert "rank 0 of 3 on 0 3" in nodes[0].said
    assert "rank 2 of 3 on 1 3" in (tmp_path / "logs" / "rank_2.log").read_text()


def test_other_code_on_a_node_is_refused_before_anything_starts(tmp_path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "script.py").write_text(SCRIPT + f"# {rank}\n")
    port = free_port()
    nodes = [Node(tmp_path / str(rank), rank, port, "launch", "script.py") for rank in (0, 1)]
    assert [node.wait() for node in nodes] == [2, 2]
    assert all("script.py differs" in node.said for node in nodes)


def test_a_rank_that_is_killed_is_named_on_both_nodes(tmp_path):
    nodes = two(tmp_path, "train", "digits", "--steps", "100000", "--layout", "dp2", "--run", "runs/killed")
    in_step(tmp_path / "runs/killed", nodes)
    ranks = [process for node in nodes for process in node.ranks()]
    victim = max(nodes[1].ranks(), key=lambda process: process.memory_info().rss)
    victim.send_signal(signal.SIGKILL)
    assert all(code not in (0, None) for code in (nodes[0].wait(), nodes[1].wait()))
    for node in nodes:
        assert "rank 1 of 2 failed first" in node.said, node.said
        assert "killed by SIGKILL" in node.said
    assert "on node 1" in nodes[0].said
    assert gone(ranks)


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.drill)])
def test_a_parent_that_is_killed_takes_the_run_with_it_and_leaves_no_orphan(tmp_path, killed):
    nodes = two(tmp_path, "train", "digits", "--steps", "100000", "--layout", "dp2", "--run", "runs/gone")
    in_step(tmp_path / "runs/gone", nodes)
    ranks = [process for node in nodes for process in node.ranks()]
    nodes[killed].process.kill()
    nodes[killed].wait()
    other = nodes[1 - killed]
    assert other.wait() not in (0, None)
    assert f"node {killed}" in other.said
    assert "is gone" in other.said
    assert gone(ranks)


@pytest.mark.parametrize("asked", [0, pytest.param(1, marks=pytest.mark.drill)])
def test_sigusr1_on_one_node_saves_and_ends_both(tmp_path, asked):
    """As a batch system sends it, to one machine earlier than to the next: all have the time to save."""
    (tmp_path / "slow.py").write_text(SLOW_TO_SAVE)
    words = ("slow.py", "--steps", "100000", "--save-every", "1000000", "--layout", "dp2", "--run", "runs/asked")
    nodes = two(tmp_path, "train", *words)
    in_step(tmp_path / "runs/asked", nodes)
    # Slurm signals every process of a step, not the parent alone: the ranks, and whoever serves the store.
    for process in (*nodes[asked].ranks(), nodes[asked].process):
        process.send_signal(signal.SIGUSR1)
    assert [node.wait() for node in nodes] == [143, 143], nodes[0].said + nodes[1].said
    (saved,) = (tmp_path / "runs/asked/checkpoints").glob("step_*")
    assert f"stopped on request at step {int(saved.name.removeprefix('step_'))}" in nodes[0].said


@pytest.mark.drill
def test_ctrl_c_on_one_node_ends_both(tmp_path):
    nodes = two(tmp_path, "train", "digits", "--steps", "100000", "--layout", "dp2", "--run", "runs/stopped")
    in_step(tmp_path / "runs/stopped", nodes)
    ranks = [process for node in nodes for process in node.ranks()]
    nodes[1].process.send_signal(signal.SIGINT)
    assert nodes[1].wait() == 130
    assert nodes[0].wait() != 0
    assert "was asked to end" in nodes[0].said
    assert gone(ranks)


def test_a_rank_that_stands_still_on_another_node_is_named_with_its_host(tmp_path):
    nodes = two(tmp_path, "train", "digits", "--steps", "100000", "--layout", "dp2", "--run", "runs/stopped")
    in_step(tmp_path / "runs/stopped", nodes)
    time.sleep(1.0)  # of steps, so that it is known what is usual
    victim = max(nodes[1].ranks(), key=lambda process: process.memory_info().rss)
    victim.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    while "stands still" not in nodes[0].said:
        assert time.monotonic() < stopped + 20, nodes[0].said
        time.sleep(0.1)
    victim.send_signal(signal.SIGCONT)
    while "goes on" not in nodes[0].said:
        assert time.monotonic() < stopped + 40, nodes[0].said
        time.sleep(0.1)
    nodes[0].process.send_signal(signal.SIGINT)
    assert all(node.wait() for node in nodes)
    host = socket.gethostname()
    assert f"rank 1 of 2 on node 1 ({host}) stands still: " in nodes[0].said
    assert f"kill -CONT {victim.pid}, there, lets it go on" in nodes[0].said
    assert "\nrank 0: waits in " in nodes[0].said
