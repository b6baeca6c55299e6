"""Figures over steps: of all layouts, or runs, over each other; and how far apart they are."""

from collections.abc import Mapping, Sequence
from statistics import median

from shoal.verbs.report.charts import Line, Ruled, lines, show_number
from shoal.verbs.report.parts import Figure, Part, Table, Words, is_finite, several, shown

Points = Sequence[tuple[float, float | None]]  # step, value
Curves = Mapping[str, Points]

STEP = Ruled(label="step", whole=True)
_MAX_ROWS = 24  # of a table


def curve(
    title: str,
    curves: Curves,
    y: Ruled,
    finding: str = "",
    *,
    warm_up: bool = False,
    order: Sequence[str] = (),
    base: str = "",
    colours: Mapping[str, str] | None = None,
) -> list[Part]:
    """One plot; where no curve has two points, their values as a table; nothing where there is none.

    Args:
        warm_up: the first point is slow for reasons of its own, and is not drawn if others follow.
        order: of all that is compared, so that each has one look in all plots.
        base: what the others are expected to lie on.
        colours: of each name, the same in all charts of the page.
    """
    order = order or list(curves)
    curves = {name: points for name, points in curves.items() if points}
    if not any(is_finite(value) for points in curves.values() for _, value in points):
        return []
    numbers = table(title, curves, folded=True)
    cut = {name: points[1:] if warm_up and len(points) > 2 else points for name, points in curves.items()}
    given = [
        Line(name=name, points=points, place=order.index(name), colour=(colours or {}).get(name), is_base=name == base)
        for name, points in cut.items()
    ]
    drawing = lines(given, x=STEP, y=y)
    if drawing is None:
        return [table(title, curves)]
    told = [finding or (_medians(cut, y) if warm_up else _ends(curves, y)), _odd(curves)]
    told += ["The first step, which warms up, is left out of the chart."] if cut != curves and warm_up else []
    return [Figure(title=title, drawing=drawing, finding=" ".join(filter(None, told)), table=numbers)]


def losses(curves: Curves, base: str, *, why_apart: str = "", colours: Mapping[str, str] | None = None) -> list[Part]:
    """The losses over each other, and their relative differences from those of the base.

    Args:
        why_apart: why they are not expected to agree, where they are not; then no difference is drawn.
    """
    thick = "" if why_apart or len(curves) == 1 else base
    parts = curve("Loss", curves, Ruled(label="loss"), base=thick, colours=colours)
    others = {name: _differences(points, curves[base]) for name, points in curves.items() if name != base}
    others = {name: points for name, points in others.items() if points}
    if not others or not parts:
        return parts
    if why_apart:
        return [*parts, Words(text=why_apart)]
    name, step, most = max(((n, at, v) for n, points in others.items() for at, v in points), key=lambda row: row[2])
    if most == 0:
        return [*parts, Words(text=f"Each loss of each step is that of {base}, to the last bit.")]
    same = sum(value == 0 for points in others.values() for _, value in points)
    finding = (
        f"The largest difference from {base} is {show_number(float(f'{most:.1e}'))} of the loss: {name}, step {step:g}."
    )
    if same:
        finding += f" Without a point here: {several(same, 'step')} with a loss equal to the last bit."
    y = Ruled(label=f"|loss - {base}| / |{base}|", is_log=True)
    return [*parts, *curve(f"Relative difference from {base}", others, y, finding, order=list(curves), colours=colours)]


def table(title: str, curves: Curves, *, folded: bool = False) -> Table:
    """The values step by step; of many steps some, the first and the last among them."""
    by_step: dict[float, dict[str, float | None]] = {}
    for name, points in curves.items():
        for step, value in points:
            by_step.setdefault(step, {})[name] = value
    steps = sorted(by_step)
    chosen = thinned(steps)
    return Table(
        title=title + (f" ({len(chosen)} of {len(steps)} steps)" if len(chosen) < len(steps) else ""),
        heads=["step", *curves],
        rows=[
            [f"{step:g}", *(shown(by_step[step][name], ".6g") if name in by_step[step] else "" for name in curves)]
            for step in chosen
        ],
        folded=folded,
    )


def thinned(steps: Sequence[float]) -> list[float]:
    """Evenly spread, both ends among them."""
    if len(steps) <= _MAX_ROWS:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (_MAX_ROWS - 1))] for place in range(_MAX_ROWS)]


def finite(points: Points) -> list[tuple[float, float]]:
    """Those that can be drawn."""
    return [(step, value) for step, value in points if is_finite(value)]


def _differences(points: Points, base: Points) -> list[tuple[float, float]]:
    held = dict(finite(base))
    return [(at, abs(value - held[at]) / max(abs(held[at]), 1e-12)) for at, value in finite(points) if at in held]


def _ends(curves: Curves, y: Ruled) -> str:
    told = {name: f"from {y.show(of[0][1])} to {y.show(of[-1][1])}" for name, of in _drawn(curves).items()}
    if len(told) > 1 and len(set(told.values())) == 1:
        return f"{'Both' if len(told) == 2 else f'All {len(told)}'} go {next(iter(told.values()))}."
    return f"From the first step to the last: {_some(told)}."


def _medians(curves: Curves, y: Ruled) -> str:
    return f"Medians, {y.label}: {_some({n: y.show(median(v for _, v in of)) for n, of in _drawn(curves).items()})}."


def _drawn(curves: Curves) -> dict[str, list[tuple[float, float]]]:
    return {name: found for name, points in curves.items() if (found := finite(points))}


def _some(told: Mapping[str, str]) -> str:
    """The first three of many."""
    more = f", and {len(told) - 3} more" if len(told) > 3 else ""
    return "; ".join(f"{name} {text}" for name, text in list(told.items())[:3]) + more


def _odd(curves: Curves) -> str:
    """Where a figure is none, as after a divergence."""
    told = []
    for name, points in curves.items():
        steps = [f"{step:g}" for step, value in points if value is not None and not is_finite(value)]
        if steps:
            some = ", ".join(steps[:5]) + (", ..." if len(steps) > 5 else "")
            told.append(f"{name} is not finite at {several(len(steps), 'step')} ({some}).")
    return " ".join(told)
