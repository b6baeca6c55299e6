"""Of a benchmark: the table of its figures, what they mean, the losses, and how they scale."""

import math
from collections.abc import Sequence
from typing import Any

from shoal.errors import LayoutError
from shoal.layout import AXES, Layout
from shoal.units import show_bytes
from shoal.verbs.report.charts import Line, Ruled, lines, show_number, show_percent
from shoal.verbs.report.colours import of_axis, of_layout
from shoal.verbs.report.curves import losses
from shoal.verbs.report.parts import Drawing, Figure, Part, Points, Section, Table, Words, is_finite, shown
from shoal.verbs.report.sources import Bench, Facts

_LEGEND = (
    "layout: how the job is spread (dp replicas, fsdp shards, tp slices of layers, pp stages, threads in one process; "
    "the number is how many; lone is one process). devices: processes, or threads of one. step: wall time of an "
    "optimizer step, the median of the rounds, the least and the most. S, speed-up: step of the base / step, round by "
    "round; E, efficiency: S / devices, 1 is perfect. loss against base: largest relative difference in the first "
    "steps; rounding is about 1e-7. MFU: FLOPs that the model needs / what the devices could do in that time; HFU "
    "counts what is computed twice too. device busy: share of the time that processors work. tensors at peak: bytes "
    "of the rank that holds most; process or device: all that it holds. bubble predicted: share of the time in which "
    "the pipeline's schedule leaves ranks without work."
)


def results(bench: Bench) -> Section:
    """All figures of the table, the refused layouts, and the sentences, the gravest first."""
    parts: list[Part] = [Words(text=told, loud=True) for told in _differing(bench)]
    if bench.table:
        parts += [Words(text=_best(bench)), _table(bench)]
    else:
        parts.append(Words(text="No layout ran.", loud=True))
    parts += [Words(text=_ended(row), loud=True) for row in bench.refused]
    sentences = _by_weight(bench)
    parts += [Points(lines=sentences)] if sentences else []
    return Section(title="Results", parts=parts)


def _ended(row: Facts) -> str:
    if row.get("log"):
        return f"{row['layout']} failed: {row['error']} (its log: logs/{row['log']})"
    return f"{row['layout']} is refused: {row['error']}"


def loss_section(bench: Bench) -> Section:
    """The curves of all layouts; in weak scaling each has batches of its own."""
    losses_of = {row["layout"]: [math.nan if v is None else v for v in row["losses"]] for row in bench.good}
    curves = {layout: list(enumerate(values, start=1)) for layout, values in losses_of.items()}
    if not curves or bench.base is None:
        return Section(title="Loss")
    weak = (
        ""
        if bench.told["mode"] == "strong"
        else ("In weak scaling each layout has batches of its own size, so its losses are its own.")
    )
    colours = {layout: of_layout(layout) for layout in curves}
    return Section(title="Loss", parts=losses(curves, bench.base["layout"], why_apart=weak, colours=colours))


def scaling(bench: Bench) -> Section:
    """Speed-up and efficiency against devices, a line for each family of layouts from the base on."""
    base = next((row for row in bench.table if bench.base and row["layout"] == bench.base["layout"]), None)
    counts = sorted({row["num_devices"] for row in bench.table})
    if base is None or len(counts) < 2:
        return Section(title="Scaling")
    families = _families(bench.table, base)
    found: list[Part] = []
    for title, key, most, form in (("Speed-up", "speed_up", None, ".2f"), ("Efficiency", "efficiency", 1.0, ".1%")):
        drawing = _against_devices(families, key, counts, base["num_devices"], most)
        if drawing is not None:
            numbers = Table(
                title=title,
                heads=["layout", "devices", title.lower(), "ideal"],
                rows=[
                    [
                        row["layout"],
                        str(row["num_devices"]),
                        shown(row[key], form),
                        format(row["num_devices"] / base["num_devices"] if most is None else most, form),
                    ]
                    for row in bench.table
                ],
                folded=True,
            )
            found.append(Figure(title=title, drawing=drawing, finding=_highest(bench.table, key, base), table=numbers))
    return Section(title="Scaling", parts=found)


def _against_devices(
    families: dict[str, list[Facts]], key: str, counts: Sequence[int], least: int, most: float | None
) -> Drawing | None:
    """Both axes of a wide range of devices are logarithmic, so that the ideal is a straight line in each case."""
    wide = counts[-1] > 16
    given = [
        Line(name=name, points=[(row["num_devices"], row[key]) for row in rows], colour=of_axis(name))
        for name, rows in families.items()
    ]
    if not any(len(line.finite) > 1 for line in given):
        return None
    reach = [(count, count / least if most is None else most) for count in counts]
    x = Ruled(label="devices", is_log=wide, ticks=counts, show="{:g}".format)
    y = (
        Ruled(label="speed-up S(N)", is_log=wide, from_zero=True)
        if most is None
        else Ruled(label="efficiency E(N)", show=show_percent, from_zero=True)
    )
    return lines([*given, Line(name="ideal", points=reach, ideal=True)], x=x, y=y)


def _families(table: Sequence[Facts], base: Facts) -> dict[str, list[Facts]]:
    """Layouts over the same axes, by devices, each family beginning at the base."""
    families: dict[str, list[Facts]] = {}
    for row in table:
        if row["num_devices"] != base["num_devices"]:
            families.setdefault(_family(row["layout"]), []).append(row)
    return {name: [base, *sorted(rows, key=lambda row: row["num_devices"])] for name, rows in families.items()}


def _family(text: str) -> str:
    try:
        layout = Layout.parse(text)
    except LayoutError:  # of a later version
        return text
    return ".".join(axis for axis in AXES if getattr(layout, axis) > 1) or "lone"


def _highest(table: Sequence[Facts], key: str, base: Facts) -> str:
    rows = [row for row in table if is_finite(row[key]) and row is not base]
    if not rows:
        return "No figure is known."
    best = max(rows, key=lambda row: row[key])
    worst = min(rows, key=lambda row: row[key])
    what, form = ("S", ".2f") if key == "speed_up" else ("E", ".0%")
    told = f"The highest {what} is {best[key]:{form}} ({best['layout']} on {best['num_devices']} devices)"
    return told + (f", the lowest {worst[key]:{form}} ({worst['layout']})." if worst is not best else ".")


def _best(bench: Bench) -> str:
    unit, base = bench.told["unit"], bench.base
    best = max(bench.table, key=lambda row: row["rate"])
    told = f"{best['layout']} is the fastest: {best['rate']:,.0f} {unit}/s on {_devices(best)}"
    if base is None or best["layout"] == base["layout"]:
        return f"{told}." + (" No other layout is faster than the base." if len(bench.table) > 1 else "")
    ups = f"{best['speed_up']:.2f} times as fast as {base['layout']}, " if is_finite(best["speed_up"]) else ""
    return f"{told}, {ups}an efficiency of {shown(best['efficiency'], '.0%')}."


def _devices(row: Facts) -> str:
    return f"{row['num_devices']} device{'' if row['num_devices'] == 1 else 's'}"


def _differing(bench: Bench) -> list[str]:
    return [
        f"{row['layout']} DIFFERS: its loss is off by {shown(row['loss_differs'], '.1e')} in the first steps. "
        f"Find where: shoal verify {bench.told['job']} --layout {row['layout']}"
        for row in bench.table
        if not row["is_same"]
    ]


def _by_weight(bench: Bench) -> list[str]:
    """The sentence of the layout that computes the least part of its step comes first."""
    sentences = list(bench.told["diagnosis"])
    if len(sentences) != len(bench.table):
        return sentences
    computes = [row["shares"].get("compute", 0.0) for row in bench.table]
    order = sorted(range(len(sentences)), key=lambda at: computes[at] if is_finite(computes[at]) else 0.0)
    return [sentences[at] for at in order]


def _table(bench: Bench) -> Table:
    unit = bench.told["unit"]
    heads = ["layout", "devices", "step (median), ms", "least, ms", "most, ms", f"{unit}/s", f"{unit}/s per device"]
    heads += ["S", "E", "loss against base", "MFU", "HFU", "device busy", "tensors at peak", "process or device, GiB"]
    heads += ["bubble predicted"]
    return Table(
        title=f"Of each layout, {bench.told['mode']} scaling",
        heads=heads,
        rows=[_cells(row) for row in bench.table],
        legend=_LEGEND,
    )


def _cells(row: Facts) -> list[str]:
    return [
        row["layout"],
        str(row["num_devices"]),
        *(shown(row[key], ".1f") for key in ("step_ms", "step_ms_min", "step_ms_max")),
        *(shown(row[key], ",.0f") for key in ("rate", "rate_per_device")),
        *(shown(row[key], ".2f") for key in ("speed_up", "efficiency")),
        _loss(row),
        *(shown(row.get(key), ".1%") for key in ("mfu", "hfu", "utilisation")),
        show_bytes(row["peak_bytes"]),
        shown(row["peak_gib"], ".2f"),
        "" if row["bubble"] is None else shown(row["bubble"], ".1%"),
    ]


def _loss(row: Facts) -> str:
    differs: Any = row["loss_differs"]
    if differs is None:
        return "of its own batch"
    if differs == 0:
        return "the same"
    return f"same to {_small(differs)}" if row["is_same"] else f"DIFFERS by {_small(differs)}"


def _small(share: object) -> str:
    return show_number(float(f"{share:.1e}")) if is_finite(share) else shown(share)
