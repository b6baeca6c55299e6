"""Which copy all hosts hand on next: one rank's part alone is of no use, so all take the same one. Pure.

leader ──► all: take copy 7; 6 is whole        each waits until its own ranks have sealed copy 7, keeps it, sends it
all ──► leader: 7 is at my neighbour's         from then on copy 6 may be written over, wherever it lies
            or: I was too late                 the next one is asked for earlier
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.units import show_bytes, show_seconds

TOLD_AFTER = 3  # rounds that came about: the first ones make room
GIVES_UP_AFTER = 20  # rounds in a row that did not
_MOST_AHEAD = 64


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a host came through a round.

    Attributes:
        number: of the copy.
        newest: copy that its ranks have taken by then.
        seconds: from when the copy was sealed until the other host had it.
        why: it has failed; empty where all is well.
        is_full: there is no room, and never will be.
    """

    number: int
    newest: int
    num_bytes: int = 0
    seconds: float = 0.0
    why: str = ""
    is_full: bool = False

    @staticmethod
    def of(told: Mapping[str, Any]) -> "Report":
        """As it came over the line.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        return Report(
            number=int(told["number"]),
            newest=int(told["newest"]),
            num_bytes=int(told["num_bytes"]),
            seconds=float(told["seconds"]),
            why=str(told["why"]),
            is_full=bool(told["is_full"]),
        )


@dataclass(frozen=True)
class Order:
    """The copy that is to be taken, and the last one of which every part is on two hosts."""

    number: int
    whole: int


@dataclass
class Rounds:
    """On the leader.

    Args:
        nodes: that take part.
    """

    nodes: frozenset[int]
    order: Order = Order(1, 0)
    is_over: bool = False
    _reports: dict[int, Report] = field(default_factory=dict)
    _ahead: int = 1  # copies, that an order has to be before its copy
    _whole: list[int] = field(default_factory=list)
    _missed: int = 0
    _is_told: bool = False

    def hear(self, node: int, report: Report) -> tuple[Order | None, str]:
        """What follows when all have reported, and what a person should know, once."""
        if report.number != self.order.number or node not in self.nodes or self.is_over:
            return None, ""
        self._reports[node] = report
        if len(self._reports) < len(self.nodes):
            return None, ""
        reports, self._reports = list(self._reports.values()), {}
        failed = next((row for row in sorted(reports, key=lambda row: not row.is_full) if row.why), None)
        if failed is not None and failed.is_full:
            self.is_over = True
            return None, f"memory  no copies on a second host: {failed.why}; {_GOES_BACK}"
        text = self._missed_one(failed.why) if failed is not None else self._came_about(reports)
        newest = max(row.newest for row in reports)
        self.order = Order(max(self.order.number, newest) + self._ahead, self._whole[-1] if self._whole else 0)
        return self.order, text

    def _missed_one(self, why: str) -> str:
        self._missed += 1
        self._ahead = min(2 * self._ahead, _MOST_AHEAD)
        if self._missed != GIVES_UP_AFTER:
            return ""
        return f"memory  {GIVES_UP_AFTER} copies in a row came to no second host: {why}; {_GOES_BACK}"

    def _came_about(self, reports: list[Report]) -> str:
        self._missed, self._ahead = 0, max(1, self._ahead - 1)
        self._whole = [*self._whole, self.order.number][-TOLD_AFTER:]
        if self._is_told or len(self._whole) < TOLD_AFTER:
            return ""
        self._is_told = True
        each = (self._whole[-1] - self._whole[0]) / (TOLD_AFTER - 1)
        which = "each copy" if each == 1 else f"one of {each:.2g} copies"
        most = max(row.num_bytes for row in reports)
        return (
            f"memory  {which} of a host ({show_bytes(most)}) is on the next host too, "
            f"{show_seconds(max(row.seconds for row in reports))} after it was taken, in "
            f"{show_bytes(4 * most)} more of shared memory; a lost host costs the steps since"
        )


_GOES_BACK = "where a host is lost, the others go back to the last checkpoint"
