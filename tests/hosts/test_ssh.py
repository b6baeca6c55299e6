"""shoal over real ssh, between hosts with names, networks and processes of their own: the training of one process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from daemons import start_sshd
from netns import Net, why_not
from safetensors.torch import load_file

from shoal import train
from shoal.checkpoint import export

ROOT = Path(__file__).parents[2]
DRILL = pytest.mark.skipif(os.environ.get("SHOAL_DRILL") != "1", reason="longer ones run in make drill (SHOAL_DRILL=1)")
EXACT = ("--set", "precision=fp64", "--steps", "6")

JOB_WITH_FOLDER = """
from dataclasses import dataclass
from pathlib import Path

import torch
from my_job import MyJob
from torch.utils.data import TensorDataset


@dataclass(frozen=True, kw_only=True)
class Elsewhere(MyJob):
    folder: Path = Path("nowhere")

    def data(self):
        return TensorDataset(*torch.load(self.folder / "data.pt"))
"""
SCRIPT = """
import os, socket, sys, torch.distributed as dist
dist.init_process_group("gloo")
told = [None] * dist.get_world_size()
devices = os.environ.get("CUDA_VISIBLE_DEVICES")
own = [dist.get_rank(), socket.gethostname(), os.environ["LOCAL_RANK"], devices, sys.argv[1:]]
dist.all_gather_object(told, own)
if dist.get_rank() == 0:
    print("TOLD", told, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    """Two hosts with sshd; `my_job.py` lies where both see it."""
    if reason := why_not():
        pytest.skip(reason)
    made = Net(2, tmp_path_factory.mktemp("ssh"))
    try:
        start_sshd(made)
        (made.shared / "my_job.py").write_text((ROOT / "examples/my_job.py").read_text())
        yield made
    finally:
        made.close()


def shoal(net: Net, *words: str, timeout: float = 100) -> "subprocess.CompletedProcess[str]":
    """The command line on the first host, by its whole path: no environment is set up there."""
    settings = {"OMP_NUM_THREADS": "1", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "here"}
    return net[0].run(sys.executable, "-m", "shoal", *words, cwd=net.shared, env=settings, timeout=timeout)


def train_alone(folder: Path, name: str, **fields: str) -> None:
    """The same job in this one process."""
    fields |= {"precision": "fp64"}
    assert train(str(folder / "my_job.py"), steps=6, run=str(folder / name), set=fields).exit_code == 0


def assert_same_training(folder: Path, name: str, other: str) -> None:
    """Losses and weights of two runs, in float64."""
    losses, weights = [], []
    for run in (name, other):
        events = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
        losses.append([event["train/loss"] for event in events if "train/loss" in event])
        export(folder / run, folder / f"{run}.safetensors")
        weights.append(load_file(folder / f"{run}.safetensors"))
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[0].items():
        assert value.dtype.itemsize == 8
        assert (value - weights[1][key]).abs().max() < 1e-12, key


def test_two_hosts_train_over_ssh_what_one_process_does(net):
    words = ("--hosts", "h1,h2", "--nproc-per-node", "1", "--run", "two")
    done = shoal(net, "train", "my_job.py", "--layout", "dp2", *EXACT, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done at step 6" in done.stdout
    train_alone(net.shared, "lone")
    assert_same_training(net.shared, "two", "lone")


@pytest.mark.drill
def test_a_plain_script_runs_on_hosts_with_different_numbers_of_processes_and_their_own_devices(net):
    (net.shared / "script.py").write_text(SCRIPT)
    done = shoal(net, "launch", "--hosts", "h1:2,h2:1", "script.py", "--", "--hosts", "x", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD")]
    own = ["--hosts", "x", "--dry-run"]
    rows = [[0, "h1", "0", "of-h1", own], [1, "h1", "1", "of-h1", own], [2, "h2", "0", "of-h2", own]]
    assert told == f"TOLD {rows}"


@DRILL
@pytest.mark.drill
def test_three_ranks_on_two_hosts_train_what_one_process_does(net):
    words = ("--hosts", "h1:2,h2:1", "--set", "batch_size=33")
    done = shoal(net, "train", "my_job.py", "--layout", "dp3", *EXACT, *words, "--run", "three")
    assert done.returncode == 0, done.stdout + done.stderr
    train_alone(net.shared, "lone33", batch_size="33")
    assert_same_training(net.shared, "three", "lone33")


@DRILL
@pytest.mark.drill
def test_data_lie_at_another_path_on_each_host(net):
    (net.shared / "elsewhere.py").write_text(JOB_WITH_FOLDER)
    points = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    torch.save((points, (points.norm(dim=1) > 1).long()), net.shared / "data.pt")
    for host in net:  # on each a disk of its own
        place = f"{net.own}/on_{host.name}"
        host.run("sh", "-c", f"mkdir {place} && cp data.pt {place}", cwd=net.shared, check=True)
    paths = [f"--set=folder@h{k}={net.own}/on_h{k}" for k in (1, 2)]
    words = ("train", "elsewhere.py", "--layout", "dp2", "--hosts", "h1,h2", "--run", "apart")
    done = shoal(net, *words, "--steps", "3", *paths)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((net.shared / "apart/run.json").read_text())
    assert told["job"]["folder"] == "nowhere"
    assert ["set.folder@h2", f"{net.own}/on_h2", "--set"] in told["settings"]
    on = shoal(net, *words, "--steps", "4", "--resume", "auto", *paths)
    assert "resumed from" in on.stdout, on.stdout + on.stderr
    refused = shoal(net, *words[:-1], "other", "--steps", "3", paths[0], f"--set=folder@h3={net.own}/on_h2")
    assert refused.returncode == 2
    assert "--set ...@h3=...: no rank runs on a host of that name; they run on h1, h2" in refused.stderr
    missing = shoal(net, *words[:-1], "other", "--steps", "3", paths[0], f"--set=folder@h2={net.own}/on_h1")
    assert missing.returncode == 2
    assert "there is no such path on this host (h2)" in missing.stderr
