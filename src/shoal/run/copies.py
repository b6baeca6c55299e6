"""Copies of the state in memory, as often as they may cost: a rank that is killed costs the steps since the last."""

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.checkpoint.memory import SharedCopies
from shoal.record import Phase
from shoal.units import show_bytes, show_seconds
from shoal.world import World

SHARE = 0.05  # of the time of a step, that copies may cost where nobody says how often
_MEASURED = 3  # the first copies, of which the last is timed: the first ones make room
_ROOM = 0.5  # of the shared memory that is free


class Copies:
    """Takes them. Called on every rank, after every step; what depends on figures is decided together.

    Args:
        every: steps between two copies; 0: as often as SHARE allows.
        say: for a line about what it costs.
    """

    def __init__(self, folder: Path, world: World, *, every: int, say: Callable[[str], None]) -> None:
        self._folder, self._world, self._say = folder, world, say
        self._every, self._asked = every, every
        self._copies = SharedCopies(folder, world)
        self._num_taken, self._is_on = 0, True
        self._before = math.nan  # when the copy before was taken
        self._since = 0  # steps

    def after(self, step: int, state: Callable[[], Any]) -> None:
        """After a step, whose state is copied if that is due."""
        self._since += 1
        if not self._is_on or self._since < (self._every or 1):
            return
        self._since = 0
        began = time.perf_counter()
        num_bytes, failed = 0, 0.0
        try:
            with self._world.record.phase(Phase.SAVE):
                num_bytes = self._copies.take(state(), step=step)
        except OSError:
            failed = 1.0
        ended = time.perf_counter()
        self._num_taken += 1
        if self._num_taken in (1, _MEASURED):
            own = [float(num_bytes), failed, ended - began, began - self._before, self._free()]
            self._judge([*own, float(self._world.place.node)])
        self._before = time.perf_counter()

    def _free(self) -> float:
        return float(shutil.disk_usage(self._folder).free) if self._folder.is_dir() else 0.0

    def _judge(self, own: list[float]) -> None:
        """Together with all ranks: whether copies fit, and how often they are worth it."""
        rows = self._world.gather_floats(own)
        num_bytes, failed, cost, steps, free, nodes = zip(*rows, strict=True)
        on = {node: sum(row[0] for row in rows if row[-1] == node) for node in nodes}
        fullest = max(range(len(rows)), key=lambda rank: on[nodes[rank]] - free[rank] * _ROOM)
        total, room = int(on[nodes[fullest]]), int(free[fullest] * _ROOM)
        if any(failed) or (self._num_taken == 1 and total > room):
            self._is_on = False
            self._copies.forget()
            self._say(
                f"memory  no copies: two of {show_bytes(total)} do not fit into half of what is free in shared memory, "
                f"{show_bytes(room)}; a failure goes back to the last checkpoint"
            )
        elif self._num_taken == _MEASURED:
            cost_s, step_s = max(cost), max(steps) / (self._asked or 1)
            self._every = self._asked or max(1, math.ceil(cost_s / (SHARE * step_s)))
            each = "each step" if self._every == 1 else f"every {self._every} steps"
            most = "1 step" if self._every == 1 else f"{self._every} steps"
            self._say(
                f"memory  a copy of {show_bytes(int(sum(num_bytes)))} in shared memory {each}: {show_seconds(cost_s)}, "
                f"{100 * cost_s / (self._every * step_s):.2g} % of the time; a killed rank costs at most {most}"
            )
