"""Copies of the state go on to the next host's memory while ranks train: a lost host does not take its own along.

    host 0: even, odd (its ranks') ──► kept_0, kept_1  ══ wire ══►  host 1: near_0, near_1    and so on around

Both pairs hold the copy that is on two hosts everywhere, and the one that is on its way. All of it is done by threads
of the parent, which ranks neither wait for nor know of. What lies where: `shoal.sealed`; which copy is taken:
`rounds.py`; how a file goes over: `parcel.py`.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import LaunchError
from shoal.launch.line import Line
from shoal.launch.nodes import Nodes
from shoal.launch.parcel import Kept, NoRoomError, check_room, keep, send, take
from shoal.launch.posts import Member, Post, posts_of
from shoal.launch.rounds import Order, Report, Rounds
from shoal.sealed import SLOTS, file_of, generation_folder, number_of, seal_of, write_whole

_POLL_S, _MOST_POLL_S = 0.002, 0.05  # of the seals, while a copy is waited for: the more often the sooner it comes
_PAUSE_S = 0.2  # after a copy that could not be sent
_REACH_S = 5.0
_END_S = 5.0
_NICE = 10
_FILES = 4  # of a host, besides those that its ranks hold: two that are kept, two of its neighbour's


class Knows(Protocol):
    """What a parent knows of the others."""

    nodes: Nodes
    key: bytes
    post: Post
    leader: int
    members: dict[int, Member]
    courier: "Courier | None"

    def tell(self, told: Mapping[str, Any]) -> None:
        """To all others, on the leader; to the leader, elsewhere."""


@contextlib.contextmanager
def carrying(known: Knows, memory: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """While the ranks of a generation run, where they keep copies and there is another host.

    Args:
        memory: the folder in shared memory.
        say: on the leader, for a line about what it costs.
    """
    if memory is None or not known.post.num or known.post.num_nodes == 1:
        yield
        return
    known.courier = Courier(known, generation_folder(memory, known.post.generation), say)
    try:
        yield
    finally:
        courier, known.courier = known.courier, None
        courier.close()


def hand_over(courier: "Courier | None", line: Line, node: int) -> None:
    """Who has come to send its copies."""
    if courier is not None:
        courier.take_in(line, node)
    else:  # it has begun sooner, and comes again
        line.tell({"refused": "it is not ready"})
        line.close()


@dataclass(frozen=True)
class _Neighbours:
    """Whom this host sends to, and of whom it gets what."""

    next: Member
    before: int
    ranks: range  # of the host before
    nodes: frozenset[int]  # that take part

    @staticmethod
    def of(known: Knows) -> "_Neighbours":
        own = known.post
        posts = posts_of(known.members, known.leader, own.size)
        at = {post.node: node for node, post in posts.items() if post.num}
        before = at[(own.node - 1) % own.num_nodes]
        ranks = range(posts[before].first, posts[before].first + posts[before].num)
        return _Neighbours(known.members[at[(own.node + 1) % own.num_nodes]], before, ranks, frozenset(at.values()))


class Courier:
    """Of one host and one generation."""

    def __init__(self, known: Knows, folder: Path, say: Callable[[str], None]) -> None:
        self._known, self._folder, self._say, self._post = known, folder, say, known.post
        folder.mkdir(exist_ok=True)
        self._around = _Neighbours.of(known)
        is_leader = known.leader == known.nodes.rank
        self._rounds = Rounds(self._around.nodes) if is_leader else None
        self._order: Order | None = Order(1, 0)
        self._is_over = False
        self._changed = threading.Condition()
        self._out: Line | None = None
        self._in: Line | None = None
        self._has_room = False
        self._taking: threading.Thread | None = None
        self._sending = threading.Thread(target=self._send_all, daemon=True)
        self._sending.start()

    # -- from the parents' own line ----------------------------------------------------------------------------

    def hear(self, node: int, told: Mapping[str, Any]) -> None:
        """An order of the leader's, or, on the leader, how another host came through."""
        if told.get("generation") != self._post.generation:
            return
        if "take" in told and node == self._known.leader:
            self._obey(Order(int(told["take"]), int(told["whole"])))
        elif "report" in told and self._rounds is not None:
            self._reported(node, Report.of(told["report"]))

    def take_in(self, line: Line, node: int) -> None:
        """The line on which the host before sends its copies."""
        with self._changed:
            if self._is_over or node != self._around.before:
                line.close()
                return
            if self._in is not None:
                _shut(self._in)
            self._in, before = line, self._taking
            self._taking = threading.Thread(target=self._take_all, args=(line, before), daemon=True)
            self._taking.start()

    def close(self) -> None:
        """No copy goes on; one that is on its way is left out."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            for line in (self._in, self._out):
                if line is not None:
                    _shut(line)
        for thread in (self._sending, self._taking):
            if thread is not None:
                thread.join(_END_S)

    # -- rounds ------------------------------------------------------------------------------------------------

    def _reported(self, node: int, report: Report) -> None:
        """On the leader: the next order, once all have reported."""
        assert self._rounds is not None
        with self._changed:
            order, text = self._rounds.hear(node, report)
        if text:
            self._say(text)
        if order is not None:
            self._tell({"take": order.number, "whole": order.whole})
            self._obey(order)

    def _obey(self, order: Order) -> None:
        with self._changed:
            self._order = order
            self._changed.notify_all()

    def _tell(self, told: Mapping[str, Any]) -> None:
        self._known.tell({"copies": {"generation": self._post.generation, **told}})

    def _next_order(self) -> Order | None:
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None or self._is_over)
            order, self._order = self._order, None
            return None if self._is_over else order

    # -- the own copies ----------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        _step_back()
        slot, sent = 0, 0
        while (order := self._next_order()) is not None:
            if sent and order.whole == sent:  # all have it: from now on the other one is written over
                slot = 1 - slot
            report = self._carry(order.number, slot)
            sent = 0 if report.why else order.number
            if report.why and not self._is_over:
                time.sleep(_PAUSE_S)
            if self._rounds is not None:
                self._reported(self._known.nodes.rank, report)
            else:
                self._tell({"report": asdict(report)})
        if self._out is not None:
            self._out.close()

    def _carry(self, number: int, slot: int) -> Report:
        """Keep the copy with this number, and send it."""
        self._wait_for(number)
        began, num_bytes, why, is_full = time.monotonic(), 0, "", False
        try:
            kept = self._keep(number, slot)
            if kept is None:
                why = "it was written over before it was kept"
            for file in kept or ():
                num_bytes += file.num_bytes
                send(self._line(), file, slot)
        except (OSError, LaunchError, KeyError, ValueError) as error:
            why = str(error) or type(error).__name__
            is_full = isinstance(error, NoRoomError) or getattr(error, "errno", 0) == errno.ENOSPC
            self._hang_up()
        seconds = time.monotonic() - began
        newest = self._newest()
        return Report(number=number, newest=newest, num_bytes=num_bytes, seconds=seconds, why=why, is_full=is_full)

    def _wait_for(self, number: int) -> None:
        """Until every rank of this host has sealed this copy, or a later one."""
        since = time.monotonic()
        for rank in self._ranks():
            while not self._is_over and max(self._numbers(rank)) < number:
                time.sleep(min(_MOST_POLL_S, max(_POLL_S, (time.monotonic() - since) / 50)))

    def _ranks(self) -> range:
        return range(self._post.first, self._post.first + self._post.num)

    def _numbers(self, rank: int) -> list[int]:
        return [number_of(file_of(self._folder, rank, slot)) for slot in SLOTS]

    def _newest(self) -> int:
        return max(max(self._numbers(rank)) for rank in self._ranks())

    def _keep(self, number: int, slot: int) -> list[Kept] | None:
        """Of all ranks of this host; None where one of them was quicker."""
        folder = self._folder / f"kept_{slot}"
        for rank in self._ranks():
            seal_of(file_of(folder, rank, "copy")).unlink(missing_ok=True)
        kept = []
        for rank in self._ranks():
            numbers = self._numbers(rank)
            if number not in numbers:
                return None
            source, target = file_of(self._folder, rank, SLOTS[numbers.index(number)]), file_of(folder, rank, "copy")
            if not self._has_room:
                self._check_room()
            seal = keep(source, target, number)
            if seal is None:
                return None
            kept.append(Kept(rank, target, seal))
        for file in kept:
            write_whole(seal_of(file.path), file.seal)
        return kept

    def _check_room(self) -> None:
        """Before the first copy is kept; of the neighbour's copies it is assumed that they are as large."""
        sizes = [max(file_of(self._folder, rank, slot).stat().st_size for slot in SLOTS) for rank in self._ranks()]
        check_room(self._folder, _FILES * sum(sizes))
        self._has_room = True

    def _line(self) -> Line:
        """To the next host's memory.

        Raises:
            OSError, LaunchError: it cannot be reached, or does not take anything.
        """
        if self._out is None:
            to = self._around.next
            line = Line(socket.create_connection((to.address, to.port), timeout=_REACH_S), self._known.key)
            line.tell({"node": self._known.nodes.rank, "carries": self._post.generation})
            try:
                told = line.first_words()
                if "refused" in told:
                    raise LaunchError(str(told["refused"]))
            except (LaunchError, ValueError):
                line.close()
                raise
            _ready(line)
            with self._changed:
                self._out = line
                if self._is_over:
                    _shut(line)
        return self._out

    def _hang_up(self) -> None:
        with self._changed:
            if self._out is not None:
                self._out.close()
            self._out = None

    # -- those of the host before ------------------------------------------------------------------------------

    def _take_all(self, line: Line, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()  # or two would write into one file
        _step_back()
        _ready(line)
        line.tell({"welcome": True})
        with contextlib.suppress(OSError, LaunchError, ValueError, KeyError, TypeError):
            while not self._is_over:
                take(line, line.first_words(), self._folder, self._around.ranks)
        line.close()  # its host sees that, and comes again


def _step_back() -> None:
    """Where there are no more cores than ranks, training comes first. Linux: it holds for this thread alone."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _ready(line: Line) -> None:
    """For words that are answered at once: the kernel would hold small ones back, 40 ms for each file."""
    line.connection.settimeout(None)
    line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _shut(line: Line) -> None:
    """Whoever waits on it wakes up."""
    with contextlib.suppress(OSError):
        line.connection.shutdown(socket.SHUT_RDWR)
