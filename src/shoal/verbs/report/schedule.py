"""The schedule of a pipeline, predicted and measured; pictures that a run has left are read with care."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from html import escape
from typing import Any

from shoal.verbs.report.parts import Drawing, Figure, Part, Section, Table, Words, is_finite, shown
from shoal.verbs.report.sources import Bench, Facts, Run

_SVG = "{http://www.w3.org/2000/svg}"
_KNOWN = {  # what `shoal.metrics.timeline` writes; a file may have been touched by others
    "rect": ("x", "y", "width", "height", "fill"),
    "path": ("d", "fill", "stroke"),
    "text": ("x", "y", "font-size", "text-anchor", "fill"),
}
_LEAST = 700  # pixels: below, the numbers in the boxes cannot be read


def bench_schedules(bench: Bench) -> Section:
    """Of each pipeline: as its schedule promises with the times of its stages, and as the step was."""
    return Section(title="Pipeline schedule", parts=[part for row in bench.good for part in _of_row(row)])


def run_schedules(runs: Sequence[Run]) -> Section:
    """The pictures that runs have left in their folders."""
    parts: list[Part] = []
    for run in runs:
        if run.schedule is None:
            continue
        drawing = read_picture(run.schedule)
        if drawing is None:
            parts.append(Words(text=f"{run.name}: its schedule.svg is damaged, or not of shoal; it is left out."))
            continue
        finding = f"What each rank of {run.title} does when, by number of the micro-batch; each panel names its bubble."
        parts.append(Figure(title=f"Schedule of {run.title}", drawing=drawing, finding=finding, wide=True))
    return Section(title="Pipeline schedule", parts=parts)


def read_picture(text: str) -> Drawing | None:
    """An SVG file of `shoal.metrics.timeline.draw`, element by element; None if it is anything else."""
    try:
        root = ET.fromstring(text)
        _, _, width, height = map(float, root.get("viewBox", "").split())
    except (ET.ParseError, ValueError):
        return None
    lines, in_boxes = [], False
    for element in root:
        name = element.tag.removeprefix(_SVG)
        if name not in _KNOWN or len(element) or not set(element.attrib) <= set(_KNOWN[name]):
            return None
        if _is_paper(element, width):
            continue
        if name == "path":  # boxes of the actions, then numbers in them, then the axis
            in_boxes = "fill" in element.attrib
        colours = {"#000000": "currentColor"} if not in_boxes else {}
        words = " ".join(f'{key}="{escape(colours.get(value, value))}"' for key, value in element.attrib.items())
        lines.append(f"<{name} {words}>{escape(element.text or '')}</{name}>")
    if not any(line.startswith("<path") for line in lines):
        return None
    return Drawing(width=width, height=height, body="\n".join(lines), least=_LEAST)


def _is_paper(element: ET.Element, width: float) -> bool:
    return element.get("fill") == "#ffffff" and element.get("width") == f"{width:g}"


def _of_row(row: Facts) -> list[Part]:
    spans, promised = row["spans"], row["promised"]
    if not spans and not promised:
        return []
    from shoal.metrics.timeline import draw
    from shoal.parallel.pipeline.timetable import Span, bubble

    given = {"predicted": [Span(*span) for span in promised], "measured": [Span(*span) for span in spans]}
    panels = {name: of for name, of in given.items() if of and all(is_finite(span.end_s) for span in of)}
    drawing = read_picture(draw(panels)) if panels else None
    if drawing is None:
        return []
    num_ranks = 1 + max(span.rank for of in panels.values() for span in of)
    idle = {name: bubble(of, num_ranks) for name, of in panels.items()}
    told = " and ".join(f"{share:.0%} of the time as {name}" for name, share in idle.items())
    finding = f"{row['layout']}: its ranks stand still for {told}."
    title = f"Schedule of {row['layout']}"
    numbers = Table(
        title=f"Actions of {row['layout']} as measured",
        heads=["rank", "stage", "kind", "micro-batch", "start, ms", "end, ms"],
        rows=[_cells(span) for span in spans],
        folded=True,
    )
    return [Figure(title=title, drawing=drawing, finding=finding, table=numbers if spans else None, wide=True)]


def _cells(span: Sequence[Any]) -> list[str]:
    rank, stage, kind, micro, *times_s = span
    return [str(rank), str(stage), str(kind), str(micro), *(shown(at * 1e3, ".2f") for at in times_s)]
