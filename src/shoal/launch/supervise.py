"""The parent's side: one loop that listens to every rank, passes signals on, and ends all when one fails.

rank fails ──► PARTING_S: the others may say why they end ──► where they are, into their logs ──► SIGKILL
Ctrl-C     ──► SIGINT to all ──► PARTING_S ──► SIGKILL
SIGTERM    ──► SIGTERM to all ──► grace_s: they may save ──► SIGKILL      (SIGUSR1: the same, as batch systems send it)
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.launch.outcome import ON_REQUEST
from shoal.launch.rank import STACK_SIGNAL
from shoal.launch.trace import is_echo
from shoal.record import Phase, look

TICK_S = 0.05
PARTING_S = 1.0
MAX_PRIVATE_LOG_BYTES = 2**23
TAIL_BYTES = 2**15  # of a log: what is read for the failure screen
STACKS_S = 0.3  # before the end, survivors are asked where they are
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(kw_only=True, eq=False)
class Rank:
    """What the parent knows of one process."""

    rank: int
    pid: int
    poll: Callable[[], int | None]  # collects the exit code; negative for a signal
    reports: int  # file descriptor
    log: Path
    record: Path  # what it does, by itself: `shoal.record`
    log_start: int = 0  # the log may hold an earlier run
    keeps_log: bool = True  # else only its end is needed
    exit: int | None = None
    ended_at: float | None = None
    failure: dict[str, Any] = field(default_factory=dict)  # as `trace.describe` says, with exit, at, log_end
    done: dict[str, Any] = field(default_factory=dict)  # exit, at
    ended_by_us: bool = False
    stacks_from: int | None = None  # where in the log the answer to STACK_SIGNAL begins
    _heard: bytes = b""
    _is_open: bool = True

    @property
    def is_alive(self) -> bool:
        return self.ended_at is None

    @property
    def has_failed(self) -> bool:
        """Reported an error, or ended badly by itself."""
        if self.failure:
            return True
        return not self.is_alive and not self.ended_by_us and (self.exit not in (0, *ON_REQUEST) or self.left_early)

    @property
    def left_early(self) -> bool:
        """Ended with 0 in the middle of a phase: others wait for it, or all have done less than they should."""
        if self.is_alive or self.exit != 0:
            return False
        seen = look(self.record)
        return seen.is_used and seen.phase not in (Phase.SETUP, Phase.LOOP)

    @property
    def is_echo(self) -> bool:
        return bool(self.failure) and is_echo(self.failure["type"], self.failure["message"])

    def listen(self) -> None:
        """Take in what the rank has reported so far."""
        while self._is_open:
            try:
                data = os.read(self.reports, 65536)
            except BlockingIOError:
                return
            self._is_open = bool(data)
            *lines, self._heard = (self._heard + data).split(b"\n")
            for line in lines:
                report = json.loads(line)
                (self.failure if report.get("failed") else self.done).update(report)

    def collect(self) -> None:
        """Note the end of the process, if it has ended, and end what it left behind."""
        with contextlib.suppress(ChildProcessError):  # somebody else in this process has collected it: no exit code
            if sys.platform == "linux":
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return
                # While the leader is not collected, nobody else can be given the number of its group.
                signal_group(self.pid, signal.SIGKILL)
            code = self.poll()
            if code is None and sys.platform != "linux":
                return
            self.exit = code
        self.listen()
        if self.exit is None:
            self.exit = (self.done or self.failure).get("exit", 1)
        self.ended_at = time.monotonic()

    def send(self, number: signal.Signals) -> None:
        """Signal the process alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process and all that it started."""
        self.ended_by_us = True
        self.send(signal.SIGKILL)  # it may not lead a group yet
        signal_group(self.pid, signal.SIGKILL)

    def ask_where(self) -> int:
        """Have faulthandler write the stack into the log, from the place that is returned on.

        It works inside a blocked collective too, and the process goes on.
        """
        start = self.log.stat().st_size if self.log.exists() else 0
        self.send(STACK_SIGNAL)
        return start

    def shorten_log(self) -> None:
        """Keep a log that nobody asked for from filling the disk; the rank appends, so it may go on."""
        if self.keeps_log or not self.log.exists() or self.log.stat().st_size < MAX_PRIVATE_LOG_BYTES:
            return
        with self.log.open("r+b") as file:
            file.seek(-TAIL_BYTES, os.SEEK_END)
            tail = file.read()
            file.truncate(0)
        with self.log.open("ab") as file:
            file.write(tail)

    def is_listening(self) -> bool:
        return self.is_alive and self._is_open


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal a process group that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the second for a group of zombies
        os.killpg(group, number)


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """The signals that asked this process to end, as they come; outside the main thread none can be caught."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in _STOPS}
    caught = [n for n, handler in before.items() if handler is not signal.SIG_IGN]  # nohup: ignored on purpose
    for number in caught:
        told = signal.SIGTERM if number == signal.SIGUSR1 else number
        signal.signal(number, lambda *_, told=told: asked.append(told))
    try:
        yield asked
    finally:
        for number in caught:
            signal.signal(number, before[number] or signal.SIG_DFL)


def supervise(
    ranks: Sequence[Rank], asked: list[int], *, grace_s: float, watch: Callable[[float], None] | None = None
) -> None:
    """Return when every rank has ended; as long as none must, `watch(now)` looks at them."""
    ending = _Ending(ranks, asked, grace_s)
    while any(rank.is_alive for rank in ranks):
        _wait(ranks)
        for rank in ranks:
            if rank.is_alive:
                rank.listen()
                rank.collect()
            rank.shorten_log()
        ending.advance(time.monotonic())
        if watch is not None and ending.deadline is None:
            watch(time.monotonic())


def end_all(ranks: Sequence[Rank]) -> None:
    """End every rank that is left, whatever happened; collect all, and close what they reported on."""
    for rank in ranks:
        if rank.is_alive:
            rank.kill()
    while any(rank.is_alive for rank in ranks):
        for rank in ranks:
            if rank.is_alive:
                rank.collect()
        time.sleep(0.001)
    for rank in ranks:
        os.close(rank.reports)


def _wait(ranks: Sequence[Rank]) -> None:
    poll = select.poll()
    for rank in ranks:
        if rank.is_listening():
            poll.register(rank.reports, select.POLLIN)
    poll.poll(TICK_S * 1000)


@dataclass
class _Ending:
    """When the ranks that are left must end, and why."""

    ranks: Sequence[Rank]
    asked: list[int]
    grace_s: float
    deadline: float | None = None
    num_passed_on: int = 0

    def advance(self, now: float) -> None:
        for number in self.asked[self.num_passed_on :]:
            self._pass_on(signal.Signals(number), now)
        if self.deadline is None and any(rank.has_failed for rank in self.ranks):
            self.deadline = now + PARTING_S
        if self.deadline is None:
            return
        alive = [rank for rank in self.ranks if rank.is_alive]
        if now >= self.deadline:
            for rank in alive:
                rank.kill()
        elif not self.asked and now >= self.deadline - STACKS_S:
            for rank in alive:
                if rank.stacks_from is None:
                    rank.stacks_from = rank.ask_where()

    def _pass_on(self, number: signal.Signals, now: float) -> None:
        self.num_passed_on += 1
        allowed_s = PARTING_S if number == signal.SIGINT else self.grace_s
        if self.num_passed_on > 1 and number == signal.SIGINT:
            allowed_s = 0.0  # asked twice: at once
        self.deadline = min(now + allowed_s, self.deadline if self.deadline is not None else float("inf"))
        for rank in self.ranks:
            if rank.is_alive:
                rank.send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
