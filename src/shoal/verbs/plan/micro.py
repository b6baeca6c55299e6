"""How many micro-batches show what all of them show.

A rank's memory is largest when most micro-batches are between their forward and their backward. Once a schedule has
come to its steady state that number stays, so more micro-batches only repeat:

    pp3:micro=9, rank 0   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 ...     three; from the second time on, beside gradients
"""

from dataclasses import replace

from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.parallel.pipeline.schedule import schedule_name
from shoal.parallel.pipeline.timetable import Action, actions

_GROWS = ("gpipe", "looped-bfs")  # all micro-batches are alive at once
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
    most = most_alive(layout, coordinate)
    found = 0
    for number in range(1, layout.micro):
        fewer = with_micro(layout, number)
        if fewer is None:
            continue
        if found and number >= found + 2:
            return number
        if not found and most_alive(fewer, coordinate) == most:
            found = number
    return layout.micro


def next_fewer(layout: Layout, num_micro: int) -> int:
    """The greatest smaller number of micro-batches that the schedule takes."""
    return next(number for number in range(num_micro - 1, 0, -1) if with_micro(layout, number) is not None)


def most_alive(layout: Layout, coordinate: int) -> int:
    """Of a rank, the most forwards at one time whose backward is still to come; over all of its stages."""
    if layout.pp == 1:
        return 1
    alive = most = 0
    for kind, _, _ in _order(layout, coordinate):
        alive += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]  # what the weights' gradients need stays
        most = max(most, alive)
    return most


def _order(layout: Layout, coordinate: int) -> list[Action]:
    return actions(layout)[coordinate]
