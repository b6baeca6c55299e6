"""The agents, one on each host: started over SSH or here, asked one or all at once, ended together."""

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.errors import LaunchError
from shoal.launch.hosts import Host, over_ssh, why_of
from shoal.verbs.doctor.agent import MARK

_MODULE = "shoal.verbs.doctor.agent"
START_S, ANSWER_S, PART_S = 30.0, 90.0, 5.0


class AbsentError(LaunchError):
    """A host that cannot be asked, or has stopped to answer."""


class Remote:
    """One agent, as seen from here."""

    def __init__(self, name: str, call: Sequence[str], secret: str, host: Host | None) -> None:
        self.name, self._host, self._heard, self._gone = name, host, b"", ""
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(list(call), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except FileNotFoundError:
            raise LaunchError("there is no ssh on this machine; run shoal doctor on each host instead.") from None
        if host is not None:
            with contextlib.suppress(AbsentError):  # it has ended already; whoever asks it will hear why
                self._write(f"{secret}\n")  # for the shell there

    def ask(self, do: str, *, answer_s: float = ANSWER_S, **words: Any) -> dict[str, Any]:
        """What it answers.

        Raises:
            AbsentError: it is gone, or silent.
            OSError: it could not do it; its words.
        """
        self._write(json.dumps({"do": do, **words}) + "\n")
        told = self._read(time.monotonic() + answer_s)
        if "failed" in told:
            raise OSError(told["failed"])
        return dict(told["done"])

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        if self._gone:
            raise AbsentError(self._gone)
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AbsentError(self._why_gone()) from None

    def _read(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while True:
            line, found, rest = self._heard.partition(b"\n")
            if found:
                self._heard = rest
                if line.startswith(MARK.encode()):  # a login may print what it likes
                    return dict(json.loads(line[len(MARK) :]))
                continue
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AbsentError("no answer in time")
            data = os.read(fd, 1 << 16)
            if not data:
                raise AbsentError(self._why_gone())
            self._heard += data

    def _why_gone(self) -> str:
        self._gone = self._gone or self._last_words()
        return self._gone

    def _last_words(self) -> str:
        try:
            _, said = self._process.communicate(timeout=PART_S)
        except subprocess.TimeoutExpired:
            return "it hung up"
        why = why_of(self._host, self._process.returncode) if self._host is not None else ""
        lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
        if lines and lines[-1].endswith("No module named 'shoal'"):
            return "its Python has no shoal"
        return why or (lines[-1] if lines else f"exit code {self._process.returncode}")

    def kill(self) -> None:
        """Its connection ends now, and so does it when it has done what it does."""
        self._process.kill()

    def close(self) -> None:
        """Its stdin ends, and so does it."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(PART_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


class Party:
    """All agents that answer; `absent` says of the others why not."""

    def __init__(self, agents: Sequence[Remote], absent: Mapping[str, str]) -> None:
        self.agents, self.absent = list(agents), dict(absent)

    def ask(self, asked: Mapping[Remote, tuple[str, dict[str, Any]]]) -> dict[Remote, dict[str, Any]]:
        """Each its own question, at once; {"error": why} of those that could not do it.

        Raises:
            AbsentError: a host that has answered before is gone.
        """

        def answer(item: tuple[Remote, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
            agent, (do, words) = item
            try:
                return agent.ask(do, **words)
            except OSError as error:
                return {"error": str(error)}
            except AbsentError as error:
                raise AbsentError(f"{agent.name} was lost while it was asked to {do}: {error}") from None

        with ThreadPoolExecutor(max(1, len(asked))) as pool:
            try:
                return dict(zip(asked, pool.map(answer, asked.items()), strict=True))
            except KeyboardInterrupt:
                for agent in self.agents:
                    agent.kill()  # else the threads of this pool would wait for their answers
                raise

    def ask_all(self, do: str, **words: Any) -> dict[Remote, dict[str, Any]]:
        """The same of all."""
        return self.ask(dict.fromkeys(self.agents, (do, words)))


@contextlib.contextmanager
def gather(hosts: Sequence[Host] | None, folder: Path) -> Iterator[Party]:
    """Start an agent on each host, or two on this machine; all have ended when this is over.

    Raises:
        LaunchError: there is no ssh.
    """
    secret = secrets.token_hex(16)
    started: list[Remote] = []
    try:
        if hosts is None:
            name = os.uname().nodename
            started += [Remote(name, [sys.executable, "-m", _MODULE], secret, None) for _ in range(2)]
        for host in hosts or ():
            started.append(Remote(host.address, over_ssh(host, _MODULE, [], folder), secret, host))
        yield _begun(started, secret)
    finally:
        with ThreadPoolExecutor(max(1, len(started))) as pool:
            list(pool.map(Remote.close, started))


def _begun(started: Sequence[Remote], secret: str) -> Party:
    def begin(agent: Remote) -> str:
        try:
            version = agent.ask("begin", answer_s=START_S, secret=secret)["shoal"]
        except AbsentError as error:
            return str(error)
        return "" if version == __version__ else f"it has shoal {version}, and this is {__version__}"

    with ThreadPoolExecutor(max(1, len(started))) as pool:
        said = dict(zip(started, pool.map(begin, started), strict=True))
    absent = {agent.name: why for agent, why in said.items() if why}
    return Party([agent for agent, why in said.items() if not why], absent)
