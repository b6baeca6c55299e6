"""A rank as the one who watches sees it: of this machine, or of another one."""

import contextlib
import os
import time
from typing import Protocol

from shoal.calls import Ring, beside, read_ring
from shoal.launch.incident import Witness
from shoal.launch.process import Kernel, ask_kernel, workers_of
from shoal.launch.rank import STACK_SIGNAL
from shoal.launch.supervise import Rank
from shoal.launch.verdict import read_log
from shoal.record import Phase, Seen, look

_MOST_WORKERS, _WORKER_S = 4, 0.02  # asked of one rank, and the time of each to write


class Watched(Protocol):
    """One rank; what is asked of it is asked again for each inquiry."""

    @property
    def rank(self) -> int:
        """In the world."""

    @property
    def pid(self) -> int:
        """On its machine."""

    @property
    def host(self) -> str:
        """In words; empty for this machine."""

    @property
    def is_alive(self) -> bool:
        """As far as is known."""

    def seen(self) -> Seen:
        """What it notes."""

    def kernel(self) -> Kernel:
        """What its kernel says of it."""

    def ask(self) -> None:
        """For its stack, unless it is stopped."""

    def ask_workers(self) -> None:
        """Those of its loader, for theirs, if it waits for data."""

    def witness(self, seen: Seen) -> Witness | None:
        """What it has answered; None: nothing yet."""

    def ring(self) -> Ring:
        """Its last calls."""


class Near:
    """A rank of this machine."""

    host = ""

    def __init__(self, process: Rank) -> None:
        self.process = process
        self._kernel = Kernel()
        self._asked_at = 0.0
        self._stack_from: int | None = None
        self._workers_from: int | None = None

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    def seen(self) -> Seen:
        return look(self.process.record)

    def kernel(self) -> Kernel:
        return ask_kernel(self.pid)

    def ask(self) -> None:
        self._kernel, self._asked_at = self.kernel(), time.monotonic()
        self._stack_from = None if self._kernel.is_stopped else self.process.ask_where()
        self._workers_from = None

    def ask_workers(self) -> None:
        if self.seen().phase is not Phase.DATA:
            return
        for pid in workers_of(self.pid)[:_MOST_WORKERS]:  # they share the rank's log, so one writes after the other
            if self._workers_from is None:
                self._workers_from = self.process.log.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
            time.sleep(_WORKER_S)

    def witness(self, seen: Seen) -> Witness:
        kernel, log = self.kernel(), self.process.log
        start, workers = self._stack_from, self._workers_from
        return Witness(
            seen=seen,
            kernel=kernel,
            cores=max(0.0, kernel.cpu_s - self._kernel.cpu_s) / max(time.monotonic() - self._asked_at, 1e-3),
            dump="" if start is None else read_log(log, start, workers),
            workers="" if workers is None else read_log(log, workers),
        )

    def ring(self) -> Ring:
        return read_ring(beside(self.process.record))
