"""The mesh as a picture: each rank with its coordinates, one colour per axis."""

import itertools
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.mesh import Mesh
from shoal.verbs.report.colours import of_axis
from shoal.verbs.report.parts import Drawing, Figure, Part, Section, Table, Words, several
from shoal.verbs.report.sources import Bench, Hosts, Run, Source

_MAX_RANKS = 64
_MAX_COLUMNS = 8
_CELL, _GAP, _LINE, _BAR = 84.0, 10.0, 16.0, 30.0
_TITLE, _NAME = 28.0, 24.0  # heights
_LEAST = 200.0  # of a drawing: its title needs it


def mesh_section(sources: Sequence[Source]) -> Section:
    """Each layout of several ranks once for each way it lies on hosts, whatever its options."""
    found: dict[tuple[str, Hosts | None], Layout] = {}
    for text, hosts in _places(sources):
        layout = _parse(text)
        if layout is not None:
            found.setdefault((text.partition(":")[0], hosts), layout)
    known = {text for text, hosts in found if hosts is not None}
    found = {key: layout for key, layout in found.items() if key[1] is not None or key[0] not in known}
    parts = [part for (_, hosts), layout in found.items() for part in _of_layout(layout, hosts)]
    note = (
        "Axes go from the outermost to the innermost; ranks that differ on one axis alone form a group on it. A dashed "
        "frame is a host."
    )
    return Section(title="Mesh", parts=[Words(text=note), *parts] if parts else [])


def _places(sources: Sequence[Source]) -> Iterator[tuple[str, Hosts | None]]:
    """Layouts, and where their ranks were; a benchmark starts all of them on one host."""
    for source in sources:
        if isinstance(source, Bench):
            yield from ((row["layout"], (("one host", row["num_devices"]),)) for row in source.good)
        elif isinstance(source, Run):
            yield source.layout, source.hosts


def draw_mesh(layout: Layout, hosts: Hosts | None = None) -> Drawing:
    """Rows of ranks, the innermost axis from left to right; brackets tell where a row stands on the others.

    Args:
        hosts: the name of each in the order of the ranks, and how many it has; each is drawn around its ranks. None
            where that is not known.
    """
    names, num, shown = _coordinates(layout)
    inner = _sizes(layout)[names[-1]]
    columns = _columns(inner)
    outer = names[:-1] if inner % columns == 0 else []
    rows = _rows(len(shown), columns, hosts)
    height = 24 + _LINE * len(names)
    left = _GAP + _BAR * len(outer)
    tops = _tops(rows, height, has_names=hosts is not None and len(hosts) > 1)
    body = [_text(_GAP, 18, _title(layout, num, hosts), anchor="start")]
    for number, axis in enumerate(outer):
        keys = [[shown[row.ranks[0]][name] for name in outer[: number + 1]] for row in rows]
        for value, begin, count in _stretches(keys):
            tall = tops[begin + count - 1] + height - tops[begin]
            body += _bracket(axis, value, _GAP + _BAR * number, tops[begin], tall)
    for row, y in zip(rows, tops, strict=True):
        for place, rank in enumerate(row.ranks):
            x = left + (row.column + place) * (_CELL + _GAP)
            if place:
                line = f'd="M{x - _GAP:g} {y + height / 2:g}h{_GAP:g}" stroke="{of_axis(names[-1])}"'
                body.append(f'<path {line} stroke-width="4"/>')
            body += _rank(rank, shown[rank], x, y, height, is_thread=layout.threads > 1)
    wide = left + min(columns, len(shown)) * (_CELL + _GAP)
    tall = tops[-1] + height + _GAP
    if hosts is not None:
        body += _frames(hosts, rows, tops, height, max(wide, _LEAST))
    return Drawing(width=max(wide, _LEAST), height=tall, body="\n".join(body), least=int(wide * 0.75))


class _Row(NamedTuple):
    ranks: range
    column: int  # of the first
    host: int


def _rows(num: int, columns: int, hosts: Hosts | None) -> list[_Row]:
    """Of so many ranks: a row ends where the width ends, and where a host ends."""
    ends = list(itertools.accumulate(count for _, count in hosts)) if hosts else [num]
    cuts = sorted({*range(0, num, columns), *(end for end in ends if end < num), num})
    return [
        _Row(range(begin, end), begin % columns, sum(begin >= last for last in ends))
        for begin, end in itertools.pairwise(cuts)
    ]


def _tops(rows: Sequence[_Row], height: float, *, has_names: bool) -> list[float]:
    """Where each row begins; a host that is named has its name above its first row."""
    tops, y = [], _TITLE
    for place, row in enumerate(rows):
        if has_names and (place == 0 or row.host != rows[place - 1].host):
            y += _NAME + (_GAP if place else 0)
        tops.append(y)
        y += height + _GAP
    return tops


def _frames(hosts: Hosts, rows: Sequence[_Row], tops: Sequence[float], height: float, wide: float) -> Iterator[str]:
    """Around the ranks of each host; the title of the drawing names one that is alone."""
    look = 'rx="10" fill="none" stroke="currentColor" stroke-opacity="0.4" stroke-dasharray="5 4"'
    for number, (name, count) in enumerate(hosts):
        own = [top for top, row in zip(tops, rows, strict=True) if row.host == number]
        if not own:
            continue  # beyond what is drawn
        y = own[0] - _NAME if len(hosts) > 1 else 1
        if len(hosts) > 1:
            yield _text(_GAP, own[0] - 8, f"{name}: {several(count, 'device')}", anchor="start")
        yield f'<rect x="1" y="{y:g}" width="{wide - 2:g}" height="{own[-1] + height + _GAP / 2 - y:g}" {look}/>'


def _of_layout(layout: Layout, hosts: Hosts | None) -> list[Part]:
    names, num, places = _coordinates(layout)
    if not names:
        return []
    if hosts is not None and sum(count for _, count in hosts) != num:
        hosts = None  # a run.json that says two things: then it is not known
    text = str(layout).partition(":")[0]
    what = "replicas in threads of one process" if layout.threads > 1 else "ranks"
    sizes = " x ".join(f"{_sizes(layout)[name]} on {name}" for name in names)
    finding = f"{text}: {num} {what}, {sizes}."
    if hosts is not None and len(hosts) > 1:
        finding += (
            f" On {several(len(hosts), 'host')}: " + ", ".join(f"{name} has {count}" for name, count in hosts) + "."
        )
    if num > len(places):
        finding += f" The first {_MAX_RANKS} are drawn."
    at = [name for name, count in hosts or () for _ in range(count)]
    numbers = Table(
        title=f"Coordinates in {text}",
        heads=["rank", *names, *(["host"] if at else [])],
        rows=[
            [str(rank), *(str(place[name]) for name in names), *at[rank : rank + 1]]
            for rank, place in enumerate(places)
        ],
        folded=True,
    )
    return [Figure(title=text, drawing=draw_mesh(layout, hosts), finding=finding, table=numbers)]


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


def _title(layout: Layout, size: int, hosts: Hosts | None) -> str:
    if layout.threads > 1:
        return f"one process, {size} threads"
    what = f"{size} devices" + (f", the first {_MAX_RANKS}" if size > _MAX_RANKS else "")
    if hosts is None:
        return what
    return f"{what} on {len(hosts)} hosts" if len(hosts) > 1 else f"one host, {what}"


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
