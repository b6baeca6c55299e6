"""What a plan found, as data and as a table."""

import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.units import show_bytes, show_count

CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "inputs", "activations")


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Of one rank.

    Attributes:
        coordinates: by axis of more than one rank.
        stages: of the pipeline, that it holds.
        shapes: of its largest parameters, by name.
        peak_bytes: by category, when most memory is held; `activations` are all that is no other.
        alive: micro-batches between their forward and their backward, at most.
        flops: that run in one optimizer step; `model_flops` without those of recomputation.
        sent_bytes: in one optimizer step, by axis.
    """

    rank: int
    coordinates: Mapping[str, int]
    stages: list[int]
    shapes: Mapping[str, tuple[int, ...]]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: Mapping[str, int]
    alive: int
    flops: int
    model_flops: int
    sent_bytes: Mapping[str, int]

    @property
    def peak_total_bytes(self) -> int:
        """All categories."""
        return sum(self.peak_bytes.values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Of a layout.

    Attributes:
        bubble: the idle share of the ranks of a pipeline, 0 to 1, where stages take as long as their FLOPs say.
    """

    job: str
    preset: str | None
    layout: str
    num_ranks: int
    num_params: int
    ledger: str
    bubble: float | None
    ranks: list[RankFigures]
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = dataclasses.asdict(self)
        for row, figures in zip(told["ranks"], self.ranks, strict=True):
            row["peak_total_bytes"] = figures.peak_total_bytes
        return {"exit_code": 0, **told, "ledger": self.ledger.splitlines()}

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        console = Console(file=out, width=120, color_system=None)
        console.print(self._table())
        preset = f" ({self.preset})" if self.preset else ""
        head = f"plan    {self.job}{preset} in {self.layout}: {show_count(self.num_params)} parameters, "
        lines = [f"{head}{self.num_ranks} rank{'s' * (self.num_ranks > 1)}, each by itself on shapes alone"]
        lines += self.ledger.splitlines()
        if self.bubble is not None:
            lines.append(f"bubble  {self.bubble:.1%} of the step, where a backward takes twice as long as its forward")
        return "\n".join([*lines, "", out.getvalue().rstrip(), *self._shapes(), *self.notes])

    def _table(self) -> Any:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        for rank in self.ranks:
            table.add_column(f"rank {rank.rank}", justify="right")
        for name, cells in self._rows():
            table.add_row(name, *cells)
        return table

    def _rows(self) -> list[tuple[str, list[str]]]:
        ranks = self.ranks
        rows = [("at", [" ".join(f"{a}{c}" for a, c in rank.coordinates.items()) or "-" for rank in ranks])]
        if any(rank.stages for rank in ranks):
            rows.append(("stages", [" ".join(map(str, rank.stages)) for rank in ranks]))
        rows += [
            ("parameters", [show_bytes(rank.parameter_bytes) for rank in ranks]),
            ("gradients", [show_bytes(rank.gradient_bytes) for rank in ranks]),
            ("optimizer state", [show_bytes(rank.optimizer_bytes) for rank in ranks]),
            ("micro-batches alive", [str(rank.alive) for rank in ranks]),
            ("peak memory", [show_bytes(rank.peak_total_bytes) for rank in ranks]),
        ]
        rows += [
            (f"  {name}", [show_bytes(rank.peak_bytes[name]) for rank in ranks])
            for name in CATEGORIES
            if any(rank.peak_bytes[name] for rank in ranks)
        ]
        rows.append(("FLOPs per step", [show_count(rank.flops) for rank in ranks]))
        if any(rank.flops != rank.model_flops for rank in ranks):
            rows.append(("  without recomputation", [show_count(rank.model_flops) for rank in ranks]))
        axes = dict.fromkeys(axis for rank in ranks for axis in rank.sent_bytes)
        return rows + [
            (f"sent on {axis} per step", [show_bytes(rank.sent_bytes.get(axis, 0)) for rank in ranks]) for axis in axes
        ]

    def _shapes(self) -> list[str]:
        lines = ["", "largest parameters, as they lie on the rank"]
        for rank in self.ranks:
            told = ", ".join(f"{name} {'x'.join(map(str, shape)) or '1'}" for name, shape in rank.shapes.items())
            lines.append(f"  rank {rank.rank}: {told}")
        return lines
