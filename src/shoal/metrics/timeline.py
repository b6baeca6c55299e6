"""A pipeline's step as a picture, as a table and as data: what each rank does when, and how long it stands still."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from shoal.parallel.pipeline.timetable import Kind, Span, bubble, makes, needs
from shoal.units import show_seconds

# (name, colour): far apart for every kind of colour vision, at full strength and half faded (CIELAB distance 18 in the
# simulation of Machado et al. 2009).
KINDS: dict[Kind, tuple[str, str]] = {
    "F": ("forward", "#0072b2"),
    "B": ("backward", "#d55e00"),
    "I": ("backward, inputs", "#f0e442"),
    "W": ("backward, weights", "#777777"),
}
_FADED = 0.5  # of the last stage of a rank; its first has the full colour
_WIDTH, _LEFT, _RIGHT = 1200.0, 60.0, 30.0
_TITLE, _AXIS, _LEGEND = 30.0, 28.0, 24.0  # heights
_DIGIT = 0.62  # the width of a digit over the size of its font


def draw(panels: Mapping[str, Sequence[Span]]) -> str:
    """An SVG picture: one panel below the other, on one scale of time; the text of a whole file.

    Each rank is a row, each action a box with the number of its micro-batch where there is room. The stages of a rank
    fade from its first to its last.
    """
    assert panels, "nothing to draw"
    longest_s = max(_length_s(spans) for spans in panels.values())
    per_s = (_WIDTH - _LEFT - _RIGHT) / (longest_s or 1.0)
    parts: list[str] = []
    y = 0.0
    for title, spans in panels.items():
        row = _row_height(spans)
        share = bubble(spans, _num_ranks(spans))
        parts.append(_text(_LEFT, y + 20, f"{title}: bubble {share:.1%}", size=15, anchor="start"))
        parts += _boxes(spans, y + _TITLE, row, per_s)
        y += _TITLE + row * _num_ranks(spans)
        parts += _axis(longest_s, y, per_s)
        y += _AXIS
    parts += _legend(panels, y)
    width, height = f"{_WIDTH:g}", f"{y + _LEGEND:g}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    paper = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([f'{head} font-family="sans-serif">', paper, *parts, "</svg>\n"])


def as_table(spans: Sequence[Span]) -> str:
    """For a terminal: a column per rank, a row per step, where every action takes one step and waits for what it needs.

    `F3` is the forward of micro-batch 3; `5F3`, where ranks have several stages, that of stage 5.
    """
    num_ranks, many = _num_ranks(spans), _turns(spans)[1] > 1
    cells: dict[tuple[int, int], str] = {}
    for span, step in _steps(spans).items():
        cells[step, span.rank] = f"{span.stage if many else ''}{span.kind}{span.micro}"
    num_steps = 1 + max(step for step, _ in cells)
    width = max(len(f"rank {num_ranks - 1}"), *map(len, cells.values()))
    rows = [["step", *(f"rank {rank}" for rank in range(num_ranks))]]
    rows += [[str(step), *(cells.get((step, rank), ".") for rank in range(num_ranks))] for step in range(num_steps)]
    margin = max(4, len(str(num_steps)))
    lines = [f"{row[0]:>{margin}}  " + "  ".join(f"{cell:<{width}}" for cell in row[1:]).rstrip() for row in rows]
    return "\n".join(lines)


def as_data(spans: Sequence[Span]) -> dict[str, Any]:
    """For `--json`."""
    num_ranks = _num_ranks(spans)
    return {
        "num_ranks": num_ranks,
        "length_s": _length_s(spans),
        "bubble": bubble(spans, num_ranks),
        "spans": [asdict(span) for span in spans],
    }


def _num_ranks(spans: Sequence[Span]) -> int:
    return 1 + max(span.rank for span in spans)


def _length_s(spans: Sequence[Span]) -> float:
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def _turns(spans: Sequence[Span]) -> tuple[dict[int, int], int]:
    """Of every stage, its place among those of its rank; and the most that a rank has."""
    ranks = {span.stage: span.rank for span in spans}
    turns = {stage: sum(ranks[other] == ranks[stage] for other in ranks if other < stage) for stage in ranks}
    return turns, 1 + max(turns.values())


def _steps(spans: Sequence[Span]) -> dict[Span, int]:
    """When each would run if every action took one step."""
    num_stages = 1 + max(span.stage for span in spans)
    made: dict[tuple[str, int, int], int] = {}
    free: dict[int, int] = {}
    steps: dict[Span, int] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        before = [made.get((what, stage, span.micro), -1) for what, stage in needs(span.kind, span.stage, num_stages)]
        steps[span] = step = max([free.get(span.rank, 0), *(at + 1 for at in before)])
        free[span.rank] = step + 1
        made[makes(span.kind), span.stage, span.micro] = step
    return steps


def _row_height(spans: Sequence[Span]) -> float:
    return float(min(28, max(12, 480 // _num_ranks(spans))))


def _boxes(spans: Sequence[Span], top: float, row: float, per_s: float) -> Iterator[str]:
    """Names of the ranks, boxes, numbers. Boxes of one colour are one path: large worlds have a hundred thousand."""
    begin_s, (turns, most), size = min(span.start_s for span in spans), _turns(spans), min(12.0, row - 2)
    middle = top + row / 2 + 0.35 * size
    for rank in range(_num_ranks(spans)):
        yield _text(_LEFT - 6, middle + row * rank, f"rank {rank}", size=size, anchor="end")
    boxes: dict[tuple[Kind, int], list[str]] = {}
    numbers: list[str] = []
    for span in spans:
        x, width = _LEFT + (span.start_s - begin_s) * per_s, (span.end_s - span.start_s) * per_s
        gap, look = min(0.5, width / 8), (span.kind, turns[span.stage])
        box = f"M{x + gap:.2f} {top + row * span.rank + 1:g}h{width - 2 * gap:.2f}v{row - 2:g}H{x + gap:.2f}z"
        boxes.setdefault(look, []).append(box)
        if width > _DIGIT * size * len(str(span.micro)) + 2:
            ink = _ink(_colour(*look, most))
            numbers.append(_text(x + width / 2, middle + row * span.rank, str(span.micro), size=size, fill=ink))
    for look, drawn in sorted(boxes.items()):
        yield f'<path fill="{_colour(*look, most)}" d="{"".join(drawn)}"/>'
    yield from numbers


def _axis(longest_s: float, y: float, per_s: float) -> Iterator[str]:
    yield f'<path stroke="#000000" d="M{_LEFT:g} {y + 2:g}H{_LEFT + longest_s * per_s:.2f}"/>'
    for tick_s in _ticks(longest_s):
        x = _LEFT + tick_s * per_s
        yield f'<path stroke="#000000" d="M{x:.2f} {y + 2:g}v4"/>'
        yield _text(x, y + 18, show_seconds(tick_s) if tick_s else "0", size=11)


def _ticks(longest_s: float) -> list[float]:
    """At most twelve, at multiples of 1, 2 or 5 times a power of ten."""
    if not longest_s:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(longest_s / 10))
    step_s = next(power * factor for factor in (1, 2, 5, 10, 20) if longest_s / (power * factor) <= 12)
    return [number * step_s for number in range(int(longest_s / step_s * (1 + 1e-9)) + 1)]


def _legend(panels: Mapping[str, Sequence[Span]], y: float) -> Iterator[str]:
    x, most = _LEFT, max(_turns(spans)[1] for spans in panels.values())
    used = {span.kind for spans in panels.values() for span in spans}
    for kind, (name, _) in KINDS.items():
        if kind in used:
            for turn in range(most):
                yield f'<rect x="{x:g}" y="{y:g}" width="14" height="14" fill="{_colour(kind, turn, most)}"/>'
                x += 15
            yield _text(x + 4, y + 12, name, anchor="start")
            x += 7 * len(name) + 24
    if most > 1:
        yield _text(x, y + 12, "(first to last stage of a rank)", anchor="start")


def _text(x: float, y: float, text: str, *, size: float = 12, anchor: str = "middle", fill: str = "#000000") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
    )


def _colour(kind: Kind, turn: int, most: int) -> str:
    share = _FADED * turn / (most - 1) if most > 1 else 0.0
    full = KINDS[kind][1]
    channels = (int(full[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)


def _ink(colour: str) -> str:
    """Black or white, whichever is read more easily on it."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "#ffffff"
