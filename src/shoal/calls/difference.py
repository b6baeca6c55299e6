"""Where the calls of several processes part: pure, so that every case is a table in a test.

rank 0   all_reduce sum (3)   all_reduce sum (3)   barrier
rank 1   all_reduce sum (3)   barrier                          <- the second call: the ranks part here
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.calls.ring import NUM_ENTRIES, Entry, Ring

Calls = Mapping[int, Mapping[int, Entry]]  # of one group, by rank and number

_MOST_SIDES, _MOST_SHOWN = 4, 8
_LESSON = (
    "Every rank must call the same collectives in the same order: look for one in an if on the rank or on a rank's "
    "own data, a set that goes in another order, an error that was caught."
)


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that did the same."""

    ranks: tuple[int, ...]
    entry: Entry | None  # None: they had not made that call
    last: Entry | None = None  # of those: what they called before
    instead: Entry | None = None  # and what they called in another group, where the others did not


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call of a group in which ranks part.

    Attributes:
        number: of the call in its group, from 1.
        is_sure: the same call was different ones. Else some ranks had not come to it, or it came from another place
            in the code: which may be, or become, well.
    """

    group: str
    number: int
    sides: tuple[Side, ...]
    is_sure: bool = True
    is_old: bool = False  # the calls that parted are no longer in the rings

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks of the smaller side; of two equal ones that without the lowest rank."""
        return min(self.sides, key=lambda side: (len(side.ranks), -min(side.ranks))).ranks

    def __str__(self) -> str:
        old = f" (ranks parted earlier, before their last {NUM_ENTRIES} calls)" if self.is_old else ""
        return f"{self._call()} is{old}\n{self._lines()}\n{_LESSON}"

    def _call(self) -> str:
        first, last, size = _numbers(self.group)
        return f"call {self.number} of the group of {size} ranks from {first} to {last}"

    def _lines(self) -> str:
        lines = []
        for side in self.sides[:_MOST_SIDES]:
            who = f"  rank{'s' if len(side.ranks) > 1 else ''} {_span(side.ranks)}: "
            if side.entry is not None:
                at = f", at {side.entry.place}" if side.entry.place else ""
                lines.append(f"{who}{side.entry.what}{at}")
            else:
                words, other = ("instead", side.instead) if side.instead else ("the last one was", side.last)
                lines.append(f"{who}not made" + (f"; {words} {other.what}, at {other.place}" if other else ""))
        return "\n".join(lines)


def find_difference(rings: Mapping[int, Ring], *, step: int | None = None) -> Difference | None:
    """The first one that is sure; with `step` else the first place, in calls of that step, where ranks part.

    Only rings of one world are compared: those of the newest one. Messages from one rank to one are left out: one
    that is received from anybody has no number that its sender knows, and one may be on its way.
    """
    newest = max((ring.world for ring in rings.values()), default=0)
    groups: defaultdict[str, dict[int, dict[int, Entry]]] = defaultdict(dict)
    for rank, ring in rings.items():
        if ring.world == newest:
            for entry in ring.entries:
                if entry.is_of_all:
                    groups[entry.group].setdefault(rank, {})[entry.number] = entry
    found = [one for group, calls in groups.items() if (one := _sure(group, calls)) is not None]
    if not found and step is not None:
        parted = [one for group, calls in groups.items() if (one := _unsure(group, calls, step)) is not None]
        found = [replace(one, sides=tuple(_with_instead(side, groups) for side in one.sides)) for one in parted]
    return min(found, key=_when, default=None)


def _with_instead(side: Side, groups: Mapping[str, Calls]) -> Side:
    """A rank that did not make a call may have made one that nobody else did: in the wrong group."""
    if side.entry is not None:
        return side
    rank = side.ranks[0]
    alone = [
        entry
        for calls in groups.values()
        for number, entry in calls.get(rank, {}).items()
        if not any(number in own for other, own in calls.items() if other != rank)
        and entry.index > (side.last.index if side.last is not None else 0)
    ]
    return replace(side, instead=min(alone, key=_index, default=None))


def _sure(group: str, calls: Calls) -> Difference | None:
    for number in sorted(_shared(calls)):
        having = [own[number] for own in calls.values() if number in own]
        if len({entry.hash for entry in having}) > 1:
            is_old = len({entry.what for entry in having}) == 1
            key = _hash if is_old else _what
            return Difference(group, number, _sides(calls, number, key), is_old=is_old)
    return None


def _unsure(group: str, calls: Calls, step: int) -> Difference | None:
    """Equal calls from different places first: who left one out goes on with the next one of the same kind."""
    calls = {**{rank: {} for rank in _members(group)}, **calls}
    for number in sorted({number for own in calls.values() for number, entry in own.items() if entry.step >= step}):
        if len({own[number].place if number in own else None for own in calls.values()}) > 1:
            return Difference(group, number, _sides(calls, number, _place), is_sure=False)
    return None


def _shared(calls: Calls) -> set[int]:
    """The calls that at least two ranks still know."""
    once: set[int] = set()
    twice: set[int] = set()
    for own in calls.values():
        twice |= once & set(own)
        once |= set(own)
    return twice


def _members(group: str) -> Sequence[int]:
    """The ranks of a group, where its label says them: those that follow each other."""
    first, last, size = _numbers(group)
    return range(first, last + 1) if last - first + 1 == size else ()


def _numbers(group: str) -> list[int]:
    """First rank, last rank, how many."""
    return [int(part) for part in re.findall(r"\d+", group.partition(" ")[0])]


def _sides(calls: Calls, number: int, key: Callable[[Entry], object]) -> tuple[Side, ...]:
    sides: dict[object, list[int]] = {}
    for rank in sorted(calls):
        entry = calls[rank].get(number)
        sides.setdefault(None if entry is None else key(entry), []).append(rank)
    return tuple(
        Side(tuple(ranks), calls[ranks[0]].get(number), calls[ranks[0]].get(number - 1)) for ranks in sides.values()
    )


def _index(entry: Entry) -> int:
    return entry.index


def _hash(entry: Entry) -> int:
    return entry.hash


def _what(entry: Entry) -> str:
    return entry.what


def _place(entry: Entry) -> str:
    return entry.place


def _when(difference: Difference) -> int:
    return min(side.entry.index for side in difference.sides if side.entry is not None)


def _span(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    return shown if len(ranks) <= _MOST_SHOWN else f"{shown} and {len(ranks) - _MOST_SHOWN} more"
