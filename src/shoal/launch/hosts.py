"""The same command on each of several hosts, over SSH: one connection each, which ends what it has started.

    here ── ssh a ── shoal train ... --nnodes 2 --node-rank 0 --master-addr a     its words are shown as they are
         └─ ssh b ── shoal train ... --nnodes 2 --node-rank 1 --master-addr a     its words behind its name

The secret of the run goes through stdin, where nobody can list it. stdin stays open: when this process or the
connection is gone, the other side reads its end and ends its ranks.
"""

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.errors import LaunchError
from shoal.launch.nodes import DEFAULT_PORT
from shoal.launch.outcome import INTERRUPTED

FOLLOW = "SHOAL_FOLLOW_STDIN"
_FORWARDED = ("OMP_NUM_THREADS",)
_PART_S = 10.0
_NO_SUCH_FILE = 127
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")


@dataclass(frozen=True)
class Host:
    """Where SSH reaches it, and the Python that has shoal there."""

    name: str
    python: str


def parse(text: str) -> list[Host]:
    """`a,b=/opt/venv/bin/python`: where no interpreter is named, the path of this one.

    Raises:
        LaunchError: no name, or one twice.
    """
    found = []
    for word in text.split(","):
        name, _, python = word.strip().partition("=")
        if not name or name.startswith("-"):
            raise LaunchError(f"--hosts is {text!r}; it must be names that ssh knows, joined by commas: --hosts a,b")
        found.append(Host(name, python or sys.executable))
    names = [host.name for host in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise LaunchError(f"--hosts names {twice} twice: one machine is one node, with --nproc-per-node processes.")
    return found


def commands(hosts: Sequence[Host], words: Sequence[str], *, folder: Path, port: int = DEFAULT_PORT) -> list[list[str]]:
    """What is run here to start each host's share.

    Args:
        words: of the command line, without --hosts.
        folder: the working folder, the same on each host.
    """
    address = hosts[0].name.rpartition("@")[2]
    found = []
    for rank, host in enumerate(hosts):
        meet = ["--nnodes", str(len(hosts)), "--node-rank", str(rank)]
        meet += ["--master-addr", address, "--master-port", str(port)]
        found.append(over_ssh(host, "shoal", [*words, *meet], folder))
    return found


def over_ssh(host: Host, module: str, words: Sequence[str], folder: Path) -> list[str]:
    """What is run here to run a module of Python there, in the same folder; the first line of stdin is its secret."""
    forwarded = {name: os.environ[name] for name in _FORWARDED if name in os.environ} | {FOLLOW: "1"}
    settings = [f"{name}={shlex.quote(value)}" for name, value in forwarded.items()]
    there = shlex.join([host.python, "-m", module, *words])
    begin = f"read -r SHOAL_SECRET; export SHOAL_SECRET; cd {shlex.quote(str(folder))}"
    return [*_SSH, host.name, f"{begin} && exec env {' '.join(settings)} {there}"]


def without_hosts(words: Sequence[str]) -> list[str]:
    """The command line that each host gets."""
    kept, skips = [], False
    for word in words:
        name = word.partition("=")[0]
        if skips or name in ("--hosts", "--dry-run"):
            skips = not skips and word == "--hosts"
            continue
        kept.append(word)
    return kept


def run(hosts: Sequence[Host], calls: Sequence[Sequence[str]]) -> int:
    """Start all, show what they say, end all when one fails; the exit code of the one that failed first."""
    secret = secrets.token_hex(16)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for host, call in zip(hosts, calls, strict=True):
            started.append(_begin(host, call, secret, is_first=host is hosts[0]))
        return _until_all_have_ended(hosts, started)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _end(started)


def _begin(host: Host, call: Sequence[str], secret: str, *, is_first: bool) -> "subprocess.Popen[bytes]":
    out = None if is_first else subprocess.PIPE
    try:
        process = subprocess.Popen(list(call), stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)
    except FileNotFoundError:
        raise LaunchError("there is no ssh on this machine; start the command on each host (--nnodes).") from None
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and its exit code says why
        process.stdin.write(f"{secret}\n".encode())
        process.stdin.flush()
    for stream in () if is_first else (process.stdout, process.stderr):
        assert stream is not None
        threading.Thread(target=_show, args=(stream, host.name), daemon=True).start()
    return process


def _show(stream: IO[bytes], name: str) -> None:
    for line in stream:
        sys.stderr.write(f"{name}: {line.decode('utf-8', 'replace')}")


def _until_all_have_ended(hosts: Sequence[Host], started: Sequence["subprocess.Popen[bytes]"]) -> int:
    first_bad, since = 0, 0.0
    while any(process.poll() is None for process in started):
        bad = [(host, process) for host, process in zip(hosts, started, strict=True) if process.poll()]
        if bad and not first_bad:
            host, process = bad[0]
            first_bad, since = process.returncode, time.monotonic()
            _explain(host, first_bad)
        if first_bad and time.monotonic() - since > _PART_S:
            break  # the others have been told by their own, unless they never met
        time.sleep(0.05)
    return first_bad or max(abs(process.returncode or 0) for process in started)


def _explain(host: Host, code: int) -> None:
    if why := why_of(host, code):
        sys.stderr.write(f"{host.name}: {why}\n")


def why_of(host: Host, code: int) -> str:
    """What an exit code of ssh's means; empty where it is that of what ran there."""
    why = {
        255: f"ssh could not connect, or lost the connection. Try: ssh {host.name}",
        _NO_SUCH_FILE: f"there is no {host.python}. Name its interpreter: --hosts ...,{host.name}=/path/to/python",
    }
    return why.get(code, "")


def _end(started: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in started:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # they read it, and end
    until = time.monotonic() + _PART_S
    for process in started:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def follow_stdin() -> None:
    """Where SSH has started this process: end when its stdin does."""
    if os.environ.pop(FOLLOW, "") != "1":
        return

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()
