"""shoal doctor, whole: on this machine, and over a stand-in for ssh (that of test_hosts)."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_hosts import path as path
from test_nodes import free_port, gone

from shoal.cluster import read_cluster
from shoal.verbs.doctor.checks import CHECKS

LIMIT_S = 100


def doctor(folder: Path, *words: str, env: dict[str, str]) -> tuple[dict[str, Any], int]:
    """Its answer as data, and its exit code."""
    call = [sys.executable, "-m", "shoal", "doctor", *words, "--json"]
    done = subprocess.run(call, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.returncode


def checks(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in told["checks"]}


def test_this_machine_is_examined_with_a_job_and_nothing_is_left(tmp_path, path):
    env = {"PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    before = {process.pid for process in psutil.process_iter()}
    words = ("digits", "--layout", "dp2", "--cluster", "c.toml", "--master-port", str(free_port()))
    told, code = doctor(tmp_path, *words, env=env)
    found = checks(told)
    assert list(found) == [check.name for check in CHECKS]
    assert code == told["exit_code"] in (0, 1), told["checks"]
    assert found["collective"]["found"].startswith("all_reduce over 2 ranks is exact")
    assert "8.0 MiB come back byte for byte" in found["mtu"]["found"]
    assert "GFLOP/s" in found["cpu speed"]["found"]
    assert "3 checkpoints take" in found["space"]["found"]
    assert found["cores"]["found"].endswith("for 2 ranks x 1 threads")
    cluster = read_cluster(tmp_path / "c.toml")
    assert (cluster.nodes, cluster.devices_per_node) == (1, 2)
    assert cluster.intra_node_gb_per_s
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith((".shoal", "runs"))] == []
    new = [process for process in psutil.process_iter() if process.pid not in before]
    assert gone([each for each in new if "shoal.verbs.doctor" in " ".join(_words(each))])


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_two_hosts_over_ssh_are_compared_and_one_that_is_not_there_is_named(tmp_path, path):
    env = {"PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    job = tmp_path / "job.py"
    job.write_text("from shoal.models.digits import Digits\n\n\nclass Mine(Digits):\n    pass\n")
    hosts = "127.0.0.1,localhost,nowhere,u@localhost=/none/python"
    told, code = doctor(tmp_path, "job.py", "--hosts", hosts, "--master-port", str(free_port()), env=env)
    found = checks(told)
    assert code == 2
    assert "nowhere: ssh could not connect" in found["reach"]["found"]
    assert "there is no /none/python" in found["reach"]["found"]
    assert found["ports"]["found"] == "both ways connect"
    assert "all_reduce over 2 ranks is exact" in found["collective"]["found"]
    assert found["job"]["found"].endswith("on all hosts")
    assert found["versions"]["level"] == "ok"
    assert "seen by all hosts" in found["folder"]["found"]
    assert {host["name"] for host in told["facts"]["hosts"]} == {"127.0.0.1", "localhost"}
    called = (tmp_path / "called").read_text()
    assert "shoal.verbs.doctor.agent" in called
    assert "SHOAL_SECRET=" not in called  # it goes through stdin


def test_no_host_at_all_is_told_in_one_line(tmp_path, path):
    told, code = doctor(tmp_path, "--hosts", "nowhere", env={"PATH": path, "HOME": str(tmp_path)})
    assert code == 2
    (check,) = told["checks"]
    assert check["found"].startswith("nowhere: ssh could not connect")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_whoever_ends_it_ends_it_on_all_hosts(tmp_path, path, end):
    call = [sys.executable, "-m", "shoal", "doctor", "--hosts", "127.0.0.1,localhost"]
    env = {"PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(call, cwd=tmp_path, env=env, stdout=quiet, stderr=quiet) as started:
        console, until = psutil.Process(started.pid), time.monotonic() + LIMIT_S
        there: list[psutil.Process] = []
        while not any("shoal.verbs.doctor.rank" in " ".join(_words(each)) for each in there):
            assert time.monotonic() < until
            there = console.children(recursive=True)
            time.sleep(0.05)
        started.send_signal(end)
        assert started.wait(timeout=30) == (130 if end == signal.SIGINT else -signal.SIGKILL)
    assert gone(there)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".shoal")] == []
