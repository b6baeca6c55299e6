"""Of a benchmark: where the step goes, what lies in memory, what is on the wire."""

from collections.abc import Mapping, Sequence

from shoal.units import show_bytes
from shoal.verbs.report import colours
from shoal.verbs.report.charts import show_percent, show_size, stacked
from shoal.verbs.report.parts import Figure, Part, Section, Table, Words, is_finite, rows_of
from shoal.verbs.report.sources import Bench

_MAX_BARS = 24
_MEMORY = (
    "parameters: the weights that the rank keeps. gathered: weights of other ranks, for the moment. gradients and "
    "optimizer: one, and with Adam two numbers for each weight. inputs: the batch. activations: what the forward "
    "keeps for the backward."
)
_MEANINGS = {
    "data": "data: waiting for the next batch.",
    "compute": "compute: forward and backward.",
    "comm": "comm, by axis: standing still for messages, as far as they are not hidden behind computing.",
    "bubble": "bubble: without work by the pipeline's schedule.",
    "waiting": "waiting: for the rank that comes last.",
    "update": "update: norm, clipping, optimizer.",
    "other": "other: logging, and what is between.",
}
_LAST = ("bubble", "waiting", "update", "data", "other")  # of a step; compute and messages come before


def spent(bench: Bench) -> Section:
    """Shares of the wall time of a step, which add up to 1."""
    bars: dict[str, Mapping[str, float]] = {row["layout"]: row["shares"] for row in bench.table if row["shares"]}
    names = sorted(dict.fromkeys(name for of in bars.values() for name in of), key=_place)
    bars = {layout: {name: of[name] for name in names if name in of} for layout, of in bars.items()}
    drawing = stacked(bars, colours.of_share, show=show_percent, label="share of a step's wall time", whole=1.0)
    if drawing is None:
        return Section(title="Where the step goes")
    numbers = Table(
        title="The same in numbers: means over ranks",
        heads=["layout", *names],
        rows=[[layout, *rows_of(of, names, ".1%")] for layout, of in bars.items()],
        legend=" ".join(text for name, text in _MEANINGS.items() if any(found.startswith(name) for found in names)),
    )
    figure = Figure(title="Shares of a step's wall time", drawing=drawing, finding=_worst(bars))
    return Section(title="Where the step goes", parts=[figure, numbers])


def memory(bench: Bench) -> Section:
    """Of each rank at the moment when its sum was largest; ranks that hold the same share a bar."""
    bars: dict[str, Mapping[str, int]] = {}
    for row in bench.good:
        for ranks, of in _alike([rank["peak_bytes"] for rank in row["ranks"]]):
            bars[_named(row["layout"], ranks, len(row["ranks"]))] = of
    shown = dict(list(bars.items())[:_MAX_BARS])
    drawing = stacked(shown, colours.of_memory, show=show_size, label="bytes of tensors at the peak of a rank")
    if drawing is None:
        return Section(title="Memory per rank")
    most = max(bars, key=lambda name: sum(bars[name].values()))
    worst = max(bars[most], key=lambda name: bars[most][name])
    total = sum(bars[most].values())
    finding = f"{most} holds most: {show_bytes(total)}, of which {bars[most][worst] / total:.0%} are {worst}."
    names = [name for name in dict.fromkeys(part for of in bars.values() for part in of) if _holds(bars, name)]
    cells = [
        [name, *(show_bytes(of[part]) if part in of else "" for part in names), show_bytes(sum(of.values()))]
        for name, of in shown.items()
    ]
    numbers = Table(title="The same in numbers", heads=["layout, rank", *names, "sum"], rows=cells, legend=_MEMORY)
    parts: list[Part] = [Figure(title="Tensors at the peak of a rank", drawing=drawing, finding=finding), numbers]
    if len(bars) > len(shown):
        parts.append(Words(text=f"The first {len(shown)} of {len(bars)} different ranks are shown."))
    return Section(title="Memory per rank", parts=parts)


def wire(bench: Bench) -> Section:
    """Per step and axis, of the rank that sends most."""
    bars: dict[str, Mapping[str, int]] = {row["layout"]: row["sent_bytes"] for row in bench.table if row["sent_bytes"]}
    drawing = stacked(bars, colours.of_axis, show=show_size, label="bytes sent per step, by axis")
    if drawing is None:
        return Section(title="Bytes on the wire")
    most = max(bars, key=lambda name: sum(bars[name].values()))
    axis = max(bars[most], key=lambda name: bars[most][name])
    total = show_bytes(sum(bars[most].values()))
    part = f", {show_bytes(bars[most][axis])} of it on {axis}" if len(bars[most]) > 1 else f", on {axis}"
    finding = f"Most is sent by a rank of {most}: {total} in each step{part}."
    formulas = {row["layout"]: row.get("formula_bytes") or {} for row in bench.table}
    columns = [
        (f"{axis}{kind}", axis, of)
        for axis in dict.fromkeys(axis for of in bars.values() for axis in of)
        for kind, of in (("", bars), (", by formula", formulas))
        if any(sent.get(axis) for sent in of.values())
    ]
    numbers = Table(
        title="The same in numbers",
        heads=["layout", *(head for head, _, _ in columns)],
        rows=[[name, *(_size(of[name].get(axis)) for _, axis, of in columns)] for name in bars],
        legend="A column is an axis of the mesh (dp replicas, fsdp shards, tp slices, pp stages). by formula: what a "
        "textbook counts for the messages of that axis, without sums of a few numbers.",
    )
    figure = Figure(title="Sent per step by the rank that sends most", drawing=drawing, finding=finding)
    return Section(title="Bytes on the wire", parts=[figure, numbers])


def _size(num_bytes: int | None) -> str:
    return show_bytes(num_bytes) if num_bytes else ""


def _holds(bars: Mapping[str, Mapping[str, int]], name: str) -> bool:
    return any(of.get(name) for of in bars.values())


def _place(name: str) -> tuple[int, str]:
    return (-1, "") if name == "compute" else (_LAST.index(name) if name in _LAST else -1, name)


def _worst(bars: Mapping[str, Mapping[str, float]]) -> str:
    lost = [
        (share, name, layout)
        for layout, of in bars.items()
        for name, share in of.items()
        if name != "compute" and is_finite(share)
    ]
    share, name, layout = max(lost, default=(0.0, "", ""))
    return f"The largest part that is not computing: {name} in {layout}, {share:.0%} of the step." if name else ""


def _alike(ranks: Sequence[Mapping[str, int]]) -> list[tuple[list[int], Mapping[str, int]]]:
    """Ranks that hold the same, and what."""
    found: list[tuple[list[int], Mapping[str, int]]] = []
    for rank, of in enumerate(ranks):
        same = next((numbers for numbers, other in found if other == of), None)
        if same is None:
            found.append(([rank], of))
        else:
            same.append(rank)
    return found


def _named(layout: str, ranks: Sequence[int], num_ranks: int) -> str:
    if num_ranks == 1:
        return layout
    if len(ranks) == num_ranks:
        return f"{layout}, each of {num_ranks} ranks"
    some = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    return f"{layout}, rank{'' if len(ranks) == 1 else 's'} {some}"
