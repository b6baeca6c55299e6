"""Progress of a run's ranks across its machines: node 0 watches all, the others tell it what theirs do.

node 1  records of its ranks, twice a second                     ──►  node 0: one of them stands still
node 0  "look at all of yours", once it suspects anybody         ──►  node 1: asks them for their stacks
node 1  stack, state and last calls of each, in a second or so   ──►  node 0: one screen

Times are each machine's own; the first report of a node says how far its clock is from that of node 0.
"""

import base64
import functools
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.calls import Ring, beside, read_ring
from shoal.launch.incident import Witness
from shoal.launch.process import Kernel
from shoal.launch.supervise import Rank
from shoal.launch.suspects import Patience
from shoal.launch.watched import Near
from shoal.record import Seen, parse

REPORT_S = 0.5
STALE_S = 2.0  # without a report: nothing is known of that machine's ranks
_MOST_DUMP = 2**14  # of a stack, from its start: there the frames are that stand

Send = Callable[[int, Mapping[str, Any]], None]  # to a node


class Afar:
    """The other machines' side of the watch.

    Args:
        hosts: by node, as people know them.
    """

    def __init__(self, hosts: Sequence[str], send: Send) -> None:
        self._hosts, self._send = hosts, send
        self._inbox: deque[tuple[int, float, Mapping[str, Any]]] = deque()
        self._offsets: dict[int, float] = {}
        self._heard: dict[int, float] = {}
        self._asked: dict[int, float] = {}
        self._ranks: dict[int, Far] = {}

    def hear(self, node: int, told: Mapping[str, Any]) -> None:
        """A message, from whichever thread."""
        self._inbox.append((node, time.monotonic(), told))

    def watch_from(self, ranks: Sequence[Rank], patience: Patience) -> "Reporter":
        """On any node but the first: what is to be called with the time."""
        return Reporter(ranks, patience, functools.partial(self._send, 0), self._inbox)

    def ranks(self) -> "list[Far]":
        """Of all other machines, as far as these have told; called by node 0 before each look."""
        while self._inbox:
            node, at, told = self._inbox.popleft()
            if "ranks" in told:
                offset = self._offsets.setdefault(node, at - float(told["now"]))
                self._heard[node] = at
                for number, row in told["ranks"].items():
                    self._rank(node, int(number)).take(row, offset)
            elif "witness" in told:
                self._rank(node, int(told["witness"])).answered(told)
        return list(self._ranks.values())

    def is_stale(self, now: float) -> bool:
        """Whether a machine has not told for a while what its ranks do."""
        return any(now - at > STALE_S for at in self._heard.values())

    def _rank(self, node: int, number: int) -> "Far":
        if number not in self._ranks:
            self._ranks[number] = Far(number, f"node {node} ({self._hosts[node]})", functools.partial(self._ask, node))
        return self._ranks[number]

    def _ask(self, node: int) -> None:
        if time.monotonic() - self._asked.get(node, 0.0) > REPORT_S:  # once for all of its ranks
            self._asked[node] = time.monotonic()
            self._send(node, {"look": True})


class Far:
    """A rank of another machine."""

    def __init__(self, rank: int, host: str, ask: Callable[[], None]) -> None:
        self.rank, self.host, self.pid, self.is_alive = rank, host, 0, True
        self._ask = ask
        self._seen, self._kernel = Seen(), Kernel()
        self._answer: Mapping[str, Any] | None = None

    def take(self, row: Mapping[str, Any], offset: float) -> None:
        """A report of it, in times of its own machine."""
        self.pid, self.is_alive, self._kernel = int(row["pid"]), bool(row["alive"]), Kernel(*row["kernel"])
        self._seen = parse(base64.b64decode(row["record"])).shifted(offset)

    def answered(self, told: Mapping[str, Any]) -> None:
        """What its machine has found."""
        self._answer = told

    def seen(self) -> Seen:
        return self._seen

    def kernel(self) -> Kernel:
        return self._kernel

    def ask(self) -> None:
        self._answer = None
        self._ask()

    def ask_workers(self) -> None:
        """Its machine does so by itself."""

    def witness(self, seen: Seen) -> Witness | None:
        told = self._answer
        if told is None:
            return None
        return Witness(
            seen=seen,
            kernel=Kernel(*told["kernel"]),
            cores=float(told["cores"]),
            dump=str(told["dump"]),
            workers=str(told["workers"]),
        )

    def ring(self) -> Ring:
        if self._answer is None:
            return Ring()
        return read_ring(zlib.decompress(base64.b64decode(self._answer["ring"])))


class Reporter:
    """On a node that is not the first: tells what its ranks do, and looks at them closely when it is asked to."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        patience: Patience,
        send: Callable[[Mapping[str, Any]], None],
        inbox: "deque[tuple[int, float, Mapping[str, Any]]]",
    ) -> None:
        self._ranks = [Near(rank) for rank in ranks]
        self._patience, self._send, self._inbox = patience, send, inbox
        self._next = 0.0
        self._looks: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, now: float) -> None:
        while self._inbox:
            if "look" in self._inbox.popleft()[-1] and not self._looks:
                half_s = self._patience.stacks_s / 2
                self._each(Near.ask)
                self._looks = [(now + half_s, self._ask_workers), (now + 2 * half_s, self._answer)]
        while self._looks and now >= self._looks[0][0]:
            self._looks.pop(0)[1]()
        if now >= self._next:
            self._next = now + REPORT_S
            self._send({"now": now, "ranks": {each.rank: _report(each) for each in self._ranks}})

    def _each(self, do: Callable[[Near], None]) -> None:
        for rank in self._ranks:
            if rank.is_alive:
                do(rank)

    def _ask_workers(self) -> None:
        self._each(Near.ask_workers)

    def _answer(self) -> None:
        self._each(lambda rank: self._send(_found(rank)))


def _report(near: Near) -> dict[str, Any]:
    kernel, record = near.kernel(), near.process.record
    data = record.read_bytes() if record.exists() else b""
    return {
        "pid": near.pid,
        "alive": near.is_alive,
        "kernel": [kernel.state, kernel.cpu_s],
        "record": base64.b64encode(data).decode(),
    }


def _found(near: Near) -> dict[str, Any]:
    witness, ring = near.witness(near.seen()), beside(near.process.record)
    data = ring.read_bytes() if ring.exists() else b""
    return {
        "witness": near.rank,
        "kernel": [witness.kernel.state, witness.kernel.cpu_s],
        "cores": witness.cores,
        "dump": witness.dump[:_MOST_DUMP],
        "workers": witness.workers[:_MOST_DUMP],
        "ring": base64.b64encode(zlib.compress(data)).decode(),
    }
