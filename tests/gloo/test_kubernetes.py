"""The command inside the manifest, run with the environment that the training operator gives to each pod."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from forked import run, well
from test_nodes import free_port

from shoal.launch.asked import Asked
from shoal.launch.kubernetes import manifest
from shoal.verbs.checkpoint import difference

ROOT = Path(__file__).parents[2]


def pods(text: str) -> list[list[str]]:
    """The command of each pod, the master's first."""
    replicas = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"].values()
    found = [(each["template"]["spec"]["containers"][0], each["replicas"]) for each in replicas]
    return [[*container["command"], *container["args"]] for container, number in found for _ in range(number)]


def of_operator(rank: int, num_pods: int, port: int) -> dict[str, str]:
    """What it sets where nprocPerNode is not given: newer ones say PET_* too."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(num_pods)}
    return told | {"PYTHONUNBUFFERED": "1", "PET_NNODES": str(num_pods), "PET_NODE_RANK": str(rank)}


def start(command: list[str], folder: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """As the kubelet does: $(NAME) is the variable's value, $$(NAME) the text $(NAME)."""
    words = [
        re.sub(r"\$?\$\((\w+)\)", lambda m: m[0][1:] if m[0].startswith("$$") else environment[m[1]], word)
        for word in command
    ]
    return subprocess.Popen(
        words,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("num_pods", [1, pytest.param(2, marks=pytest.mark.drill)])
def test_pods_open_one_world_and_train_what_a_machine_does(tmp_path, num_pods):
    processes = 4 // num_pods
    (tmp_path / "my_job.py").write_text((ROOT / "examples/my_job.py").read_text())
    asked = Asked.of(
        str(tmp_path / "my_job.py"),
        ["--layout", "dp4", "--steps", "4", "--run", "pods"],
        nnodes=str(num_pods),
        processes=str(processes),
        python=sys.executable,
    )
    port = free_port()
    started = [
        start(command, tmp_path, of_operator(rank, num_pods, port))
        for rank, command in enumerate(pods(manifest(asked, image="image")))
    ]
    assert len(started) == num_pods
    said = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0] * num_pods, said
    assert "done at step 4" in said[0]
    well(run("train my_job.py --layout dp4 --steps 4 --run here", tmp_path))
    told = difference(tmp_path / "here", tmp_path / "pods")
    assert told["exit_code"] == 0, told["text"]
