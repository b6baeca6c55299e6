"""Lines and stacked bars, drawn by matplotlib as SVG that takes its text colour from the page."""

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.units import show_bytes
from shoal.verbs.report.colours import LINES, ink
from shoal.verbs.report.parts import Drawing, is_finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as Ruler
    from matplotlib.figure import Figure

WIDTH = 460.0  # at which text of 12 is read well; a phone shows it at 0.8, a wide screen at 1.2
_PLOT = 210.0  # height of a plot alone
_ROW = 18.0  # of a legend
_BAR = 42.0  # of a bar with its name above it
_INK = "#010203"  # stands for the page's own text colour until the SVG is text
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_MARKS = "osD^vPX"
_MAX_POINTS = 500  # of a line
_LOOK = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "shoal",  # the same ids each time
    "text.parse_math": False,  # a $ in somebody's name is a $
    "font.family": "sans-serif",
    "font.size": 12.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "grid.alpha": 0.2,
    "legend.frameon": False,
    **dict.fromkeys(["text.color", "axes.labelcolor", "xtick.color", "ytick.color"], _INK),
    **dict.fromkeys(["axes.edgecolor", "grid.color"], _INK),
}

Show = Callable[[float], str]


def show_number(value: float) -> str:
    """`1500` -> `1.5k`, `1e-07` -> `1e-7`."""
    if value and not 1e-3 <= abs(value) < 1e3:
        power = math.floor(math.log10(abs(value)) + 1e-9)
        for unit, of in (("k", 3), ("M", 6), ("G", 9), ("T", 12)):
            if of <= power < of + 3:
                return f"{value / 10**of:.4g}{unit}"
        return f"{value / 10.0**power:.3g}e{power}"
    return f"{value:.4g}"


def show_size(num_bytes: float) -> str:
    """`1048576` -> `1 MiB`."""
    return show_bytes(num_bytes).replace(".0 ", " ")


def size_ticks(most: float) -> list[float]:
    """From 0 on in steps of a power of 2, four to eight of them."""
    step = 2.0 ** math.floor(math.log2(most / 4)) if most >= 4 else 1.0
    return [step * number for number in range(int(most / step) + 1)]


def show_percent(share: float) -> str:
    """`0.255` -> `25.5%`."""
    return f"{100 * share:.3g}%"


@dataclass(frozen=True, kw_only=True)
class Ruled:
    """An axis of a plot: what it counts, how its numbers are written.

    Attributes:
        whole: steps, replicas: nothing is in between.
        from_zero: for figures that are read as parts of something.
        ticks: where only these have a meaning.
    """

    label: str
    show: Show = show_number
    is_log: bool = False
    whole: bool = False
    from_zero: bool = False
    ticks: Sequence[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points in the order of x; values that are not finite leave a gap.

    Attributes:
        place: among all that a page compares: it gives colour, dashes and mark; by default that in the plot.
        colour: another than that of the place.
        is_base: what others lie on: thick, and below them.
        ideal: what could be, not what was.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    place: int | None = None
    colour: str | None = None
    is_base: bool = False
    ideal: bool = False

    @property
    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if is_finite(x) and is_finite(y)]


def lines(given: Sequence[Line], *, x: Ruled, y: Ruled) -> Drawing | None:
    """All lines over each other; None where no line has two points.

    On a logarithmic axis a zero is a gap, as it has no place there.
    """
    drawable = [_thinned(line) for line in (_placed(line, x, y) for line in given) if line.finite]
    if all(len(line.finite) < 2 for line in drawable if not line.ideal):
        return None
    columns, rows = _legend_shape([line.name for line in drawable])

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for number, line in enumerate(drawable):
            _draw_line(axes, line, number if line.place is None else line.place)
        axes.set_xlabel(x.label)
        axes.set_ylabel(y.label)
        _rule(axes, "x", x, [at for line in drawable for at, _ in line.finite])
        _rule(axes, "y", y, [at for line in drawable for _, at in line.finite])
        if len(drawable) > 1:
            figure.legend(loc="outside lower left", ncols=columns, handlelength=2.6, columnspacing=1.2)

    return _picture(_PLOT + 30 + (_ROW * rows + 8 if len(drawable) > 1 else 0), draw)


def stacked(
    bars: Mapping[str, Mapping[str, float]],
    colour: Callable[[str], str],
    *,
    show: Show,
    label: str,
    whole: float | None = None,
) -> Drawing | None:
    """Horizontal bars of parts, each with its name above it; parts of one name have one colour in all of them.

    Args:
        whole: where the axis ends, if that means something (1 for shares); else at the longest bar.
    """
    names = dict.fromkeys(part for of in bars.values() for part in of)
    bars = {name: {part: v for part, v in of.items() if is_finite(v) and v > 0} for name, of in bars.items()}
    parts = [name for name in names if any(name in of for of in bars.values())]
    longest = max((sum(of.values()) for of in bars.values()), default=0.0)
    if not longest:
        return None
    columns, rows = _legend_shape(parts)
    from matplotlib.patches import Patch
    from matplotlib.ticker import FixedLocator, MaxNLocator

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, (name, of) in enumerate(bars.items()):
            begin = 0.0
            axes.text(0, place - 0.3, _short(name, 64), va="bottom", ha="left")
            for part, value in of.items():
                axes.barh(place, value, 0.5, left=begin, color=colour(part), edgecolor=_INK, linewidth=0.4)
                if value > 0.14 * (whole or longest):
                    style = {"color": ink(colour(part)), "fontsize": 11, "ha": "center", "va": "center"}
                    axes.text(begin + value / 2, place, show(value), **style)  # type: ignore[arg-type]  # one dict
                begin += value
        axes.set_ylim(len(bars) - 0.6, -0.85)
        axes.set_xlim(0, (whole or longest) * 1.001)
        axes.yaxis.set_visible(False)
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(label)
        _write_ticks(axes.xaxis, show)
        in_bytes = size_ticks(longest) if show is show_size else None
        axes.xaxis.set_major_locator(MaxNLocator(5) if in_bytes is None else FixedLocator(in_bytes))
        handles = [Patch(facecolor=colour(part), edgecolor=_INK, linewidth=0.4) for part in parts]
        figure.legend(handles, parts, loc="outside lower left", ncols=columns, handlelength=1.1, columnspacing=1.2)

    return _picture(_BAR * len(bars) + 52 + _ROW * rows, draw)


def _draw_line(axes: "Axes", line: Line, place: int) -> None:
    xs = [x for x, _ in line.points]
    ys = [y if is_finite(y) else math.nan for _, y in line.points]
    if line.ideal:
        axes.plot(xs, ys, color=_INK, linewidth=1, linestyle=":", label=_short(line.name, 48))
        return
    axes.plot(
        xs,
        ys,
        color=line.colour or LINES[place % len(LINES)],
        linestyle="-" if line.is_base else _DASHES[place % len(_DASHES)],
        linewidth=4.5 if line.is_base else 1.6,
        alpha=0.45 if line.is_base else 1.0,
        marker=_MARKS[place % len(_MARKS)] if len(xs) <= 24 else None,
        markersize=6.5 if line.is_base else 4.0,
        zorder=1.9 if line.is_base else 2.0,
        label=_short(line.name, 48),
    )


def _placed(line: Line, x: Ruled, y: Ruled) -> Line:
    """With a gap where a logarithmic axis has no place."""
    points = [
        (at, None if y.is_log and is_finite(value) and value <= 0 else value)
        for at, value in line.points
        if not (x.is_log and at <= 0)
    ]
    return replace(line, points=points)


def _thinned(line: Line) -> Line:
    """Of a long line the least and the largest point of each stretch, so that no spike is lost."""
    points = line.points
    if len(points) <= _MAX_POINTS:
        return line
    length = -(-len(points) // (_MAX_POINTS // 2))
    kept: list[tuple[float, float | None]] = []
    for begin in range(0, len(points), length):
        stretch = [(x, y) for x, y in points[begin : begin + length] if is_finite(y)]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])} if stretch else ()
        kept += sorted(ends) if ends else [(points[begin][0], None)]
    return replace(line, points=kept)


def _rule(axes: "Axes", side: str, ruled: Ruled, values: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

    ruler: Ruler = getattr(axes, f"{side}axis")  # x or y
    if ruled.is_log:
        axes.set(**{f"{side}scale": "log"})
        ruler.set_minor_locator(NullLocator())
        ruler.set_major_locator(LogLocator(numticks=7))
    else:
        ruler.set_major_locator(MaxNLocator(6, integer=ruled.whole, steps=[1, 2, 5, 10]))
    if ruled.ticks is not None:
        ruler.set_major_locator(FixedLocator(list(ruled.ticks)))
    elif ruled.is_log and values:  # whole decades: else there may be no tick
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        axes.set(**{f"{side}lim": (10.0**low, 10.0 ** max(high, low + 1))})
    if ruled.from_zero and not ruled.is_log:
        axes.set(**{f"{side}lim": (0.0, max(values) * 1.05)})
    _write_ticks(ruler, ruled.show)


def _write_ticks(ruler: "Ruler", show: Show) -> None:
    from matplotlib.ticker import FuncFormatter

    ruler.set_major_formatter(FuncFormatter(lambda value, _: show(value)))


def _legend_shape(names: Sequence[str]) -> tuple[int, int]:
    """Columns and rows that fit under the plot."""
    longest = max(len(_short(name, 48)) for name in names)
    columns = max(1, min(len(names), int(WIDTH / (6.6 * longest + 48))))
    return columns, -(-len(names) // columns)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _picture(height: float, draw: Callable[["Figure"], None]) -> Drawing:
    """What is drawn on an empty figure; no window, no figure that others would see."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    text = io.StringIO()
    with mpl.rc_context(_LOOK), warnings.catch_warnings():  # type: ignore[arg-type]  # its keys are literals
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # its own font measures; the browser's writes
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        draw(figure)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return Drawing(width=WIDTH, height=height, body=_body(text.getvalue()))


def _body(svg: str) -> str:
    """Without what belongs to a file of its own: header, metadata, a style for everything, ids nobody refers to."""
    inner = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    inner = re.sub(r"<metadata>.*?</metadata>", "", inner, flags=re.DOTALL)
    inner = re.sub(r"<style.*?</style>", "", inner, flags=re.DOTALL)
    inner = re.sub(r"<!--.*?-->", "", inner, flags=re.DOTALL)
    inner = re.sub(r'<g id="[^"]*"', "<g", inner)
    inner = re.sub(r" font-family: [^;]*;", "", inner)
    inner = re.sub(r"\n\s*", "\n", inner)
    return inner.replace(_INK, "currentColor").strip()
