"""A rank that is slower than its peers, told from their own work: time in a phase less the time that it waited."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.launch.suspects import Patience
from shoal.record import Phase, Seen, Spent

_WORK = (Phase.DATA, Phase.COMPUTE, Phase.UPDATE)
_WARM_UP = 3  # steps at the start, which are slow everywhere
_LEAST_SHARE = 0.1  # of a step: what costs less is not worth a line


@dataclass(frozen=True)
class Straggler:
    """One rank, and the phase in which it needs more than the others."""

    rank: int
    phase: Phase
    share: float  # of each step, that it costs
    ratio: float  # of its time in that phase to that of the others

    def __str__(self) -> str:
        return (
            f"rank {self.rank} costs {100 * self.share:.0f} % of each step: its {self.phase.label} takes "
            f"{self.ratio:.1f} x that of the others"
        )


class Stragglers:
    """Compares windows of steps as they pass, and names each straggler once.

    Ranks at one coordinate of pp are compared: the stages of a pipeline differ rightly.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._began: tuple[float, Mapping[int, Seen]] | None = None
        self._in_a_row: dict[tuple[int, Phase], int] = {}
        self._named: set[int] = set()

    def advance(self, seen: Mapping[int, Seen], now: float) -> list[Straggler]:
        """Those that are found now."""
        if not seen or min(_steps(one) for one in seen.values()) < _WARM_UP:
            return []
        if self._began is None or set(self._began[1]) != set(seen):
            self._began = now, seen
            return []
        since, before = self._began
        steps = min(_steps(one) - _steps(before[rank]) for rank, one in seen.items())
        if steps < self._patience.window_steps or now - since < self._patience.window_s:
            return []
        self._began = now, seen
        return self._judge(before, seen, (now - since) / steps)

    def _judge(self, before: Mapping[int, Seen], seen: Mapping[int, Seen], step_s: float) -> list[Straggler]:
        found = [
            straggler
            for rank in seen
            if rank not in self._named
            and (straggler := _compare(rank, before, seen, step_s, self._patience.slow)) is not None
        ]
        keys = {(one.rank, one.phase): self._in_a_row.get((one.rank, one.phase), 0) + 1 for one in found}
        self._in_a_row = keys
        told = [one for one in found if keys[one.rank, one.phase] >= self._patience.num_windows]
        self._named |= {one.rank for one in told}
        return told


def _compare(
    rank: int, before: Mapping[int, Seen], seen: Mapping[int, Seen], step_s: float, slow: float
) -> Straggler | None:
    peers = [other for other in seen if other != rank and seen[other].stage == seen[rank].stage]
    if not peers:
        return None
    own = {phase: _work_s(before[rank], seen[rank], phase) for phase in _WORK}
    usual = {phase: statistics.median(_work_s(before[p], seen[p], phase) for p in peers) for phase in _WORK}
    more = {phase: own[phase] - usual[phase] for phase in _WORK}
    share = sum(more.values()) / step_s
    if sum(own.values()) <= slow * sum(usual.values()) or share < _LEAST_SHARE:
        return None
    # A few steps that take very long are no slow rank: its usual ones are slower, too.
    if _usual_work_s(seen[rank]) <= slow * statistics.median(_usual_work_s(seen[p]) for p in peers):
        return None
    phase = max(_WORK, key=lambda each: more[each])
    return Straggler(rank, phase, min(share, 1.0), own[phase] / max(usual[phase], 1e-6))


def _work_s(before: Seen, seen: Seen, phase: Phase) -> float:
    """Own work in a phase, per step."""
    was, now = before.spent.get(phase, Spent()), seen.spent.get(phase, Spent())
    worked = (now.total_s - was.total_s) - (now.waited_s - was.waited_s)
    return worked / max(1, now.count - was.count)


def _usual_work_s(seen: Seen) -> float:
    return sum(seen.spent.get(phase, Spent()).work_s for phase in _WORK)


def _steps(seen: Seen) -> int:
    return seen.spent.get(Phase.UPDATE, Spent()).count
