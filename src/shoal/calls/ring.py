"""The last calls of a process in a file of fixed form, which its parent and the other ranks of its machine read.

    header   form, how many worlds this process has opened, how many calls it has noted
    entry    i % NUM_ENTRIES: index from 1, number in its group, hash of all calls of the group so far, step;
             group, call, place

It is mapped into memory, so that noting costs a microsecond and what was noted outlives the process.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NUM_ENTRIES = 512
HEADER = struct.Struct("<8s2q")
COUNT = struct.Struct("<q")  # the last of these
COUNT_AT = HEADER.size - COUNT.size
HEAD = struct.Struct("<4q")
TEXTS = struct.Struct("<24s72s80s")
ENTRY_SIZE = HEAD.size + TEXTS.size
SIZE = HEADER.size + NUM_ENTRIES * ENTRY_SIZE
FORM = b"calls 1\0"


@dataclass(frozen=True, slots=True)
class Entry:
    """One call.

    Attributes:
        index: among all calls of its process, from 1.
        group: who takes part, and in which group of theirs.
        number: among the calls of its group, from 1.
        hash: of all calls of its group up to this one.
        step: in which it was, from 1; 0 before the first, and in loops whose steps nobody counts.
        what: the call: operation, reduction, dtype, shape.
        place: of the call in the code.
    """

    index: int
    group: str
    number: int
    hash: int
    step: int
    what: str
    place: str

    @property
    def is_of_all(self) -> bool:
        """Whether it is a collective: a message from one rank to one has other names for its group."""
        return ">" not in self.group


@dataclass(frozen=True, slots=True)
class Ring:
    """What is left of a process's calls, the oldest first."""

    world: int = 0  # which one of this process, from 1
    num_calls: int = 0
    entries: tuple[Entry, ...] = ()


def beside(record: str | Path) -> Path:
    """The ring of the process that has this record."""
    return Path(f"{record}.calls")


def read_ring(source: Path | bytes, after: int = 0) -> Ring:
    """A ring, also while it is written; empty where there is none.

    Args:
        after: leave out the entries up to this index.
    """
    data = source if isinstance(source, bytes) else source.read_bytes() if source.exists() else b""
    if len(data) != SIZE:
        return Ring()
    form, world, count = HEADER.unpack_from(data)
    if form != FORM:
        return Ring()
    first = max(after, count - NUM_ENTRIES)
    return Ring(world, count, tuple(_entries(data, first, count)))


def _entries(data: bytes, first: int, count: int) -> Iterator[Entry]:
    for index in range(first + 1, count + 1):
        at = HEADER.size + (index - 1) % NUM_ENTRIES * ENTRY_SIZE
        found, number, rolling, step = HEAD.unpack_from(data, at)
        if found == index:  # else it has been written over meanwhile
            texts = (text.rstrip(b"\0").decode("utf-8", "replace") for text in TEXTS.unpack_from(data, at + HEAD.size))
            group, what, place = texts
            yield Entry(index, group, number, rolling, step, what, place)
