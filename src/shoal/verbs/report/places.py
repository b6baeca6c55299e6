"""The mesh as a picture: each rank with its coordinates, one colour per axis."""

import itertools
from collections.abc import Iterator, Sequence
from html import escape

from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.mesh import Mesh
from shoal.verbs.report.colours import of_axis
from shoal.verbs.report.parts import Drawing, Figure, Part, Section, Table, Words
from shoal.verbs.report.sources import Bench, Run, Source

_MAX_RANKS = 64
_MAX_COLUMNS = 8
_CELL, _GAP, _LINE, _BAR = 84.0, 10.0, 16.0, 30.0
_TITLE = 28.0
_LEAST = 200.0  # of a drawing: its title needs it


def mesh_section(sources: Sequence[Source]) -> Section:
    """Each layout of several ranks once, whatever its options; a benchmark starts all its ranks on one host."""
    texts = {row["layout"]: True for bench in sources if isinstance(bench, Bench) for row in bench.good}
    texts |= {run.layout: False for run in sources if isinstance(run, Run) if run.layout not in texts}
    meshes = {text.partition(":")[0]: (layout, here) for text, here in texts.items() if (layout := _parse(text))}
    parts = [part for layout, here in meshes.values() for part in _of_layout(layout, here)]
    note = "Axes go from the outermost to the innermost; ranks that differ on one axis alone form a group on it."
    return Section(title="Mesh", parts=[Words(text=note), *parts] if parts else [])


def draw_mesh(layout: Layout, *, on_one_host: bool = False) -> Drawing:
    """Rows of ranks, the innermost axis from left to right; brackets tell where a row stands on the others.

    Args:
        on_one_host: it is known that all ranks live on one machine, which is then drawn around them.
    """
    names, num, shown = _coordinates(layout)
    inner = _sizes(layout)[names[-1]]
    columns = _columns(inner)
    outer = names[:-1] if inner % columns == 0 else []
    rows = [shown[at : at + columns] for at in range(0, len(shown), columns)]
    height = 24 + _LINE * len(names)
    left = _GAP + _BAR * len(outer)
    body = [_text(_GAP, 18, _title(layout, num, on_one_host), anchor="start")]
    for number, axis in enumerate(outer):
        for value, begin, count in _stretches([[row[0][name] for name in outer[: number + 1]] for row in rows]):
            y, tall = _TITLE + begin * (height + _GAP), count * (height + _GAP) - _GAP
            body += _bracket(axis, value, _GAP + _BAR * number, y, tall)
    for number, place in enumerate(shown):
        x, y = left + number % columns * (_CELL + _GAP), _TITLE + number // columns * (height + _GAP)
        if number % columns:
            middle = y + height / 2
            body.append(f'<path d="M{x - _GAP:g} {middle:g}h{_GAP:g}" stroke="{of_axis(names[-1])}" stroke-width="4"/>')
        body += _rank(number, place, x, y, height, is_thread=layout.threads > 1)
    wide = left + min(columns, len(shown)) * (_CELL + _GAP)
    tall = _TITLE + len(rows) * (height + _GAP)
    if on_one_host:
        frame = 'rx="10" fill="none" stroke="currentColor" stroke-opacity="0.4" stroke-dasharray="5 4"'
        body.append(f'<rect x="1" y="1" width="{max(wide, _LEAST) - 2:g}" height="{tall - 2:g}" {frame}/>')
    return Drawing(width=max(wide, _LEAST), height=tall, body="\n".join(body), least=int(wide * 0.75))


def _of_layout(layout: Layout, on_one_host: bool) -> list[Part]:
    names, num, places = _coordinates(layout)
    if not names:
        return []
    text = str(layout).partition(":")[0]
    what = "replicas in threads of one process" if layout.threads > 1 else "ranks"
    sizes = " x ".join(f"{_sizes(layout)[name]} on {name}" for name in names)
    finding = f"{text}: {num} {what}, {sizes}."
    if num > len(places):
        finding += f" The first {_MAX_RANKS} are drawn."
    numbers = Table(
        title=f"Coordinates in {text}",
        heads=["rank", *names],
        rows=[[str(rank), *(str(place[name]) for name in names)] for rank, place in enumerate(places)],
        folded=True,
    )
    return [Figure(title=text, drawing=draw_mesh(layout, on_one_host=on_one_host), finding=finding, table=numbers)]


def _coordinates(layout: Layout) -> tuple[list[str], int, list[dict[str, int]]]:
    """The axes in use, the fastest last; how many ranks, or replicas in threads; where the first of them stand."""
    if layout.threads > 1:
        return ["threads"], layout.threads, [{"threads": at} for at in range(min(layout.threads, _MAX_RANKS))]
    mesh = Mesh.of(layout)
    names = [*(["ep"] if layout.ep > 1 else []), *(axis for axis, size in mesh.axes if size > 1)]
    ranks = range(min(mesh.size, _MAX_RANKS))
    return names, mesh.size, [{axis: mesh.coordinate(rank, axis) for axis in names} for rank in ranks]


def _sizes(layout: Layout) -> dict[str, int]:
    return {**Mesh.of(layout).sizes, "threads": layout.threads}


def _parse(text: str) -> Layout | None:
    try:
        return Layout.parse(text)
    except LayoutError:  # no layout, or one of a later version
        return None


def _columns(size: int) -> int:
    """The most that divide the size, so that rows end where a group ends."""
    fitting = [count for count in range(_MAX_COLUMNS, 1, -1) if size % count == 0]
    return fitting[0] if fitting else min(size, _MAX_COLUMNS)


def _stretches(keys: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Of neighbouring rows with one key: its last value, the first row, how many."""
    begin = 0
    for key, group in itertools.groupby(keys):
        count = len(list(group))
        yield key[-1], begin, count
        begin += count


def _title(layout: Layout, size: int, on_one_host: bool) -> str:
    if layout.threads > 1:
        return f"one process, {size} threads"
    what = f"{size} devices" + (f", the first {_MAX_RANKS}" if size > _MAX_RANKS else "")
    return f"one host, {what}" if on_one_host else what


def _bracket(axis: str, value: int, x: float, y: float, tall: float) -> Iterator[str]:
    yield f'<rect x="{x:g}" y="{y:g}" width="6" height="{tall:g}" rx="3" fill="{of_axis(axis)}"/>'
    middle = y + tall / 2
    turned = f'transform="rotate(-90 {x + 19:g} {middle:g})"'
    yield _text(x + 19, middle, f"{axis} {value}", more=turned)


def _rank(number: int, place: dict[str, int], x: float, y: float, tall: float, *, is_thread: bool) -> Iterator[str]:
    frame = 'fill="none" stroke="currentColor" stroke-opacity="0.6"'
    yield f'<rect x="{x:g}" y="{y:g}" width="{_CELL:g}" height="{tall:g}" rx="6" {frame}/>'
    what = ("master" if number == 0 else f"replica {number}") if is_thread else f"rank {number}"
    yield _text(x + _CELL / 2, y + 17, what, more='font-weight="600"')
    for line, (axis, value) in enumerate(place.items(), start=1):
        at = y + 17 + _LINE * line
        yield f'<rect x="{x + 10:g}" y="{at - 9:g}" width="10" height="10" rx="2" fill="{of_axis(axis)}"/>'
        yield _text(x + 26, at, f"{'thread' if is_thread else axis} {value}", anchor="start")


def _text(x: float, y: float, text: str, *, anchor: str = "middle", more: str = "") -> str:
    look = f'font-size="12" text-anchor="{anchor}" fill="currentColor" {more}'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(text)}</text>'
