"""Which ranks stand still, judged by what they noted: pure, so that every case is a table in a test.

A rank that waits for a message is no suspect as long as another one is busy: it waits for that one. So what counts is
who waits for nobody, and how long that may take.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shoal.record import Message, Phase, Seen

_ENOUGH = 3  # earlier times of a phase before there is a usual one


@dataclass(frozen=True, kw_only=True)
class Patience:
    """When the parent begins to suspect, and how it looks."""

    least_s: float = 3.0  # in one phase of one step, whatever is usual
    factor: float = 5.0  # times the usual
    seldom_s: float = 60.0  # the same for saving, evaluating and what the loop does besides: they vary
    unknown_s: float = 600.0  # before anything is usual: set-up, first steps, the first evaluation
    look_s: float = 0.25  # between two looks
    stacks_s: float = 0.6  # to answer with a stack, and to see who uses the CPU
    slow: float = 1.5  # times the work of the others: a straggler
    window_steps: int = 20  # over which work is compared
    window_s: float = 5.0  # at least: a rank whose core is taken for a moment is no straggler
    num_windows: int = 3  # in a row, before it is said

    def after(self, stood_s: float) -> "Patience":
        """Once ranks went on by themselves: what takes that long, and twice that, is not told again."""
        return replace(self, least_s=min(max(self.least_s, 2 * stood_s), self.unknown_s))

    def limit_s(self, seen: Seen) -> float:
        """Seconds that a rank may be where it is."""
        spent = seen.spent.get(seen.phase)
        if spent is None or spent.count < _ENOUGH:
            return self.unknown_s
        is_regular = seen.phase in (Phase.DATA, Phase.COMPUTE, Phase.UPDATE)
        return max(self.least_s if is_regular else self.seldom_s, self.factor * spent.usual_s)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Who stands, and why nobody goes on; no ranks: all is well."""

    ranks: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()  # for a message
    is_circle: bool = False  # all of them wait for messages


def standing(
    seen: Mapping[int, Seen],
    stopped: Collection[int],
    now: float,
    patience: Patience,
    waits: Collection[int] = (),
) -> Standing:
    """Who stands still now.

    Args:
        seen: the ranks that are alive.
        stopped: those that the kernel keeps from running.
        waits: those that wait for a message though they did not note it.
    """
    over = {rank for rank, one in seen.items() if now - one.since_s > patience.limit_s(one)}
    waiting = frozenset(rank for rank, one in seen.items() if (one.is_inside or rank in waits) and rank not in stopped)
    halted = {rank for rank in stopped if rank in over or now - seen[rank].changed_s > patience.least_s}
    busy = set(seen) - waiting - set(stopped)
    if halted:
        return Standing(ranks=frozenset(halted), waiting=waiting)
    if over & busy:
        return Standing(ranks=frozenset(over & busy), waiting=waiting)
    if over and not busy:
        return Standing(ranks=frozenset(seen), waiting=waiting, is_circle=True)
    return Standing()


def is_desync(seen: Mapping[int, Seen]) -> bool:
    """Whether ranks that all wait wait for different collectives of the same ranks: none of them will be whole.

    Messages from one rank to one are left out: they have no number that others know.
    """
    calls: dict[str, set[Message]] = {}
    for one in seen.values():
        if one.message is not None and one.is_inside and one.message.number:
            calls.setdefault(one.message.group.partition(" ")[0], set()).add(one.message)
    return any(len(different) > 1 for different in calls.values())
