"""Every link in one picture: from each host (rows) to each other (columns), dark where it is slow. Text and SVG."""

import html
import math
from collections.abc import Mapping, Sequence

_SHADES = "█▓▒░·"  # from the slowest to the fastest
_WIDE = 10  # hosts, above which figures no longer fit
_CELL, _EDGE = 56, 90
# From Okabe and Ito's vermilion to white: slow is what the eye shall find.
_SLOW, _FAST = (213, 94, 0), (255, 255, 255)

Speeds = Mapping[tuple[str, str], float | None]  # bytes/s; None where nothing came through


def heat_map(names: Sequence[str], speeds: Speeds) -> str:
    """For a screen: a figure and a shade for each link, X where nothing came through."""
    shown = [name if len(name) <= 12 else f"{name[:11]}…" for name in names]
    width = max(8, *(len(name) + 1 for name in shown)) if len(names) <= _WIDE else 2
    heads = shown if len(names) <= _WIDE else [str(k % 10) for k in range(len(names))]
    edge = max(len(name) for name in shown) + 2
    lines = [
        "Gbit/s, from (row) to (column); dark is slow",
        " " * edge + "".join(h.rjust(width) for h in heads),
    ]
    for row, name in zip(shown, names, strict=True):
        cells = [_cell(speeds, name, other, is_wide=len(names) <= _WIDE).rjust(width) for other in names]
        lines.append(row.ljust(edge) + "".join(cells))
    return "\n".join(lines)


def _cell(speeds: Speeds, source: str, target: str, *, is_wide: bool) -> str:
    if source == target:
        return "-"
    speed = speeds.get((source, target))
    if speed is None:
        return "X"
    shade = _SHADES[min(len(_SHADES) - 1, int(share(speed, speeds) * len(_SHADES)))]
    return f"{speed * 8 / 1e9:.3g}{shade}" if is_wide else shade


def share(speed: float, speeds: Speeds) -> float:
    """From 0 for the slowest to 1 for the fastest, by orders of magnitude; alike within a factor of 1.5 is 1."""
    known = [each for each in speeds.values() if each is not None]
    low, high = min(known), max(known)
    if high <= 1.5 * low:
        return 1.0
    return (math.log(speed) - math.log(low)) / (math.log(high) - math.log(low))


def svg(names: Sequence[str], speeds: Speeds) -> str:
    """The same as a file for a browser: one square per link, its figure in it."""
    size = _EDGE + _CELL * len(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size + 24}" width="{size}" '
        'font-family="sans-serif" font-size="11" text-anchor="middle">',
        f'<rect width="{size}" height="{size + 24}" fill="#ffffff"/>',
        f'<text x="{size / 2}" y="{size + 14}">Gbit/s from row to column</text>',
    ]
    for at, name in enumerate(names):
        middle = _EDGE + _CELL * (at + 0.5)
        parts.append(f'<text x="{middle}" y="{_EDGE - 8}">{html.escape(name)}</text>')
        parts.append(f'<text x="{_EDGE - 8}" y="{middle + 4}" text-anchor="end">{html.escape(name)}</text>')
        parts += [_square(speeds, name, other, column, at) for column, other in enumerate(names) if other != name]
    return "\n".join([*parts, "</svg>", ""])


def _square(speeds: Speeds, source: str, target: str, column: int, row: int) -> str:
    x, y = _EDGE + _CELL * column, _EDGE + _CELL * row
    speed = speeds.get((source, target))
    told = "none" if speed is None else f"{speed * 8 / 1e9:.3g}"
    colour = "#888888" if speed is None else _colour(share(speed, speeds))
    return (
        f'<g><title>{html.escape(source)} to {html.escape(target)}: {told} Gbit/s</title><rect x="{x}" y="{y}" '
        f'width="{_CELL - 2}" height="{_CELL - 2}" fill="{colour}" stroke="#000000" stroke-opacity="0.3"/>'
        f'<text x="{x + _CELL / 2}" y="{y + _CELL / 2 + 4}">{told}</text></g>'
    )


def _colour(part: float) -> str:
    return "#" + "".join(f"{round(slow + (fast - slow) * part):02x}" for slow, fast in zip(_SLOW, _FAST, strict=True))
