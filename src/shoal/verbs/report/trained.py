"""Of runs: what metrics.jsonl tells, all runs over each other."""

from collections.abc import Mapping, Sequence
from statistics import median

from shoal.verbs.report.charts import Ruled, show_percent
from shoal.verbs.report.colours import of_runs
from shoal.verbs.report.curves import Curves, curve, finite, losses
from shoal.verbs.report.parts import Part, Section, Table, Words, shown
from shoal.verbs.report.sources import Run

# (title, key, unit, warms up)
_FIGURES = (
    ("Throughput", "perf/tokens_per_s", "tokens/s", True),
    ("Throughput", "perf/samples_per_s", "samples/s", True),
    ("Step time", "perf/step_time_s", "seconds", True),
    ("MFU", "perf/mfu", "share of peak", True),
    ("Gradient norm", "train/grad_norm", "norm", False),
    ("Learning rate", "train/lr", "learning rate", False),
)

_LEGEND = (
    "step time: wall time of an optimizer step, between two logged steps. tokens/s, samples/s: of all devices "
    "together. MFU: FLOPs that the model needs / what the devices could do in that time; n/a where that is not known. "
    "waiting for data: share of the time in which the next batch was not there yet. peak: the most that one process, "
    "or one device, has held."
)


def loss_section(runs: Sequence[Run]) -> Section:
    """Losses over each other; differences only between runs of one job."""
    curves = {run.title: run.points("train/loss") for run in runs}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        missing = [run.name for run in runs if not run.events]
        note = f"No figures yet: {', '.join(missing)} has no event in its metrics.jsonl." if missing else ""
        return Section(title="Loss", parts=[Words(text=note)] if note else [])
    with_loss = [run for run in runs if run.title in curves]
    base = next((run for run in with_loss if run.layout == "lone"), with_loss[0])
    why = _why_apart(with_loss, base)
    return Section(title="Loss", parts=losses(curves, base.title, why_apart=why, colours=_colours(runs)))


def figures(runs: Sequence[Run]) -> Section:
    """A plot for each figure, the last values, and what evaluation found."""
    parts: list[Part] = [_summary(runs)] if any(run.events for run in runs) else []
    has_tokens = any(finite(run.points("perf/tokens_per_s")) for run in runs)
    for title, key, unit, warms_up in _FIGURES:
        if has_tokens and key == "perf/samples_per_s":
            continue
        y = Ruled(label=unit, show=show_percent) if key == "perf/mfu" else Ruled(label=unit)
        parts += curve(title, _curves(runs, key), y, warm_up=warms_up, colours=_colours(runs))
    return Section(title="Over the steps", parts=parts)


def evaluation(runs: Sequence[Run]) -> Section:
    """Over the steps where there were several, and the last."""
    keys = sorted({key for run in runs for event in run.events for key in event if key.startswith("eval/")})
    parts: list[Part] = []
    for key in keys:
        curves = _curves(runs, key)
        if any(len(points) > 1 for points in curves.values()):
            name = key.removeprefix("eval/")
            parts += curve(f"Evaluation: {name}", curves, Ruled(label=name), colours=_colours(runs))
    last = [[run.title, *(_last(run, key) for key in keys)] for run in runs]
    heads = ["run", *(key.removeprefix("eval/") for key in keys)]
    return Section(
        title="Evaluation", parts=[*parts, Table(title="Last evaluation", heads=heads, rows=last)] if keys else []
    )


def _colours(runs: Sequence[Run]) -> dict[str, str]:
    return of_runs({run.title: run.layout for run in runs})


def _curves(runs: Sequence[Run], key: str) -> Curves:
    return {run.title: run.points(key) for run in runs}


def _last(run: Run, key: str) -> str:
    points = run.points(key)
    return f"{shown(points[-1][1])} (step {points[-1][0]:g})" if points else ""


def _summary(runs: Sequence[Run]) -> Table:
    heads = ["run", "last loss", "step time (median), ms", "tokens/s (median)", "samples/s (median)", "MFU (median)"]
    heads += ["waiting for data (median)", "peak of a process or device, GiB"]
    return Table(title="Of each run", heads=heads, rows=[_summary_row(run) for run in runs], legend=_LEGEND)


def _summary_row(run: Run) -> list[str]:
    peaks = [value for _, value in finite(run.points("mem/peak_gib"))]
    step_s = _median(run, "perf/step_time_s")
    return [
        run.title,
        _last(run, "train/loss"),
        shown(None if step_s is None else step_s * 1e3, ".1f"),
        *(shown(_median(run, key), ",.0f") for key in ("perf/tokens_per_s", "perf/samples_per_s")),
        *(shown(_median(run, key), ".1%") for key in ("perf/mfu", "perf/data_wait")),
        shown(max(peaks, default=None), ".2f"),
    ]


def _median(run: Run, key: str) -> float | None:
    """Without the first value, which is of the warm-up, if there are others."""
    values = [value for _, value in finite(run.points(key))]
    return median(values[1:] or values) if values else None


def _why_apart(runs: Sequence[Run], base: Run) -> str:
    """In which values the jobs differ: then their losses do, too."""
    jobs: list[Mapping[str, object]] = [run.facts.get("job") or {} for run in runs]
    names = [name for name in dict.fromkeys(name for job in jobs for name in job) if name != "steps"]
    different = [name for name in names if len({str(job.get(name)) for job in jobs}) > 1]
    if not different:
        return ""
    return (
        f"These runs train different jobs ({', '.join(different)}), so their losses are not held against {base.title}."
    )
