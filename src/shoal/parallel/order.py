"""One order of collectives on every rank, whatever each rank runs of the model.

To gather the shards of a unit (a block, or all that is outside of the blocks) every rank must take part, and all in one
order; so too to reduce its gradient. Yet ranks need not run the same blocks: a layer is dropped at random, an expert
gets no token, a batch has no image. torch's fully_shard then waits for ever or, where two blocks have one shape, adds
the gradient of one to the other (measured). So the order is fixed apart from what runs:

    first forward     each rank says what it needs next; the lowest number is gathered first, by all; the order is kept
    later forwards    that order; what this rank leaves out it gathers too, for the others, and drops
    backward          the reverse; each gather runs ahead of the reduction before it:
                      gather 3, gather 2, reduce 3, gather 1, reduce 2, reduce 1, reduce 0

Unit 0 is the root, around all others: whole from its forward to the end of backward. That the reverse is right follows
from autograd, which runs nodes from the last made to the first: when the backward of a unit begins, that of all units
which ran after it is over.
"""

from collections import Counter, deque
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol

from shoal.errors import JobError

ROOT = 0
NOTHING = -1  # what a rank needs whose forward is over


class Deed(Enum):
    """What is done to a unit."""

    GATHER = "gather"
    REDUCE = "reduce"  # the gradient, and drop the whole parameters
    RELEASE = "release"  # drop the whole parameters; the gradient stays here


class Event(NamedTuple):
    """A deed to one unit, done by all ranks together."""

    deed: Deed
    unit: int


class Collectives(Protocol):
    """Who does what the order says."""

    def agree(self, need: int) -> list[int]:
        """What each rank needs next."""

    def gather(self, unit: int) -> None:
        """Begin to make it whole; nothing to do where it is."""

    def wait(self, unit: int) -> None:
        """Until it is whole."""

    def release(self, unit: int) -> None:
        """Drop what was gathered; its gradient stays where it is."""

    def reduce(self, unit: int) -> None:
        """Reduce its gradient, and drop what was gathered."""

    def is_whole(self, unit: int) -> bool:
        """Whether it is gathered."""


def backward_events(order: Sequence[int], kept: Set[int], *, reduces: bool) -> list[Event]:
    """What a backward does, for units that ran forward in this order; those in `kept` are whole already."""
    units = list(reversed(order))
    gathers = deque(Event(Deed.GATHER, unit) for unit in units if unit not in kept)
    events = [gathers.popleft()] if gathers else []
    for unit in units:
        if gathers and unit not in kept:
            events.append(gathers.popleft())
        if reduces:
            events.append(Event(Deed.REDUCE, unit))
        elif unit not in kept:
            events.append(Event(Deed.RELEASE, unit))
    return events


@dataclass
class _Forward:
    """A forward with gradient: what its backward will do."""

    order: list[int] = field(default_factory=list)
    told: Counter[int] = field(default_factory=Counter)  # calls of a unit that tell when their backward is over
    untold: set[int] = field(default_factory=set)  # units called on inputs without gradient


class Order:
    """Where this rank stands in the order, and what it does next."""

    def __init__(self, names: Sequence[str], collectives: Collectives, *, keep_all: bool) -> None:
        self._names = names  # of the units, for errors
        self._do = collectives
        self.kept = set(range(len(names))) if keep_all else {ROOT}
        self.reduces = True  # in the next backward; False while gradients accumulate
        self.is_held = False  # all units are whole, and stay so: nothing is to be done
        self._orders: dict[Hashable, list[int]] = {}  # by mode: training, gradient
        self._mode: Hashable = None
        self._is_inside = False  # of a forward of the root
        self._learnt: list[int] | None = None  # in a first forward: the order so far
        self._ahead: list[Event] = []  # what is left of a forward
        self._calls = _Forward()  # of the forward that runs
        self._ran: int | None = None  # whole still, in case it is called again at once
        self._forwards: list[_Forward] = []  # whose backward is to come
        self._last: list[_Forward] = []  # those of the last backward: there may be a second through the same graph
        self._behind: list[Event] | None = None  # what is left of a backward

    # -- forward -------------------------------------------------------------------------------------------

    def begin_forward(self, mode: Hashable) -> None:
        """The root is called."""
        if self.is_held:
            return
        self._is_inside, self._mode, self._calls = True, mode, _Forward()
        known = self._orders.get(mode)
        self._learnt = [ROOT] if known is None else None
        self._ahead = [Event(Deed.GATHER, unit) for unit in known or [ROOT]]

    def need_forward(self, unit: int) -> None:
        """A unit is called: make it whole.

        Raises:
            JobError: out of the order of the first time, after it was dropped.
        """
        is_known = self._learnt is None or unit in self._learnt
        if is_known and self._do.is_whole(unit):
            return
        if Event(Deed.GATHER, unit) in self._ahead:
            while not self._do.is_whole(unit):
                self._gather_next(wanted=unit)
        elif self._learnt is not None:
            self._agree(unit, self._learnt)
        elif self._is_inside:
            raise JobError(self.out_of_order(unit))
        else:
            raise JobError(
                f"{self._names[unit]} is called by itself, outside of the model's own forward. With shards, all ranks "
                "gather blocks in the order of that. Call the model; what is called by itself, place by itself."
            )

    def called(self, unit: int, *, tells: bool) -> None:
        """A unit is called, with gradient; `tells`: it will say when its backward is over."""
        self._calls.told[unit] += tells
        if not tells:
            self._calls.untold.add(unit)

    def ran(self, unit: int) -> None:
        """A unit returns: it is dropped before the next is gathered."""
        if unit not in self.kept:
            self._ran = unit

    def end_forward(self, *, has_gradient: bool) -> None:
        """The root returns: take part in what others still need."""
        if self.is_held:
            return
        if self._learnt is not None:
            self._agree(NOTHING, self._learnt)
            for unit in range(len(self._names)):
                if unit not in self._learnt:  # not needed by anyone this time; the model lists it after that before it
                    self._learnt.insert(self._learnt.index(unit - 1) + 1, unit)
                    self._gather(unit, wanted=NOTHING)
            self._orders[self._mode] = self._learnt
            self._learnt = None
        while self._ahead:
            self._gather_next(wanted=NOTHING)
        self._is_inside = False
        self._drop_last()
        if has_gradient:
            self._calls.order = self._orders[self._mode]
            self._forwards.append(self._calls)
        elif not self.awaits_backward:
            for unit in self.kept:
                self._do.release(unit)

    def out_of_order(self, unit: int) -> str:
        """What to say of a unit that is needed and cannot be gathered any more."""
        first = [self._names[other] for other in self._orders.get(self._mode, ())][1:]
        return (
            f"{self._names[unit]} runs out of the order in which the blocks ran the first time "
            f"({', '.join(first[:5])}{', ...' if len(first) > 5 else ''}). With shards, all ranks gather blocks in one "
            "order: a block may be left out, but not moved, or run once more. With reshard=false blocks stay whole "
            "during a step, and run in any order."
        )

    def _agree(self, need: int, learnt: list[int]) -> None:
        """Gather what the ranks say they need, until it was this rank's turn, or none needs anything."""
        while needs := [unit for unit in self._do.agree(need) if unit != NOTHING]:
            unit = min(needs)
            if unit not in learnt:
                learnt.append(unit)
            else:  # called again after others ran: it stays whole from now on
                self.kept.add(unit)
            self._gather(unit, wanted=need)
            if unit == need:
                return

    def _gather_next(self, *, wanted: int) -> None:
        self._gather(self._ahead.pop(0).unit, wanted=wanted)

    def _gather(self, unit: int, *, wanted: int) -> None:
        self._drop_last()
        self._do.gather(unit)
        if unit != wanted:
            (self._do.wait if unit in self.kept else self._do.release)(unit)

    def _drop_last(self) -> None:
        if self._ran is not None:
            self._do.release(self._ran)
        self._ran = None

    # -- backward ------------------------------------------------------------------------------------------

    @property
    def awaits_backward(self) -> bool:
        """There was a forward whose gradient is not settled."""
        return bool(self._forwards)

    def need_backward(self, unit: int) -> None:
        """The backward of a unit begins: that of all which ran after it is over."""
        behind = self._open_backward()
        if not self._do.is_whole(unit):
            self._do_through(behind, Event(Deed.GATHER, unit))

    def look_ahead(self, unit: int) -> None:
        """Begin the next gather, so that it runs beside the backward of this unit."""
        behind = self._open_backward()
        if behind and behind[0].deed is Deed.GATHER and (unit == ROOT or unit not in self.kept):
            self._do_next(behind)

    def over(self, unit: int) -> bool:
        """The backward of one call of a unit is over; returns whether its gradient was reduced before that."""
        if self._behind is None:
            return False
        is_late = self.reduces and Event(Deed.REDUCE, unit) not in self._behind
        forward = next((forward for forward in reversed(self._forwards) if forward.told[unit] > 0), None)
        if forward is not None:
            forward.told[unit] -= 1
        if unit in self.kept:
            while self._behind and self._behind[0].deed is not Deed.GATHER and self._is_over(self._behind[0].unit):
                self._do_next(self._behind)
        elif forward is None or not forward.told[unit]:
            self._do_through(self._behind, Event(Deed.REDUCE, unit), Event(Deed.RELEASE, unit))
        return is_late

    def end_backward(self) -> None:
        """The backward is over: take part in what others still need, and reduce the rest."""
        behind = self._open_backward()
        while behind:
            self._do_next(behind)
        self.forget()

    def forget(self) -> None:
        """No backward is to come."""
        self._behind = None
        self._forwards = []

    def _open_backward(self) -> list[Event]:
        if self._behind is not None:
            return self._behind
        kept: Set[int] = self.kept
        if not self.awaits_backward:  # a second one through the same graph, after the first has dropped all
            self._forwards, kept = self._last, set(range(len(self._names)))
            for unit in kept:
                self._do.gather(unit)
        self._last = [replace(forward, told=forward.told.copy()) for forward in self._forwards]
        *later, first = reversed(self._forwards)
        self._behind = [event for each in later for event in backward_events(each.order, kept, reduces=False)]
        self._behind += backward_events(first.order, kept, reduces=self.reduces)
        return self._behind

    def _is_over(self, unit: int) -> bool:
        """Whether no backward of this unit is to come; of one that cannot tell, and the root, only the end tells."""
        return unit != ROOT and not any(unit in each.untold or each.told[unit] > 0 for each in self._forwards)

    def _do_through(self, behind: list[Event], *targets: Event) -> None:
        """All up to the first of the targets; nothing where none is to come."""
        place = next((place for place, event in enumerate(behind) if event in targets), -1)
        for _ in range(place + 1):
            self._do_next(behind)

    def _do_next(self, behind: list[Event]) -> None:
        deed, unit = behind.pop(0)
        {Deed.GATHER: self._do.gather, Deed.REDUCE: self._do.reduce, Deed.RELEASE: self._do.release}[deed](unit)
