"""The order in which the stages work: torch's schedules, by the names of the layout."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from shoal.layout import V_SHAPED, Layout
from shoal.parallel.pipeline.stage import Chunk, Stage

_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def schedule_name(layout: Layout) -> str:
    """The schedule of a layout that leaves it open: the one that needs least memory, of those that fit."""
    if layout.schedule is not None:
        return layout.schedule
    if layout.virtual > 1:
        rounds = max(1, layout.micro // layout.pp)
        return "looped-bfs" if layout.micro % rounds else "interleaved"  # which works in rounds of one size
    return "1f1b" if layout.micro >= layout.num_stages else "gpipe"


def stages_of(layout: Layout, coordinate: int) -> list[int]:
    """The stages of the ranks with this coordinate on pp."""
    if schedule_name(layout) in V_SHAPED:
        return [coordinate, 2 * layout.pp - 1 - coordinate]
    return [coordinate + layout.pp * turn for turn in range(layout.virtual)]


class Schedule:
    """Steps over micro-batches, forward and backward or forward alone."""

    def __init__(self, layout: Layout, stages: Sequence[Stage]) -> None:
        self._layout, self._stages = layout, list(stages)
        self._made: dict[tuple[int, bool], Any] = {}
        self._on_output: Callable[[Any, int], Tensor] | None = None
        for stage in stages:
            stage.stage_index_to_group_rank = {
                index: rank for rank in range(layout.pp) for index in stages_of(layout, rank)
            }

    def run(self, chunks: Sequence[Chunk], on_output: Callable[[Any, int], Any], *, has_backward: bool) -> None:
        """All micro-batches through all stages.

        Args:
            on_output: called in the last stage with the model's output and the number of the micro-batch; gives the
                loss to run backward from.
        """
        key = (len(chunks), has_backward)
        schedule = self._made.get(key) or self._made.setdefault(key, self._make(len(chunks), has_backward))
        for stage in self._stages:
            stage.begin(chunks, has_backward=has_backward)
        self._on_output = on_output
        try:
            schedule._step_microbatches(
                [()] * len(chunks), [{}] * len(chunks), list(range(len(chunks))), None, return_outputs=False
            )
        finally:
            self._on_output = None
            schedule._internal_losses.clear()

    def _make(self, num_micro: int, has_backward: bool) -> Any:
        name = schedule_name(self._layout)
        options = {"n_microbatches": num_micro, "loss_fn": self._loss, "scale_grads": False}
        if name in _SINGLE:
            is_many = num_micro >= self._layout.num_stages  # as 1F1B asks; a plan begins with a short step
            schedule = _SINGLE[name if has_backward and is_many else "gpipe"](self._stages[0], **options)
            # Nothing is to be found out about shapes: the program says them.
            schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
            return schedule
        if not has_backward:  # of the schedules with this placement of stages, those that take any number
            name = "zbv" if name in V_SHAPED else "looped-bfs"
        schedule = _MULTI[name](self._stages, **options)
        schedule._stages_forward_initialized = schedule._stages_backward_initialized = True
        return schedule

    def _loss(self, output: Any, number: int) -> Any:
        assert self._on_output is not None
        loss = self._on_output(output, number)
        # No view, so that its graph can be cut off when its backward has run.
        return loss.clone() if isinstance(loss, Tensor) and loss.requires_grad else loss
