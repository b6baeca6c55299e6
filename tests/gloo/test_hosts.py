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
from shoal.launch.hosts import Host, check_words, commands, parse, without_hosts

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
    assert all("digits --layout dp4 --nproc-per-node 2 --set lr=0.1" in line[-1] for line in lines)
    assert "--nnodes 2 --node-rank 1 --master-addr a" in lines[1][-1]
    assert not (tmp_path / "called").exists()


def test_words_with_spaces_and_quotes_arrive_as_they_are():
    words = ["train", "my job.py", "--set", 'text=it\'s "so" $HOME']
    (call,) = commands([Host("a", "/a python/bin")], words, folder=Path("/a folder"))
    told = shlex.split(call[-1].partition("exec env ")[2])
    assert told[told.index("/a python/bin") :][:4] == ["/a python/bin", "-m", "shoal", "train"]
    assert told[-3:] == words[1:]
    assert "SHOAL_HOST=a" in told
    assert "cd '/a folder'" in call[-1]


def test_hosts_are_named_once_each_with_as_many_processes_as_they_have_devices():
    own = sys.executable
    assert parse("a, b=/opt/py") == [Host("a", own), Host("b", "/opt/py")]
    assert parse("u@a:2,b:1=/opt/py") == [Host("u@a", own, 2), Host("b", "/opt/py", 1)]
    assert parse("[fe80::1]:2,[::1]:4") == [Host("fe80::1", own, 2), Host("::1", own, 4)]
    for text, reason in (
        ("a,a", "names a twice"),
        ("a:1,a:2", "names a twice"),
        ("a,,b", "joined by commas"),
        ("-oProxyCommand=x", "names that ssh"),
        ("a:two,b:1", "must be a number from 1 on"),
        ("a:0,b:1", "must be a number from 1 on"),
        ("a:,b:1", "must be a number from 1 on"),
        ("a:2,b", "not for b. Say it for each"),
        ("fe80::1:2", "in brackets"),
        ("a:2:3", "names that ssh"),
        ("a*2,b", "names that ssh"),
    ):
        with pytest.raises(LaunchError, match=reason):
            parse(text)


def test_each_host_gets_its_number_and_what_is_said_twice_is_refused():
    calls = commands(parse("a:2,u@b:1"), ["train", "digits", "--layout", "dp3"], folder=Path("/x"), port=1234)
    told = [shlex.split(call[-1].partition("exec env ")[2]) for call in calls]
    assert [words[words.index("--nproc-per-node") + 1] for words in told] == ["2", "1"]
    assert all(words[words.index("--master-addr") + 1] == "a" for words in told)
    (call,) = commands(parse("a"), ["train", "digits"], folder=Path("/x"), address="10.0.0.1")
    assert "--master-addr 10.0.0.1" in call[-1]
    check_words(parse("a,b"), {"nproc_per_node": "2"})
    for told, name in (({"nproc_per_node": "2"}, "--nproc-per-node"), ({"nnodes": "2"}, "--nnodes")):
        with pytest.raises(LaunchError, match=f"already what {name}"):
            check_words(parse("a:2,b:1"), told)


def test_what_follows_a_script_is_its_own():
    words = ["train", "digits", "--hosts", "a,b", "--steps", "4", "--dry-run", "--hosts=c"]
    assert without_hosts(words) == ["train", "digits", "--steps", "4"]
    words = ["launch", "--hosts", "a,b", "script.py", "--", "--hosts", "c", "--dry-run"]
    assert without_hosts(words, num_arguments=5) == ["launch", "script.py", "--", "--hosts", "c", "--dry-run"]
