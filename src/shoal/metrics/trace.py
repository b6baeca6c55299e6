"""A trace: what all ranks did in some steps, on one time line, as one file in Chrome's trace event format.

Each rank is a process of the trace, each lane of it a thread:

    rank 0  dp0   steps               |------ step 3 ------||------ step 4 ------|
                  data                |-|                   |-|
                  compute               |-- --- -- ---|       |-- --- -- ---|
                  communication dp             |-----|               |-----|
                  update                               |---|                 |---|

Pure but for the files: nothing here measures. Each rank writes a part, and one puts the parts together line by line, so
that nobody holds more than its own.

Source of the format: Trace Event Format, Google, 2016. There an array may lack its closing bracket: a part that is left
behind can be opened as it is.
"""

import contextlib
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMUNICATION = "communication"
LANES = ("steps", "data", "compute", "cuda", "waits", COMMUNICATION, "stages", "update")
"""Top to bottom; a lane is one of these words, or begins with one: `communication dp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that took time; begin and end as the rank's own wall clock told them."""

    lane: str
    name: str
    begin_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)


# -- clocks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """A message there and back: begin and end as told by this clock, the middle by the other one."""

    sent_ns: int
    arrived_ns: int
    answered_ns: int
    returned_ns: int

    @property
    def delay_ns(self) -> int:
        """What both ways took."""
        return (self.returned_ns - self.sent_ns) - (self.answered_ns - self.arrived_ns)

    @property
    def offset_ns(self) -> int:
        """How far the other clock is ahead, were both ways equally long."""
        return ((self.arrived_ns - self.sent_ns) + (self.answered_ns - self.returned_ns)) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """What is to be added to a rank's clock to have that of rank 0, and how far off that may be."""

    ns: int = 0
    uncertainty_ns: int = 0

    def __str__(self) -> str:
        return f"clock {self.ns / 1e3:+.1f} us, at most {self.uncertainty_ns / 1e3:.1f} us off"


def clock_offset(trips: Sequence[RoundTrip]) -> Offset:
    """By the trip that took the least time: however unequal its two ways were, they err by half of it at most.

    Source: Mills et al. 2010 (NTP), RFC 5905, section 8.
    """
    best = min(trips, key=lambda trip: trip.delay_ns)
    return Offset(ns=best.offset_ns, uncertainty_ns=-(-best.delay_ns // 2))


# -- lanes -------------------------------------------------------------------------------------------------


def laid_out(events: Iterable[Event]) -> dict[str, list[Event]]:
    """By lane, in which each event lies within another or beside it; what does not fit gets a lane `... (2)`.

    Messages lie beside each other only: one that begins and ends while another is on the way is no part of it.
    """
    lanes: dict[str, list[Event]] = {}
    running: dict[str, list[int]] = {}  # when what has begun ends, outermost first
    for event in sorted(events, key=lambda event: (event.begin_ns, -event.end_ns)):
        may_nest = not event.lane.startswith(COMMUNICATION)
        for number in itertools.count(1):
            lane = event.lane if number == 1 else f"{event.lane} ({number})"
            ends = running.setdefault(lane, [])
            while ends and ends[-1] <= event.begin_ns:
                ends.pop()
            if not ends or (may_nest and event.end_ns <= ends[-1]):
                break
        ends.append(event.end_ns)
        lanes.setdefault(lane, []).append(event)
    return dict(sorted(lanes.items(), key=lambda lane: (LANES.index(lane[0].split()[0]), lane[0])))


def rows_of(
    rank: int, label: str, events: Iterable[Event], *, offset: Offset, zero_ns: int
) -> Iterator[dict[str, Any]]:
    """The events of one rank, as the format has them.

    Args:
        label: what the rank is called.
        zero_ns: where the time line begins, by the clock of rank 0.
    """

    def told(what: str, lane: int = 0, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": rank, "tid": lane, "ts": 0, "args": args}

    yield told("process_name", name=label)
    yield told("process_sort_index", sort_index=rank)
    yield told("process_labels", labels=str(offset))
    for number, (lane, found) in enumerate(laid_out(events).items()):
        yield told("thread_name", number, name=lane)
        yield told("thread_sort_index", number, sort_index=number)
        for event in found:
            yield {
                "ph": "X",
                "name": event.name,
                "pid": rank,
                "tid": number,
                "ts": (event.begin_ns + offset.ns - zero_ns) / 1e3,
                "dur": (event.end_ns - event.begin_ns) / 1e3,
                **({"args": event.args} if event.args else {}),
            }


# -- files -------------------------------------------------------------------------------------------------


def write_part(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A line per event.

    Raises:
        OSError: the disk is full, or may not be written to.
    """
    with _committed(path) as file:
        file.write("[\n")
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + ",\n")


def merge(parts: Sequence[Path], path: Path, about: Mapping[str, Any]) -> None:
    """Put parts together, and remove them once the whole is there.

    Args:
        about: what the file tells of itself.

    Raises:
        OSError: it cannot be written; the parts stay.
    """
    with _committed(path) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [')
        before = "\n"
        for part in parts:
            with gzip.open(part, "rt", encoding="utf-8") as rows:
                next(rows)
                for row in rows:
                    file.write(before + row.rstrip(",\n"))
                    before = ",\n"
        file.write("\n]}\n")
    for part in parts:
        part.unlink()


@contextlib.contextmanager
def _committed(path: Path) -> Iterator[Any]:
    """A compressed text file that is there as a whole, or not at all."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        with gzip.open(partial, "wt", compresslevel=6, encoding="utf-8") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
