"""Of a benchmark of collectives: bandwidth against size, and the line through the times."""

from collections.abc import Sequence

from shoal.units import show_bytes
from shoal.verbs.report.charts import Line, Ruled, lines, show_size
from shoal.verbs.report.parts import Figure, Part, Points, Section, Table, Words, is_finite, shown
from shoal.verbs.report.sources import Collectives, Facts

_LEGEND = (
    "size: of the whole buffer. algbw, algorithm bandwidth: size / time. busbw, bus bandwidth: what each link carries "
    "by the best known algorithm, the same for any number of ranks. ring bound: the least time of a ring all-reduce "
    "on these links."
)


def collectives(source: Collectives) -> Section:
    """Per axis a plot of all operations; then the fits, and what they mean."""
    told = source.told
    parts: list[Part] = [Words(text=told["sentence"])] if told.get("sentence") else []
    for axis in dict.fromkeys(row["axis"] for row in told["rows"]):
        parts += _of_axis(axis, [row for row in told["rows"] if row["axis"] == axis])
    if told["fits"]:
        parts.append(_fits(told["fits"]))
    if told.get("notes"):
        parts.append(Points(lines=[str(note) for note in told["notes"]]))
    return Section(title="Collectives", parts=parts)


def _of_axis(axis: str, rows: Sequence[Facts]) -> list[Part]:
    operations = list(dict.fromkeys(row["op"] for row in rows))
    given = [
        Line(name=op, points=[(row["bytes"], row["busbw_gb_per_s"]) for row in rows if row["op"] == op])
        for op in operations
    ]
    sizes = sorted({row["bytes"] for row in rows})
    ticks = sizes[:: -(-len(sizes) // 5)]
    x = Ruled(label="size of the buffer", is_log=True, ticks=ticks, show=show_size)
    drawing = lines(given, x=x, y=Ruled(label="bus bandwidth, GB/s", is_log=True))
    numbers = _table(axis, rows, folded=drawing is not None)
    if drawing is None:
        return [numbers]
    fast = max((row for row in rows if is_finite(row["busbw_gb_per_s"])), key=lambda row: row["busbw_gb_per_s"])
    finding = (
        f"Over {axis}, {rows[0]['ranks']} ranks: {fast['op']} of {show_bytes(fast['bytes'])} is the fastest, "
        f"{fast['busbw_gb_per_s']:.3g} GB/s."
    )
    return [Figure(title=f"Bus bandwidth over {axis}", drawing=drawing, finding=finding, table=numbers)]


def _table(axis: str, rows: Sequence[Facts], *, folded: bool) -> Table:
    heads = ["operation", "size", "time (median), ms", "least, ms", "most, ms", "algbw, GB/s", "busbw, GB/s"]
    heads += ["ring bound, ms", "times the bound"]
    return Table(
        title=f"Times over {axis}", heads=heads, rows=[_cells(row) for row in rows], folded=folded, legend=_LEGEND
    )


def _cells(row: Facts) -> list[str]:
    bound = row.get("ring_bound_s")
    return [
        row["op"],
        show_bytes(row["bytes"]),
        *(shown(row["seconds"][name] * 1e3) for name in ("median", "min", "max")),
        *(shown(row[name]) for name in ("algbw_gb_per_s", "busbw_gb_per_s")),
        "" if bound is None else shown(bound * 1e3),
        "" if bound is None else shown(row.get("times_ring_bound"), ".1f"),
    ]


def _fits(fits: Sequence[Facts]) -> Table:
    return Table(
        title="time = latency + size / bandwidth",
        legend="The straight line that is nearest to the measured times; off by at most: where it is worst.",
        heads=["operation", "over", "latency, us", "bandwidth, GB/s", "off by at most"],
        rows=[
            [
                fit["op"],
                fit["axis"],
                shown(fit["latency_us"]),
                shown(fit["gb_per_s"]),
                shown(fit["max_deviation"], ".0%"),
            ]
            for fit in fits
        ],
    )
