"""How many micro-batches show what all of them show.

A rank's memory is largest when most micro-batches are between their forward and their backward. Once a schedule has
come to its steady state that number stays, so more micro-batches only repeat:

    pp3:micro=9, rank 0   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 ...     three; from the second time on, beside gradients
"""

from dataclasses import replace

from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.parallel.pipeline.schedule import schedule_name
from shoal.parallel.pipeline.timetable import actions

_GROWS = ("gpipe", "looped-bfs")  # all micro-batches are alive at once
_IN_ANY_NUMBER = ("gpipe", "1f1b", "looped-bfs")
_IN_ROUNDS = ("interleaved", "zb")
_WITHOUT_PIPELINE = 3  # the first makes gradients, the second adds to them, the last reduces


def with_micro(layout: Layout, num_micro: int) -> Layout | None:
    """The layout, its schedule spelled, with so many micro-batches; None where the schedule does not take them."""
    try:
        return replace(layout, schedule=schedule_name(layout) if layout.pp > 1 else None, micro=num_micro)
    except LayoutError:
        return None


def enough(layout: Layout, coordinate: int) -> int:
    """So many micro-batches that a rank's memory is as large as with all; some more, so that it is so twice."""
    if layout.pp == 1:
        return min(layout.micro, _WITHOUT_PIPELINE)
    if schedule_name(layout) in _GROWS:
        return layout.micro
    numbers, most = _fitting(layout), most_alive(layout, coordinate)
    for number, last in zip(numbers, numbers[2:], strict=False):
        if all(_most(layout, few, coordinate) == most for few in (number, last)):
            return last
    return layout.micro


def to_begin_with(layout: Layout) -> int:
    """So few that the first step, which makes the optimizer's state, is short; messages and FLOPs are in proportion."""
    in_any_number = layout.pp == 1 or schedule_name(layout) in _IN_ANY_NUMBER
    return min(2, layout.micro) if in_any_number else next(iter(_fitting(layout)), layout.micro)


def _fitting(layout: Layout) -> list[int]:
    """Numbers of micro-batches, fewer than the layout's, that the schedule takes, in rounds as long as the layout's."""
    in_rounds = schedule_name(layout) in _IN_ROUNDS
    length = layout.micro // max(1, layout.micro // layout.pp) if in_rounds else 1
    return [number for number in range(length, layout.micro, length) if with_micro(layout, number) is not None]


def _most(layout: Layout, num_micro: int, coordinate: int) -> int:
    fewer = with_micro(layout, num_micro)
    assert fewer is not None, "it fits"
    return most_alive(fewer, coordinate)


def most_alive(layout: Layout, coordinate: int) -> int:
    """Of a rank, the most forwards at one time whose backward is still to come; over all of its stages."""
    if layout.pp == 1:
        return 1
    alive = most = 0
    for kind, _, _ in actions(layout)[coordinate]:
        alive += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]  # what the weights' gradients need stays
        most = max(most, alive)
    return most
