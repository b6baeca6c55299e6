"""What `shoal bench collectives` found, as data and as tables."""

import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from shoal.metrics.links import OPERATIONS, Fit, algorithm_bandwidth, bus_bandwidth, fit_line, ring_bound_s
from shoal.units import show_bytes, show_count, show_seconds

EXAMPLE_BYTES = 10_000_000  # of the closing sentence, or the largest size that was measured


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation over one axis at one size; seconds are those of the slowest rank, over the rounds."""

    op: str
    axis: str
    ranks: int
    bytes: int
    median_s: float
    min_s: float
    max_s: float
    rounds: int
    calls: int

    @staticmethod
    def of(told: Mapping[str, Any]) -> "Row":
        """From what a rank has written."""
        seconds = told["seconds"]
        return Row(
            **{name: told[name] for name in ("op", "axis", "ranks", "bytes", "calls")},
            median_s=statistics.median(seconds),
            min_s=min(seconds),
            max_s=max(seconds),
            rounds=len(seconds),
        )

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Size over the median time."""
        return algorithm_bandwidth(self.bytes, self.median_s)

    @property
    def bus_bytes_per_s(self) -> float:
        """Comparable with a link."""
        return bus_bandwidth(self.op, self.ranks, self.bytes, self.median_s)


@dataclass(kw_only=True)
class CollectivesReport:
    """A benchmark of the collectives.

    Attributes:
        machine: torch, backend, device, cores.
        seconds: that it took, from the start of the ranks.
        written: the cluster file, if there is one.
    """

    layout: str
    num_ranks: int
    exit_code: int = 0
    rows: list[Row] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    written: str | None = None

    @cached_property
    def fits(self) -> dict[tuple[str, str], Fit]:
        """By axis and operation, where there are two sizes or more."""
        points: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in self.rows:
            points.setdefault((row.axis, row.op), []).append((row.bytes, row.median_s))
        lines = {key: fit_line(given) for key, given in points.items()}
        return {key: line for key, line in lines.items() if line is not None}

    @property
    def axes(self) -> list[str]:
        """As they were measured; the first spans the world."""
        return list(dict.fromkeys(row.axis for row in self.rows))

    def link_bytes_per_s(self, axis: str) -> float | None:
        """The best that send_recv reached over this axis, at any size; None where it was not measured."""
        speeds = [row.algorithm_bytes_per_s for row in self.rows if (row.op, row.axis) == ("send_recv", axis)]
        return max(speeds, default=None)

    def bound_s(self, row: Row) -> float | None:
        """What a ring all-reduce on the measured links could not beat; None for other operations."""
        link = self.link_bytes_per_s(row.axis)
        return ring_bound_s(row.ranks, row.bytes, link) if row.op == "all_reduce" and link else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; GB are 10^9 bytes."""
        return {
            "kind": "collectives",
            "exit_code": self.exit_code,
            "layout": self.layout,
            "num_ranks": self.num_ranks,
            "machine": dict(self.machine),
            "seconds": self.seconds,
            "rows": [self._row_as_dict(row) for row in self.rows],
            "fits": [
                {"axis": axis, "op": op, "latency_us": fit.latency_s * 1e6, "gb_per_s": _giga(fit.bytes_per_s)}
                | asdict(fit)
                for (axis, op), fit in self.fits.items()
            ],
            "sentence": self.sentence(),
            "notes": self.notes,
            "written": self.written,
        }

    def _row_as_dict(self, row: Row) -> dict[str, Any]:
        told = asdict(row)
        seconds = {name: told.pop(f"{name}_s") for name in ("median", "min", "max")}
        bound = self.bound_s(row)
        return told | {
            "seconds": seconds,
            "algbw_gb_per_s": row.algorithm_bytes_per_s / 1e9,
            "busbw_gb_per_s": row.bus_bytes_per_s / 1e9,
            "ring_bound_s": bound,
            "times_ring_bound": None if bound is None else row.median_s / bound,
        }

    # -- as text ---------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        on = "".join(f", {name} {value}" for name, value in self.machine.items())
        lines = [f"collectives  {self.num_ranks} ranks in {self.layout}{on}  ({show_seconds(self.seconds)})"]
        for axis in self.axes:
            rows = sorted((row for row in self.rows if row.axis == axis), key=lambda row: OPERATIONS.index(row.op))
            lines += ["", self._title(axis, rows[0].ranks), _draw(self._heads(), map(self._cells, rows))]
        if self.fits:
            heads = ("time = latency + size / bandwidth", "over", "latency", "bandwidth", "off by at most")
            lines += ["", _draw(heads, (_fit_cells(*key, fit) for key, fit in self.fits.items()))]
        lines += ["", self.sentence()] if self.sentence() else []
        return "\n".join([*lines, *self.notes, *([f"written: {self.written}"] if self.written else [])])

    def _title(self, axis: str, ranks: int) -> str:
        groups = self.num_ranks // ranks
        return f"over {axis}: " + (f"{ranks} ranks" if groups == 1 else f"{groups} groups of {ranks} at once")

    def _heads(self) -> tuple[str, ...]:
        bound = ("ring bound", "x bound") if any(map(self.bound_s, self.rows)) else ()
        return ("operation", "size", "time", "min", "max", "algbw GB/s", "busbw GB/s", *bound)

    def _cells(self, row: Row) -> tuple[str, ...]:
        bound = self.bound_s(row)
        times = map(_show, (row.median_s, row.min_s, row.max_s))
        speeds = (f"{speed / 1e9:.4f}" for speed in (row.algorithm_bytes_per_s, row.bus_bytes_per_s))
        against = () if bound is None else (_show(bound), f"{row.median_s / bound:,.1f}")
        return (row.op, show_bytes(row.bytes), *times, *speeds, *against)

    def sentence(self) -> str:
        """What the figures mean for a training, in words; empty where no all_reduce was measured at two sizes."""
        axis = next((axis for axis in self.axes if (axis, "all_reduce") in self.fits), None)
        if axis is None:
            return ""
        fit, link = self.fits[axis, "all_reduce"], self.link_bytes_per_s(axis)
        largest = max((row for row in self.rows if row.axis == axis), key=lambda row: row.bytes)
        size = min(EXAMPLE_BYTES, largest.bytes)
        told = (
            f"An all_reduce of {show_count(size)}B (the float32 gradients of {show_count(size / 4)} parameters) over "
            f"{'the world' if axis == 'world' else axis} takes about {show_seconds(fit.seconds(size))} here"
        )
        if link:
            told += f"; a ring on these links needs at least {show_seconds(ring_bound_s(largest.ranks, size, link))}"
        if fit.latency_s and fit.s_per_byte:
            half = show_bytes(fit.latency_s / fit.s_per_byte)
            told += f". Below {half} most of its time is latency, so few large messages beat many small ones"
        return told + "."


def _fit_cells(axis: str, op: str, fit: Fit) -> tuple[str, ...]:
    speed = "-" if fit.bytes_per_s is None else f"{fit.bytes_per_s / 1e9:.3g} GB/s"
    return (op, axis, _show(fit.latency_s), speed, f"{fit.max_deviation:.0%}")


def _show(seconds: float) -> str:
    return show_seconds(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _giga(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else bytes_per_s / 1e9


def _draw(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())
