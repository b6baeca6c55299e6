"""What layouts were measured to do, side by side: as data, as a table, as sentences."""

import csv
import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shoal.metrics.definitions import efficiency, hfu, mfu, per_device, speed_up, throughput, weak_efficiency
from shoal.metrics.shares import shares
from shoal.units import show_bytes, show_count, show_share
from shoal.verbs.bench.diagnose import diagnose
from shoal.verbs.bench.measured import Measured

# Of a loss, relative, in the first steps; later on rounding grows, in one process as in many.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
FIRST_STEPS = 5
_WIDTH = 110  # of a line of text
_NOISY = 1.3  # the slowest round of a layout over its quickest


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one layout; ratios are medians over rounds, each against the base in the same round.

    Attributes:
        rate: tokens or samples per second, of all devices.
        speed_up, efficiency: S and E against the base; None where that was refused, S also in weak scaling.
        utilisation: CPU time of the processes / (wall time x threads), a share of 1; None on other devices.
        shares: of the step's wall time, by where it goes; they add up to 1.
        sent_bytes: by axis, per step, of the rank that sends most; `formula_bytes` by the textbook.
        peak_bytes: of tensors, of the rank that holds most; `peak_gib` of its process or device.
        loss_differs: the largest relative difference from the base in the first steps; None where batches differ.
    """

    layout: str
    num_devices: int
    step_ms: float
    step_ms_min: float
    step_ms_max: float
    rate: float
    rate_per_device: float
    speed_up: float | None
    efficiency: float | None
    mfu: float | None
    hfu: float | None
    utilisation: float | None
    shares: Mapping[str, float]
    sent_bytes: Mapping[str, int]
    formula_bytes: Mapping[str, int]
    peak_bytes: int
    peak_gib: float
    loss_differs: float | None
    is_same: bool
    bubble: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Of a comparison; the first layout that is `lone`, or else the first one, is the base.

    Attributes:
        stopped: the exit code where somebody ended it early; the rows hold the rounds that are complete.
        logs: by name, of the ranks that failed.
    """

    job: str
    mode: str
    rows: list[Measured]
    cores: int
    seconds: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    stopped: int = 0
    logs: Mapping[str, str] = field(default_factory=dict)

    @property
    def good(self) -> list[Measured]:
        """Those that ran."""
        return [row for row in self.rows if not row.error]

    @property
    def base(self) -> Measured | None:
        """What the others are held against."""
        return next((row for row in self.good if row.layout == "lone"), self.good[0] if self.good else None)

    @property
    def exit_code(self) -> int:
        """0 where all layouts ran, and trained the same; of what was ended early, that of the signal."""
        if self.stopped:
            return self.stopped
        return 0 if self.good == self.rows and all(row.is_same for row in self.table()) else 1

    @property
    def unit(self) -> str:
        """Of what the throughput counts."""
        return "tokens" if any(row.tokens_per_sample for row in self.good) else "samples"

    @property
    def draws(self) -> bool:
        """Whether the forward draws random numbers: other ones in each layout, so that losses cannot be compared."""
        return any(row.draws for row in self.good)

    def table(self) -> list[Row]:
        """Of the layouts that ran."""
        return [self._row(row) for row in self.good]

    def sentences(self) -> list[str]:
        """What each layout's time is spent on, with the evidence."""
        told = [diagnose(row, self.base) for row in self.good]
        if self.draws:
            told.append(
                "The forward draws random numbers (dropout), other ones in each layout, so losses are not compared; "
                "shoal verify compares without them."
            )
        spread = max((max(row.times_s) / min(row.times_s) for row in self.good), default=1.0)
        if spread > _NOISY:
            told.append(
                f"Rounds differ by up to {spread:.1f} times: the machine was busy. S and E are taken within each "
                "round; more --rounds make them surer."
            )
        return told

    def _row(self, row: Measured) -> Row:
        base = self.base
        assert base is not None, "a row that ran is the base, or has one"
        rates, base_rates = ([self._rate(of, s) for s in of.times_s] for of in (row, base))
        ups = [speed_up(one, many) for one, many in zip(base.times_s, row.times_s, strict=False)]
        scale = row.num_devices / base.num_devices
        weak = [weak_efficiency(one, many, 1) / scale for one, many in zip(base_rates, rates, strict=False)]
        same_batch = self.mode == "strong"
        differs = _loss_difference(row, base) if same_batch and not self.draws else None
        heaviest = max(row.ranks, key=lambda rank: sum(rank.peak_bytes.values()))
        axes = dict.fromkeys(axis for rank in row.ranks for axis in rank.sent_bytes)
        used = (row.step_s, row.num_devices, row.peak_flops)
        return Row(
            layout=row.layout,
            num_devices=row.num_devices,
            step_ms=row.step_s * 1e3,
            step_ms_min=min(row.times_s) * 1e3,
            step_ms_max=max(row.times_s) * 1e3,
            rate=self._rate(row, row.step_s),
            rate_per_device=per_device(self._rate(row, row.step_s), row.num_devices),
            speed_up=median(ups) if same_batch else None,
            efficiency=median(
                [efficiency(up, row.num_devices, base.num_devices) for up in ups] if same_batch else weak
            ),
            mfu=mfu(row.model_flops, *used),
            hfu=hfu(row.hardware_flops, *used),
            utilisation=_utilisation(row),
            shares=shares([rank.spent for rank in row.ranks]),
            sent_bytes={axis: max(rank.sent_bytes.get(axis, 0) for rank in row.ranks) for axis in axes},
            formula_bytes={axis: max(rank.formula_bytes.get(axis, 0) for rank in row.ranks) for axis in axes},
            peak_bytes=sum(heaviest.peak_bytes.values()),
            peak_gib=max(rank.peak_gib for rank in row.ranks),
            loss_differs=differs,
            is_same=differs is None or differs <= TOLERANCE[row.precision],
            bubble=row.bubble,
        )

    def _rate(self, row: Measured, step_s: float) -> float:
        return throughput(row.batch_size * (row.tokens_per_sample or 1), step_s)

    # -- as data -------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what was measured, and the figures made of it."""
        return {
            "kind": "bench",
            "exit_code": self.exit_code,
            "stopped": self.stopped,
            "job": self.job,
            "fields": dict(self.fields),
            "mode": self.mode,
            "unit": self.unit,
            "cores": self.cores,
            "seconds": self.seconds,
            "table": [dict(vars_of(row)) for row in self.table()],
            "diagnosis": self.sentences(),
            "conventions": self.conventions(),
            "measured": [row.as_dict() for row in self.rows],
        }

    def as_csv(self) -> str:
        """The table, one column per figure; shares and bytes by their names."""
        flat = []
        for row in self.table():
            told = dict(vars_of(row))
            told |= {f"share {name}": share for name, share in told.pop("shares").items()}
            told |= {f"{kind} {a}": n for kind in ("sent_bytes", "formula_bytes") for a, n in told.pop(kind).items()}
            flat.append(told)
        out = io.StringIO()
        writer = csv.DictWriter(out, list(dict.fromkeys(name for row in flat for name in row)), restval="")
        writer.writeheader()
        writer.writerows(flat)
        return out.getvalue()

    def conventions(self) -> list[str]:
        """How each figure is meant."""
        base = self.base
        if base is None:
            return []
        flops = f"{show_count(base.model_flops)}FLOP per step of {base.batch_size} samples"
        return [
            f"step: wall time of an optimizer step, median of {len(base.times_s)} rounds (least to most)",
            f"{self.unit}/s: of all devices together",
            "S = T(base) / T, E = S / devices, round by round against the base"
            if self.mode == "strong"
            else "E = throughput / (devices x throughput of one): as many samples per data rank in all layouts",
            f"MFU: {flops} (forward and backward, attention in full, nothing recomputed) / (step x devices x peak); "
            f"peak: {base.peak_source or 'unknown, so n/a'}",
            f"a device is {base.threads} CPU thread{'s' * (base.threads > 1)} here; memory is that of tensors, of the "
            "rank that holds most; sent: per step, of the rank that sends most",
        ]

    # -- for people ----------------------------------------------------------------------------------------

    def __str__(self) -> str:
        rows = self.table()
        lines = [f"bench   {self.job}, {self.mode} scaling, {self.cores} cores"]
        if rows:
            lines += [_shown(self._main(rows)), _shown(_where(rows)), *map(_wrapped, self.sentences()), ""]
        lines += [_wrapped(row.outcome) for row in self.rows if row.error]
        lines += [_wrapped(f"Ended early (exit code {self.stopped}): {self._rounds()}")] if self.stopped else []
        return "\n".join([*lines, *map(_wrapped, self.conventions())])

    def _rounds(self) -> str:
        whole = len(self.good[0].times_s) if self.good else 0
        return f"the figures are of {whole} round{'s' * (whole > 1)}." if whole else "no round was complete."

    def _main(self, rows: Sequence[Row]) -> list[list[str]]:
        recomputes = any(row.hfu != row.mfu for row in rows)
        columns: dict[str, Callable[[Row], str]] = {
            "layout": lambda row: row.layout,
            "devices": lambda row: str(row.num_devices),
            "step, ms": lambda row: f"{row.step_ms:.1f} ({row.step_ms_min:.1f} to {row.step_ms_max:.1f})",
            f"{self.unit}/s": lambda row: f"{row.rate:,.0f}",
            "S": lambda row: "" if row.speed_up is None else f"{row.speed_up:.2f}",
            "E": lambda row: "" if row.efficiency is None else f"{row.efficiency:.2f}",
            "MFU": lambda row: _percent(row.mfu),
            **({"HFU": lambda row: _percent(row.hfu)} if recomputes else {}),
            "device busy": lambda row: _percent(row.utilisation),
            "memory": lambda row: show_bytes(row.peak_bytes),
            "loss": lambda row: _loss(
                row, is_base=row.layout == self.base.layout if self.base else False, draws=self.draws
            ),
        }
        return [list(columns), *([show(row) for show in columns.values()] for row in rows)]


def vars_of(row: Row) -> Mapping[str, Any]:
    """Its figures by name."""
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


def _utilisation(row: Measured) -> float | None:
    if not row.versions.get("device", "cpu").startswith("cpu"):
        return None
    threads = row.threads * row.num_devices / len(row.ranks)
    return sum(rank.cpu_s / (rank.spent.wall_s * threads) for rank in row.ranks) / len(row.ranks)


def _where(rows: Sequence[Row]) -> list[list[str]]:
    names = dict.fromkeys(name for row in rows for name in row.shares)
    ordered = sorted(names, key=lambda name: [name == last for last in ("other", "update", "waiting", "bubble")])
    axes = dict.fromkeys(axis for row in rows for axis in row.sent_bytes)
    shares_of = [[name, *(_share(row.shares.get(name)) for row in rows)] for name in ordered]
    sent = [
        [f"{name}{axis}", *(_size(of(row).get(axis)) for row in rows)]
        for axis in axes
        for name, of in (("sent on ", _sent), ("  by formula, ", _formula))
        if any(axis in of(row) for row in rows)
    ]
    return [["where a step goes", *(row.layout for row in rows)], *shares_of, *sent]


def _sent(row: Row) -> Mapping[str, int]:
    return row.sent_bytes


def _formula(row: Row) -> Mapping[str, int]:
    return {axis: size for axis, size in row.formula_bytes.items() if size}


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else show_bytes(num_bytes)


def _share(value: float | None) -> str:
    return "" if value is None else show_share(value)


def _shown(table: Sequence[Sequence[str]]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(table[0]):
        shown.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in table[1:]:
        shown.add_row(*row)
    Console(file=out, width=160, color_system=None).print(shown)
    return out.getvalue().rstrip("\n")


def _wrapped(text: str) -> str:
    """Lines that a terminal shows whole."""
    return textwrap.fill(text, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _percent(share: float | None) -> str:
    return "n/a" if share is None else show_share(share)


def _loss(row: Row, *, is_base: bool, draws: bool) -> str:
    if row.loss_differs is None:
        return "draws differ" if draws else "of its own batch"
    if is_base:
        return "base"
    return f"same to {row.loss_differs:.0e}" if row.is_same else f"DIFFERS by {row.loss_differs:.0e}"


def _loss_difference(row: Measured, base: Measured) -> float:
    pairs = list(zip(row.losses, base.losses, strict=False))[:FIRST_STEPS]
    apart = [0.0 if ours == theirs else abs(ours - theirs) / max(abs(theirs), 1e-12) for ours, theirs in pairs]
    both = [math.isnan(ours) and math.isnan(theirs) for ours, theirs in pairs]
    return max(0.0 if none else difference for difference, none in zip(apart, both, strict=True))
