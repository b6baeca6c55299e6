"""shoal train --hosts: the same command on each host. ssh is a stand-in that starts a bare shell, as sshd does."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_nodes import free_port, gone

from shoal.errors import LaunchError
from shoal.launch.hosts import Host, commands, parse, without_hosts

# Options of ssh, then the host, then one line for its shell, which knows nothing of the caller's environment.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
[ "$host" = nowhere ] && exit 255
echo "$host $*" >> {folder}/called
exec env -i PATH=/usr/bin:/bin HOME=/ sh -c "$*"
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH.format(folder=tmp_path))
    ssh.chmod(0o755)
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


def start(folder: Path, path: str, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", "train", *words, "--master-port", str(free_port())],
        cwd=folder,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_job_runs_on_two_hosts(tmp_path, path):
    run = start(tmp_path, path, "digits", "--layout", "dp2", "--steps", "4", "--hosts", "127.0.0.1,localhost")
    out, err = run.communicate(timeout=90)
    assert run.returncode == 0, out + err
    assert "done at step 4" in out
    called = (tmp_path / "called").read_text()
    assert len(called.splitlines()) == 2
    assert "SHOAL_SECRET=" not in called  # it goes through stdin


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_whoever_ends_it_here_ends_it_there(tmp_path, path, end):
    words = ("digits", "--layout", "dp2", "--steps", "100000", "--hosts", "127.0.0.1,localhost", "--run", "runs/x")
    run = start(tmp_path, path, *words)
    until = time.monotonic() + 60
    while not (tmp_path / "runs/x/metrics.jsonl").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    there = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(end)
    run.communicate(timeout=40)
    assert run.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL)
    assert gone(there)


def test_a_host_that_cannot_be_reached_or_has_no_such_python_is_named(tmp_path, path):
    for host, said in (
        ("nowhere", "nowhere: ssh could not connect"),
        ("localhost=/none/python", "there is no /none/python"),
    ):
        run = start(tmp_path, path, "digits", "--layout", "dp2", "--steps", "4", "--hosts", f"127.0.0.1,{host}")
        _, err = run.communicate(timeout=90)
        assert run.returncode not in (0, None)
        assert said in err


def test_a_dry_run_prints_the_commands_and_starts_nothing(tmp_path, path):
    words = ("digits", "--layout", "dp4", "--nproc-per-node", "2", "--set", "lr=0.1", "--hosts", "a,u@b", "--dry-run")
    run = start(tmp_path, path, *words)
    out, _ = run.communicate(timeout=30)
    assert run.returncode == 0
    lines = [shlex.split(line) for line in out.splitlines()]
    assert [line[-2] for line in lines] == ["a", "u@b"]
    assert all("--layout dp4 --nproc-per-node 2 --set lr=0.1" in line[-1] for line in lines)
    assert "--nnodes 2 --node-rank 1 --master-addr a" in lines[1][-1]
    assert not (tmp_path / "called").exists()


def test_words_with_spaces_and_quotes_arrive_as_they_are():
    words = ["train", "my job.py", "--set", 'text=it\'s "so" $HOME']
    (call,) = commands([Host("a", "/a python/bin")], words, folder=Path("/a folder"))
    told = shlex.split(call[-1].partition("exec env ")[2])
    assert told[told.index("/a python/bin") : told.index("--nnodes")] == ["/a python/bin", "-m", "shoal", *words]
    assert "cd '/a folder'" in call[-1]


def test_hosts_are_named_once_each():
    assert parse("a, b=/opt/py") == [Host("a", sys.executable), Host("b", "/opt/py")]
    for text, reason in (
        ("a,a", "names a twice"),
        ("a,,b", "joined by commas"),
        ("-oProxyCommand=x", "names that ssh"),
    ):
        with pytest.raises(LaunchError, match=reason):
            parse(text)
    words = ["train", "digits", "--hosts", "a,b", "--steps", "4", "--dry-run", "--hosts=c"]
    assert without_hosts(words) == ["train", "digits", "--steps", "4"]
