"""A pipeline's steps as they were, and as its schedule promises them with the times of its stages."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shoal.world import World

Actions = list[list[tuple[int, str, int, float, float]]]  # step by step: stage, kind, micro-batch, begin and end


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Rows of spans: rank, stage, kind, micro-batch, start and end in seconds; empty without a pipeline.

    Attributes:
        bubble: the idle share that is promised.
    """

    bubble: float | None = None
    measured: list[list[Any]] = field(default_factory=list)
    promised: list[list[Any]] = field(default_factory=list)

    @staticmethod
    def of(world: World, ranks: Sequence[Actions]) -> "Schedule":
        """From what each rank of the world did in the steps that were watched."""
        if world.layout.pp == 1:
            return Schedule()
        from shoal.parallel.pipeline.timetable import bubble, timetable

        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for stage, kind, _, begin_s, end_s in (action for rank in ranks for step in rank for action in step):
            times[kind, stage].append(end_s - begin_s)
        spans = timetable(world.layout, lambda kind, stage: median(times[kind, stage]))
        first = world.mesh.group(0, ("pp",))  # of several pipelines
        last: list[list[Any]] = [[at, *action] for at, rank in enumerate(first) for action in ranks[rank][-1]]
        begin_s = min(float(row[4]) for row in last)
        return Schedule(
            bubble=bubble(spans, world.layout.pp),
            measured=[[*row[:4], row[4] - begin_s, row[5] - begin_s] for row in last],
            promised=[[s.rank, s.stage, s.kind, s.micro, s.start_s, s.end_s] for s in spans],
        )

    def idle_s(self, coordinate: int) -> float:
        """Seconds of a step that the schedule lets a rank on pp stand still."""
        busy_s = sum(row[5] - row[4] for row in self.promised if row[0] == coordinate)
        return float(max(row[5] for row in self.promised) - busy_s)
