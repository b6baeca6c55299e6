"""Where a step goes: shares of its wall time that add up to 1. Pure; nothing here measures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.metrics.watch import ALL

_WORK = ("data", "compute", "update")


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
    """

    wall_s: float
    data_s: float
    phases_s: Mapping[str, float]
    waits_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    hidden_s: Mapping[str, float] = field(default_factory=dict)
    bubble_s: float = 0.0

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


def slow_ranks(ranks: Sequence[Spent], *, above: float = 0.25) -> dict[int, float]:
    """Ranks that spend longer at work (data, compute, update) than the median by so much; and by how much."""
    work = [sum(s for name, s in rank.seconds().items() if name in _WORK) for rank in ranks]
    usual = sorted(work)[(len(work) - 1) // 2]  # of two, the quicker
    return {rank: s / usual - 1 for rank, s in enumerate(work) if usual > 0 and s > usual * (1 + above)}
