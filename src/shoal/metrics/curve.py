"""A loss curve as text, for a terminal.

4.1 ┤⢄
    │ ⠑⠤⣀
1.2 ┤    ⠉⠒⠤⠤
    └─────────
     1      300
"""

import itertools
import math
from collections.abc import Sequence

_DOTS = (
    (0x01, 0x02, 0x04, 0x40),
    (0x08, 0x10, 0x20, 0x80),
)  # of a braille cell: column, then row from the top


def draw_curve(
    steps: Sequence[float],
    values: Sequence[float | None],
    *,
    width: int = 60,
    height: int = 10,
    title: str = "",
    plain: bool = False,
) -> str:
    """The curve in `width` x `height` characters, labels around it; `plain` for a terminal without Unicode.

    Values that are not finite leave a gap. A column that holds several steps shows their mean.
    """
    dots = (width, height) if plain else (2 * width, 4 * height)
    finite = _finite(values)
    lines = [title] if title else []
    if not finite:
        return "\n".join([*lines, "(no finite values to draw)"])
    low, high = min(finite), max(finite)
    columns = _columns(steps, values, dots[0])
    rows = [None if value is None else _row(value, low, high, dots[1]) for value in columns]
    picture = _plain_picture(_ink(rows), *dots) if plain else _braille(_ink(rows), width, height)
    return "\n".join([*lines, *_frame(picture, low, high, (min(steps), max(steps)), plain=plain)])


def can_draw_braille(encoding: str | None) -> bool:
    """Whether a stream of this encoding can hold the curve's characters."""
    try:
        "⠑┤│└─".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _columns(steps: Sequence[float], values: Sequence[float | None], num: int) -> list[float | None]:
    """One value per column: the mean of its steps, or between two steps the line that joins them."""
    first, span = min(steps), max(steps) - min(steps) or 1
    places: dict[int, list[float | None]] = {}
    for step, value in zip(steps, values, strict=True):
        places.setdefault(round((step - first) / span * (num - 1)), []).append(value)
    known = [(column, _mean(places[column])) for column in sorted(places)]
    columns: list[float | None] = [None] * num
    for column, value in known:
        columns[column] = value
    for (left, a), (right, b) in itertools.pairwise(known):
        if a is not None and b is not None:
            for column in range(left + 1, right):
                columns[column] = a + (b - a) * (column - left) / (right - left)
    return columns


def _mean(values: list[float | None]) -> float | None:
    finite = _finite(values)
    return math.fsum(finite) / len(finite) if finite else None


def _row(value: float, low: float, high: float, num: int) -> int:
    """From the top; a constant lies in the middle."""
    share = (high - value) / (high - low) if high > low else 0.5
    return round(share * (num - 1))


def _ink(rows: list[int | None]) -> set[tuple[int, int]]:
    """The (column, row) dots, each column joined to the one before without a hole."""
    ink: set[tuple[int, int]] = set()
    before: int | None = None
    for column, row in enumerate(rows):
        if row is not None:
            start = row if before is None or abs(row - before) <= 1 else before + (1 if row > before else -1)
            ink |= {(column, y) for y in range(min(start, row), max(start, row) + 1)}
        before = row
    return ink


def _braille(ink: set[tuple[int, int]], width: int, height: int) -> list[str]:
    cells = [[0x2800] * width for _ in range(height)]
    for x, y in ink:
        cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    # A blank braille cell shows as faint dots in some fonts.
    return ["".join(map(chr, row)).replace("\u2800", " ") for row in cells]


def _plain_picture(ink: set[tuple[int, int]], width: int, height: int) -> list[str]:
    return ["".join("*" if (x, y) in ink else " " for x in range(width)) for y in range(height)]


def _frame(picture: list[str], low: float, high: float, span: tuple[float, float], *, plain: bool) -> list[str]:
    tick, side, corner, floor = "+|+-" if plain else "┤│└─"
    labels = {0: f"{high:.4g}", len(picture) - 1: f"{low:.4g}"}
    if low == high:
        labels = {_row(low, low, high, len(picture)): f"{low:.4g}"}
    margin = max(map(len, labels.values()))
    body = [
        f"{labels.get(i, ''):>{margin}} {tick if i in labels else side}{row}".rstrip() for i, row in enumerate(picture)
    ]
    width = len(picture[0])
    first, last = (f"{end:g}" for end in span)
    axis = first if first == last else f"{first}{last:>{width - len(first)}}"
    return [*body, f"{'':{margin}} {corner}{floor * width}", f"{'':{margin}}  {axis}"]
