"""The same command on each of several hosts, over SSH: one connection each, which ends what it has started.

    here ── ssh a ── shoal train --nnodes 2 --node-rank 0 --master-addr a ...     its words are shown as they are
         └─ ssh b ── shoal train --nnodes 2 --node-rank 1 --master-addr a ...     its words behind its name

The secret of the run goes through stdin, where nobody can list it. stdin stays open: when this process or the
connection is gone, the other side reads its end and ends its ranks. Of an elastic run that side alone leaves, without a
word to the others, who go on; it is started again, and let in. A word before the end says that all shall end.
"""

import contextlib
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.errors import LaunchError
from shoal.launch.nodes import DEFAULT_PORT
from shoal.launch.outcome import INTERRUPTED, ON_REQUEST
from shoal.world import HOST_VARIABLE

FOLLOW = "SHOAL_FOLLOW_STDIN"
_FORWARDED = ("OMP_NUM_THREADS",)
_PART_S = 10.0
_END = b"end\n"
_AGAIN_S, _MOST_AGAIN_S = 5.0, 60.0  # until a host that was lost is tried again; the wait doubles
_NO_SUCH_FILE = 127
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")


@dataclass(frozen=True)
class Host:
    """Where SSH reaches it, the Python that has shoal there, and how many processes it starts (None: not said here)."""

    name: str
    python: str
    processes: int | None = None

    @property
    def address(self) -> str:
        """Without the user's name."""
        return self.name.rpartition("@")[2]


def parse(text: str) -> list[Host]:
    """`a,b=/opt/venv/bin/python`: where no interpreter is named, the path of this one. `a:2,b:1`: so many processes.

    Raises:
        LaunchError: no name, or one twice; a number that is none, or that only some have.
    """
    found = [_host(word.strip(), text) for word in text.split(",")]
    names = [host.name for host in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise LaunchError(f"--hosts names {twice} twice: one machine is one node, with --nproc-per-node processes.")
    numbers = [host.processes for host in found]
    if None in numbers and any(numbers):
        host = next(host for host in found if host.processes is None)
        raise LaunchError(
            f"--hosts {text} says for some hosts how many processes they start, and not for {host.name}. Say it for "
            "each (a:2,b:1), or once for all: --nproc-per-node 2."
        )
    return found


# A name with or without a user, an IPv6 address in brackets, then how many processes.
_WORD = re.compile(r"(?P<user>[^@:\[\]]+@)?(?:\[(?P<v6>[^]]+)\]|(?P<name>[\w.-]+))(?::(?P<processes>[^:]*))?")


def _host(word: str, text: str) -> Host:
    where, _, python = word.partition("=")
    found = _WORD.fullmatch(where)
    if found is None or where.startswith("-"):
        raise LaunchError(
            f"--hosts is {text!r}; it must be names that ssh knows, joined by commas: --hosts a,b. What may follow a "
            "name is :N processes and =/path/to/python; an IPv6 address stands in brackets: [fe80::1]:2"
        )
    processes = found["processes"]
    if processes is not None and not (processes.isdecimal() and int(processes)):
        raise LaunchError(f"--hosts is {text!r}: {where} says {processes!r} processes; it must be a number from 1 on.")
    name = f"{found['user'] or ''}{found['v6'] or found['name']}"
    return Host(name, python or sys.executable, None if processes is None else int(processes))


def commands(
    hosts: Sequence[Host],
    words: Sequence[str],
    *,
    folder: Path,
    address: str | None = None,
    port: int = DEFAULT_PORT,
    is_elastic: bool = False,
) -> list[list[str]]:
    """What is run here to start each host's share.

    Args:
        words: of the command line, the verb first, without --hosts.
        folder: the working folder, the same on each host.
        address: of the first host, as the others know it; by default its name.
        is_elastic: a host whose connection is gone leaves the others alone.
    """
    found = []
    for rank, host in enumerate(hosts):
        meet = ["--nnodes", str(len(hosts)), "--node-rank", str(rank)]
        meet += ["--master-addr", address or hosts[0].address, "--master-port", str(port)]
        meet += [] if host.processes is None else ["--nproc-per-node", str(host.processes)]
        found.append(over_ssh(host, "shoal", [words[0], *meet, *words[1:]], folder, leaves=is_elastic))
    return found


def check_words(hosts: Sequence[Host], told: Mapping[str, object]) -> None:
    """Refuse flags that --hosts speaks for; `told` holds what was given, by name.

    Raises:
        LaunchError: which, and what to leave out.
    """
    counted = ("nproc_per_node",) if hosts[0].processes is not None else ()
    for name in ("nnodes", "node_rank", "rdzv_endpoint", "standalone", *counted):
        if told.get(name):
            raise LaunchError(f"--hosts says already what --{name.replace('_', '-')} says. Leave one of them out.")


def over_ssh(host: Host, module: str, words: Sequence[str], folder: Path, *, leaves: bool = False) -> list[str]:
    """What is run here to run a module of Python there, in the same folder; the first line of stdin is its secret."""
    forwarded = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    forwarded |= {FOLLOW: "leave" if leaves else "1", HOST_VARIABLE: host.address}
    settings = [f"{name}={shlex.quote(value)}" for name, value in forwarded.items()]
    there = shlex.join([host.python, "-m", module, *words])
    begin = f"read -r SHOAL_SECRET; export SHOAL_SECRET; cd {shlex.quote(str(folder))}"
    return [*_SSH, host.name, f"{begin} && exec env {' '.join(settings)} {there}"]


def without_hosts(words: Sequence[str], num_arguments: int = 0) -> list[str]:
    """The command line that each host gets; the last `num_arguments` words are a script's own."""
    end = len(words) - num_arguments
    kept, skips = [], False
    for word in words[:end]:
        name = word.partition("=")[0]
        if skips or name in ("--hosts", "--dry-run"):
            skips = not skips and word == "--hosts"
            continue
        kept.append(word)
    return [*kept, *words[end:]]


def run(hosts: Sequence[Host], calls: Sequence[Sequence[str]], *, is_elastic: bool = False) -> int:
    """Start all, show what they say, end all when one fails; the exit code of the one that failed first.

    Args:
        is_elastic: the others go on when one fails, and it is started again; the exit code is that of the last.
    """
    secret = secrets.token_hex(16)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for host, call in zip(hosts, calls, strict=True):
            started.append(_begin(host, call, secret, is_first=host is hosts[0]))
        if is_elastic:
            return _while_one_goes_on(hosts, calls, secret, started)
        return _until_all_have_ended(hosts, started)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _end(started)


def _while_one_goes_on(
    hosts: Sequence[Host], calls: Sequence[Sequence[str]], secret: str, started: "list[subprocess.Popen[bytes]]"
) -> int:
    """A host that has ended is started again while there are others to let it in; where one ends well, all is done."""
    codes: dict[int, int] = {}  # of those that have ended
    due: dict[int, float] = {}  # when they are started again
    waits = dict.fromkeys(range(len(hosts)), _AGAIN_S)
    last, over_since = 0, 0.0
    while len(codes) < len(hosts) and not (over_since and time.monotonic() - over_since > 2 * _PART_S):
        for number, process in enumerate(started):
            if number in codes or (code := process.poll()) is None:
                continue
            codes[number] = last = abs(code)
            if code in (0, *ON_REQUEST):
                over_since = over_since or time.monotonic()
            elif not over_since:
                _say_lost(hosts[number], code, waits[number])
                due[number] = time.monotonic() + waits[number]
                waits[number] = min(2 * waits[number], _MOST_AGAIN_S)
        for number in [one for one, at in due.items() if time.monotonic() > at and not over_since]:
            del due[number], codes[number]
            _close(started[number])
            started[number] = _begin(hosts[number], calls[number], secret, is_first=number == 0)
        time.sleep(0.05)
    return 0 if 0 in codes.values() else last


def _say_lost(host: Host, code: int, wait_s: float) -> None:
    why = why_of(host, code) or f"it ended with {code}"
    sys.stderr.write(f"{host.name}: {why}. It is tried again in {wait_s:.0f} s, while others go on.\n")


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
                process.stdin.write(_END)
        _close(process)  # they read it, and end
    until = time.monotonic() + _PART_S
    for process in started:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _close(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def follow_stdin() -> None:
    """Where SSH has started this process: end when its stdin does.

    Of an elastic run, a connection that is lost is a host that is lost: to be asked to end would end all others too.
    """
    follows = os.environ.pop(FOLLOW, "")
    if follows not in ("1", "leave"):
        return

    def wait() -> None:
        said = b""
        while data := os.read(0, 4096):
            said = data
        leaves = follows == "leave" and not said.endswith(_END)
        os.kill(os.getpid(), signal.SIGKILL if leaves else signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()
