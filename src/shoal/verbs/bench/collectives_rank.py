"""What a rank does in `shoal bench collectives`: every operation at every size, round by round, checked once."""

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.mesh import Mesh
from shoal.metrics.progress import Progress
from shoal.verbs.bench.collectives_calls import EXPECT, PREPARE, Prepared, Wire
from shoal.world import Place, World

LEAST_ROUNDS = 3  # of the slowest, where as many are asked for
_MOST_CALLS = 20  # back to back, in one round
_WARM_S = 0.05  # a first call that is shorter may be mostly a connection that was made: it is no estimate
_MESSAGES = {"send_recv": 2}  # in one call; else 1


class CollectivesError(ShoalError):
    """What cannot be measured between ranks, or came out wrong."""


class Cell(NamedTuple):
    """What is timed: an operation over an axis, at a size in bytes as it was asked for."""

    axis: str
    operation: str
    size_bytes: int


@dataclass
class Timing:
    """Of one cell: how it is repeated, and the seconds of each round, of the slowest rank."""

    calls: int
    rounds: int
    seconds: list[float] = field(default_factory=list)


def axes_of(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """What is measured, by name: every axis of several ranks, and before them the world, where it is none of those."""
    alone: dict[str, tuple[str, ...]] = {axis: (axis,) for axis, size in mesh.sizes.items() if size > 1}
    spanning = tuple(axis for axis, size in mesh.axes if size > 1)
    return alone if len(spanning) == 1 else {"world": spanning, **alone}


def measure(
    place: Place,
    *,
    layout: str,
    operations: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    budget_s: float,
    device: str | None,
    folder: str,
    quiet: bool,
) -> int:
    """Time every cell in a world of this layout; rank 0 leaves what is known so far in `measured.json`."""
    with World.open(layout, place=place, device=device) as world:
        bench = _Bench(world, operations, sizes, Path(folder), quiet=quiet or world.rank > 0)
        try:
            bench.run(rounds, budget_s)
        finally:
            bench.close()
    return 0


class _Bench:
    def __init__(
        self, world: World, operations: Sequence[str], sizes: Sequence[int], folder: Path, *, quiet: bool
    ) -> None:
        self._world, self._folder, self._num_steps = world, folder, 0
        self._wires = dict(_wires(world, max(sizes)))
        self._cells = [Cell(axis, name, size) for axis in self._wires for size in sizes for name in operations]
        self._smallest = min(sizes)
        self._prepared: dict[Cell, Prepared] = {}
        self._timings: dict[Cell, Timing] = {}
        self._quiet = quiet
        self._progress: Progress | None = None

    def run(self, rounds: int, budget_s: float) -> None:
        """One round to check and to warm up, then those that count: cells take turns, in an order that changes."""
        self._progress = None if self._quiet else Progress(len(self._cells) * (rounds + 1), stream=sys.stderr)
        for cell in self._cells:
            self._prepared[cell] = self._prepare(cell)
            self._timings[cell] = self._plan(cell, rounds, budget_s / len(self._cells))
            self._step()
        for number in range(rounds):
            for cell in random.Random(number).sample(self._cells, len(self._cells)):  # as every rank draws it
                timing = self._timings[cell]
                if number < timing.rounds:
                    timing.seconds.append(self._time(cell, timing.calls))
                self._step()
            if self._world.rank == 0:
                self._write(number + 1)

    def close(self) -> None:
        """The bar stays as it is."""
        if self._progress is not None:
            self._progress.close()

    def _step(self) -> None:
        self._num_steps += 1
        if self._progress is not None:
            self._progress.update(self._num_steps)

    def _prepare(self, cell: Cell) -> Prepared:
        wire = self._wires[cell.axis]
        prepared = PREPARE[cell.operation](wire, wire.count(cell.size_bytes))
        if cell.size_bytes == self._smallest:
            self._check(cell, wire, prepared)
        return prepared

    def _check(self, cell: Cell, wire: Wire, prepared: Prepared) -> None:
        """A benchmark of what computes nothing would look good."""
        count = wire.count(cell.size_bytes)
        had = [_values(member, count).to(wire.own.device) for member in range(len(wire.members))]
        prepared.result.fill_(-1)  # what the operation before has left there may be right
        wire.own[:count].copy_(had[wire.me])
        prepared.call()
        is_right = torch.equal(prepared.result, EXPECT[cell.operation](had, wire.me))
        told = self._world.gather_floats([float(is_right)])
        wire.own[:count].zero_()  # or repeated sums would overflow
        wrong = [str(rank) for rank, row in enumerate(told) if not row[0]]
        if wrong:
            raise CollectivesError(
                f"{cell.operation} over {cell.axis} gives wrong values on rank{'s' * (len(wrong) > 1)} "
                f"{', '.join(wrong)}. Its speed means nothing before that is mended: shoal test."
            )

    def _plan(self, cell: Cell, rounds: int, share_s: float) -> Timing:
        """Repetitions such that a cell takes its share of the time, or its least number of rounds."""
        estimate_s = self._time(cell, 1)
        if estimate_s < _WARM_S:
            estimate_s = self._time(cell, 1)
        fitting = max(LEAST_ROUNDS, int(share_s / estimate_s))
        calls = int(share_s / rounds / estimate_s)
        return Timing(calls=min(max(calls, 1), _MOST_CALLS), rounds=min(rounds, fitting))

    def _time(self, cell: Cell, calls: int) -> float:
        """Seconds of one message of a cell, on the slowest rank, the same on every rank.

        The exchange of the times is the barrier before the next measurement: nobody has it before all have sent.
        """
        call = self._prepared[cell].call
        began = time.perf_counter()
        for _ in range(calls):
            call()
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        own = time.perf_counter() - began
        slowest = max(row[0] for row in self._world.gather_floats([own]))
        return slowest / calls / _MESSAGES.get(cell.operation, 1)

    def _write(self, rounds: int) -> None:
        wires, device = self._wires, self._world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        told = {
            "machine": {"torch": torch.__version__, "backend": self._world.backend, "device": name or device.type},
            "rounds": rounds,
            "rows": [
                {
                    "op": cell.operation,
                    "axis": cell.axis,
                    "ranks": len(wires[cell.axis].members),
                    "bytes": 4 * wires[cell.axis].count(cell.size_bytes),
                    "calls": timing.calls,
                    "seconds": timing.seconds,
                }
                for cell, timing in self._timings.items()
            ],
        }
        partial = self._folder / "measured.json.tmp"
        partial.write_text(json.dumps(told))
        partial.replace(self._folder / "measured.json")


def _wires(world: World, largest_bytes: int) -> Iterator[tuple[str, Wire]]:
    num_values = max(largest_bytes // 4, world.size)
    own, other = (torch.empty(num_values, device=world.device).zero_() for _ in range(2))  # written, so it is there
    for name, axes in axes_of(world.mesh).items():
        members = world.mesh.group(world.rank, axes)
        group = world.axis_group(*axes)
        yield name, Wire(group=group, members=members, me=members.index(world.rank), own=own, other=other)


def _values(member: int, count: int) -> Tensor:
    """Another value at every place and of every member, such that float32 sums are exact."""
    return torch.arange(count, dtype=torch.float32) % 97 + 100 * member
