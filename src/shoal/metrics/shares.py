"""Where a step goes: shares of its wall time that add up to 1. Pure; nothing here measures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from shoal.metrics.watch import ALL

# Of a slow rank. A moment in which it had no core is in one step; what is less than a time slice has many reasons.
_LEAST_SHARE, _LEAST_S = 0.2, 1e-3  # more work than the others' in a step: of its wall time, and at all
_LEAST_STEPS, _MOST_STEPS = 3, 0.75  # so many steps are known, and in this part of them it was so


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of one rank in a step.

    Attributes:
        wall_s: from the end of the step before to the end of this one.
        data_s: waiting for batches.
        phases_s: in phases of the step: compute, update.
        waits_s: waiting for messages in a phase, by phase and axis.
        hidden_s: what DDP waited for in its backward, by axis; part of the compute phase that `waits_s` does not have.
        bubble_s: what a pipeline's schedule lets the rank stand still, were messages free; part of its waits, for the
            last rank or on pp.
        work_s: at work (data, compute, update, without waits), step by step; the steps are the same on every rank.
    """

    wall_s: float
    data_s: float
    phases_s: Mapping[str, float]
    waits_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    hidden_s: Mapping[str, float] = field(default_factory=dict)
    bubble_s: float = 0.0
    work_s: list[float] = field(default_factory=list)

    def seconds(self) -> dict[str, float]:
        """By name: data, compute, communication on each axis (`comm dp`), bubble, waiting for the last rank, update,
        other."""
        comm: dict[str, float] = dict(self.hidden_s)
        for (_, axis), waited_s in self.waits_s.items():
            comm[axis] = comm.get(axis, 0.0) + waited_s
        waiting_s = comm.pop(ALL, 0.0)
        bubble_s = min(self.bubble_s, waiting_s + comm.get("pp", 0.0))
        if bubble_s:
            from_last = min(bubble_s, waiting_s)
            waiting_s -= from_last
            comm["pp"] = comm.get("pp", 0.0) - (bubble_s - from_last)
        parts = {"data": self.data_s, "compute": self._worked("compute") - sum(self.hidden_s.values())}
        parts |= {f"comm {axis}": s for axis, s in sorted(comm.items())}
        parts |= {"bubble": bubble_s} if bubble_s else {}
        parts |= {"waiting": waiting_s} if self.waits_s else {}
        parts["update"] = self._worked("update")
        return {**parts, "other": self.wall_s - sum(parts.values())}

    def _worked(self, phase: str) -> float:
        return self.phases_s.get(phase, 0.0) - sum(s for (at, _), s in self.waits_s.items() if at == phase)


def shares(ranks: Sequence[Spent]) -> dict[str, float]:
    """Means over ranks of the shares of the wall time; they add up to 1."""
    rows = [{name: s / rank.wall_s for name, s in rank.seconds().items()} for rank in ranks]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def slow_ranks(ranks: Sequence[Spent]) -> dict[int, float]:
    """Ranks that are at work so much longer than the others, again and again, that it is worth a word; and the seconds.

    Longer than the median of the ranks (of two, the quicker) in the same step, by a fifth of a step and a millisecond
    at least, in three of four steps. A ratio of their work would say nothing: it may be a small part of the step.
    """
    steps = list(zip(*(rank.work_s for rank in ranks), strict=True))
    if len(steps) < _LEAST_STEPS:
        return {}
    usual = [sorted(step)[(len(step) - 1) // 2] for step in steps]
    found = {}
    for number, rank in enumerate(ranks):
        above = [own - other for own, other in zip(rank.work_s, usual, strict=True)]
        least_s = max(_LEAST_SHARE * rank.wall_s, _LEAST_S)
        if sum(s > least_s for s in above) >= _MOST_STEPS * len(above):
            found[number] = median(above)
    return found
