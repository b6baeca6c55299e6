"""A run over hosts of a test's own, watched from outside of them."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from netns import Host, Net

from shoal.verbs.drill.follow import Measured, SilentError
from shoal.verbs.drill.trial import LIMIT_S, TrialError, Watched

PORT = "29500"
_KILL = "kill -9 $(ps -e -o pid=,args= | awk '/shoal trai[n]/ {print $1}')"
NOTES = "SHOAL_DRILL_NOTES"  # in the environment: a file for what was measured


@contextlib.contextmanager
def noted(name: str) -> Iterator[Measured]:
    """Around a trial: what it has measured, or what was wrong, is noted for the table of docs/faults.md."""
    found, wrong, is_silent = Measured(), "", False
    try:
        yield found
    except AssertionError as error:
        wrong, is_silent = str(error).partition("\n")[0], isinstance(error, SilentError)
        raise
    finally:
        if path := os.environ.get(NOTES):
            with Path(path).open("a") as file:
                file.write(json.dumps({"name": name, "wrong": wrong, "is_silent": is_silent, **asdict(found)}) + "\n")


class Cluster(Watched):
    """One parent on each host; started at once.

    Args:
        words: after `shoal train JOB`, the same on every host.
        env: by the name of a host, variables of its own.
    """

    def __init__(self, net: Net, folder: Path, *words: str, env: Mapping[str, Mapping[str, str]] | None = None) -> None:
        super().__init__(folder)
        self.net, self._words, self._folder, self._env = net, words, folder, env or {}
        self.parents: dict[str, subprocess.Popen[str]] = {}
        for host in net:
            self.start(host)

    def start(self, host: Host) -> None:
        """A parent there; again, where one was before."""
        number = self.net.hosts.index(host)
        meet = ["--nnodes", str(len(self.net)), "--node-rank", str(number), "--master-addr", self.net[0].address]
        command = self.command("--nproc-per-node", "1", *self._words, *meet, "--master-port", PORT)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **self._env.get(host.name, {})}
        into = ("sh", "-c", 'exec "$@" >> "$0" 2>&1', str(self._said(host)))
        self.parents[host.name] = host.start(*into, *command, env=variables)

    def kill(self, host: Host) -> None:
        """Every process of the run there, at once; the host stays."""
        host.run("sh", "-c", _KILL, check=True)
        self.parents[host.name].wait(LIMIT_S)

    def _said(self, host: Host) -> Path:
        return self._folder / f"said_{host.name}"

    def said(self, host: Host) -> str:
        """What the parent there has printed."""
        return self._said(host).read_text() if self._said(host).exists() else ""

    def tail(self) -> str:
        """The last that each has said."""
        return " || ".join(f"{host.name}: {' | '.join(self.said(host).splitlines()[-4:])}" for host in self.net)

    def is_over(self) -> bool:
        """All parents have ended."""
        return all(parent.poll() is not None for parent in self.parents.values())

    def end(self, *hosts: Host, limit_s: float = LIMIT_S) -> list[int]:
        """Wait for the parents on these hosts, or on all; their exit codes.

        Raises:
            TrialError: one does not end.
        """
        until = time.monotonic() + limit_s
        codes = []
        for host in hosts or [host for host in self.net if host.name in self.parents]:
            try:
                codes.append(self.parents[host.name].wait(max(0.1, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise TrialError(f"still there after {limit_s:.0f} s: {self.tail()}") from None
        return codes

    def ends_well(self, reference: Path, *hosts: Host, relative: float = 0.0, limit_s: float = LIMIT_S) -> None:
        """On these hosts, or on all, with 0, and as the run without harm.

        Raises:
            TrialError: it does not.
        """
        codes = self.end(*hosts, limit_s=limit_s)
        if any(codes):
            raise TrialError(f"it ended with {codes}: {self.tail()}")
        if wrong := self.wrong(reference, relative):
            raise SilentError(wrong)

    def goes_on(self, found: Measured, began: float, limit_s: float) -> None:
        """Started again by itself since `began`, with the fewest steps lost that it says.

        Raises:
            TrialError: it is not, or not in that time.
        """
        before = self.generation
        found.again_s = self.until(lambda: self.generation > before, "training again") - began
        self.until(lambda: any("lost" in row for row in self.incidents("restart")), "told of")
        told = self.incidents("restart")
        if len(told) > 1:
            raise TrialError(f"it was started {len(told)} times: {' || '.join(row['text'] for row in told)}")
        found.lost = int(told[0]["lost"])
        found.told_s = found.again_s - float(told[0]["took_s"])
        if found.again_s > limit_s:
            raise TrialError(f"it took {found.again_s:.1f} s to go on: {told[0]['text']}")


class Console(Cluster):
    """The same over --hosts: one command, outside of all hosts, has a parent on each."""

    def start(self, host: Host) -> None:
        """All at once, with the first."""
        if host is self.net[0]:
            names = ",".join(each.name for each in self.net)
            command = self.command(*self._words, "--hosts", names, "--nproc-per-node", "1", "--master-port", PORT)
            into = ("sh", "-c", 'exec "$@" > "$0" 2>&1', str(self._said(host)))
            self.parents[host.name] = self.net.console(*into, *command, cwd=self._folder)

    def kill(self, host: Host) -> None:
        """Every process of the run there, at once; the console starts them again."""
        host.run("sh", "-c", _KILL, check=True)

    def tail(self) -> str:
        """The last that it has said."""
        return " | ".join(self.said(self.net[0]).splitlines()[-12:])
