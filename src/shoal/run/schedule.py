"""The schedule of a pipeline as it was and as it should be: a picture in the run's folder, and the bubble of both."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from shoal.metrics.timeline import draw
from shoal.parallel.pipeline import Pipeline
from shoal.parallel.pipeline.timetable import Span, bubble, timetable
from shoal.world import World

NAME = "schedule.svg"


def picture_schedule(pipeline: Pipeline, world: World, folder: Path | None, step: int) -> str:
    """Gather the last step of every rank, of that number, draw it beside what the schedule promises; collective.

    Returns:
        A line to say; the file is written by rank 0, where there is a folder.
    """
    is_shown = world.rank in world.mesh.group(0, ("pp",))  # the first of several pipelines
    own = [(world.mesh.coordinate(world.rank, "pp"), *span) for span in pipeline.spans()] if is_shown else []
    rows = [row for text in world.gather_text(json.dumps(own)) for row in json.loads(text)]
    begins = min((row[4] for row in rows), default=0.0)
    measured = [
        Span(rank, stage, kind, micro, start_s - begins, end_s - begins)
        for rank, stage, kind, micro, start_s, end_s in rows
    ]
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in measured:
        times[span.kind, span.stage].append(span.end_s - span.start_s)
    predicted = timetable(world.layout, lambda kind, stage: median(times[kind, stage]))
    if world.rank == 0 and folder is not None:
        (folder / NAME).write_text(draw({"predicted": predicted, "measured": measured}), encoding="utf-8")
    where = f": {folder / NAME}" if folder is not None else ""
    shares = (bubble(spans, world.layout.pp) for spans in (predicted, measured))
    equal = bubble(timetable(world.layout, lambda kind, stage: 2.0 if kind == "B" else 1.0), world.layout.pp)
    text = "bubble  {:.0%} with the times of these stages, {:.0%} measured in step {}, {:.0%} were all stages equal"
    return text.format(*shares, step, equal) + where
