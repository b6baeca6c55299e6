"""shoal bench JOB: layouts side by side. Each has a world of its own; they take turns, and the loss is the same."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.layout import Layout
from shoal.verbs.bench.measured import Measured
from shoal.verbs.bench.report import Report
from shoal.verbs.bench.worlds import Found, Worlds
from shoal.world import Place, before_torch

if TYPE_CHECKING:
    from shoal.job import Job
    from shoal.verbs.bench.arm import Plan


class BenchError(ShoalError):
    """A comparison that makes no sense, or one that came to no end."""


def command(
    job: "Job | str",
    layouts: Sequence[str] | None = None,
    *,
    scale: Sequence[int] | None = None,
    axis: str = "dp",
    mode: str = "strong",
    fields: Mapping[str, Any] | None = None,
    rounds: int = 5,
    block: int = 10,
    threads: int | None = None,
    device: str | None = None,
    apart: bool | None = None,
    quiet: bool = False,
) -> Report:
    """Measure a job in several layouts.

    Args:
        job: a Job, or its name as on the command line.
        layouts: to compare, the first one being the base (lone, where it is among them).
        scale: instead of them, degrees of one axis: 1, 2, 4 of dp are lone, dp2, dp4.
        mode: strong keeps the global batch; weak multiplies it by the number of data ranks.
        fields: values of the job.
        rounds: how often each layout is timed, `block` steps each time.
        threads: CPU threads per rank; by default cores / ranks of the largest layout, the same in all of them.
        apart: one world at a time, made anew for each round; by default on a GPU, whose memory all would share.

    Returns:
        What was measured: a layout that is refused, or fails on the way, has its reason, and the others their figures.
        Ctrl-C and SIGTERM end it with the rounds that are complete.

    Raises:
        ShoalError: what cannot be compared, before any process starts.
        BenchError: what makes no sense on this machine.
    """
    before_torch()
    if Place.find().size > 1:
        raise BenchError("bench starts its own processes, and is one of several already. Start it alone.")
    chosen = _chosen(layouts, scale, axis)
    began = time.perf_counter()
    from shoal.launch import warm_up
    from shoal.launch.machine import default_threads, has_accelerator, num_cores

    on_gpu = (device or "cuda").startswith("cuda") and has_accelerator()
    apart = on_gpu if apart is None else apart
    _check_number(chosen, apart=apart)
    warm_up(also=_needed(chosen))
    from shoal.verbs.bench.arm import Plan

    plan = Plan(rounds=rounds, block=block, warm_up=max(3, block // 2), watched=max(6, block))
    jobs = [_job_for(job, fields or {}, layout, mode, plan) for layout in chosen]
    largest = max(layout.num_ranks * layout.threads for layout in chosen)
    worlds = Worlds(
        plan=plan,
        threads=threads or default_threads(largest),
        device=device or (None if on_gpu else "cpu"),
        quiet=quiet,
    )
    found = (worlds.run_apart if apart else worlds.run)(jobs, chosen)
    rows = _complete(found)
    best = max((row for row in rows if row.peak_flops), key=lambda row: row.peak_flops or 0, default=None)
    if best is not None:  # one device of one machine: what a busy moment hid from one layout, another has found
        rows = [replace(row, peak_flops=best.peak_flops, peak_source=best.peak_source) for row in rows]
    return Report(
        job=job if isinstance(job, str) else type(job).__name__,
        fields=dict(fields or {}),
        mode=mode,
        rows=rows,
        cores=num_cores(),
        seconds=time.perf_counter() - began,
        stopped=found.stopped,
        logs=found.logs,
    )


def _chosen(layouts: Sequence[str] | None, scale: Sequence[int] | None, axis: str) -> list[Layout]:
    if (layouts is None) == (scale is None):
        raise BenchError("say what to compare: --layouts lone,dp2,fsdp2, or --scale 1,2,4 for degrees of one axis.")
    names = layouts or [f"{axis}{degree}" if degree > 1 else "lone" for degree in scale or ()]
    chosen = [Layout.parse(name) for name in names]
    for layout in chosen:
        layout.require_available()
    twice = next((str(layout) for layout in chosen if chosen.count(layout) > 1), None)
    if twice is not None:
        raise BenchError(f"{twice} is named twice: each layout is measured once.")
    return chosen


def _check_number(layouts: Sequence[Layout], *, apart: bool) -> None:
    from shoal.launch.machine import most_ranks

    total = sum(layout.num_ranks for layout in layouts)
    if not apart and total > most_ranks():
        raise BenchError(
            f"these layouts have {total} processes together, and at most {most_ranks()} start on this machine. Compare "
            "fewer at once, or one at a time: --apart"
        )


def _complete(found: Found) -> list[Measured]:
    """Of what somebody ended early, the rounds that all layouts have."""
    if not found.stopped:
        return found.rows
    rounds = min((len(row.times_s) for row in found.rows if not row.error), default=0)
    return [
        replace(row, times_s=row.times_s[:rounds], error=row.error or ("" if rounds else "no round was complete"))
        for row in found.rows
    ]


def _needed(layouts: Sequence[Layout]) -> tuple[str, ...]:
    """What the ranks import, once, here."""
    sharded = any(layout.fsdp > 1 or layout.zero is not None for layout in layouts)
    staged = any(layout.pp > 1 for layout in layouts)
    return (
        "shoal.run",
        "shoal.verbs.bench.arm",
        "psutil",
        *(("torch.distributed.fsdp", "torch._dynamo.config") if sharded else ()),
        *(("shoal.parallel.pipeline",) if staged else ()),
    )


def _job_for(job: "Job | str", fields: Mapping[str, Any], layout: Layout, mode: str, plan: "Plan") -> "Job":
    from shoal.job import load_job, with_fields

    built = load_job(job, fields) if isinstance(job, str) else with_fields(job, fields)
    batch_size = built.batch_size * (layout.num_data * layout.threads if mode == "weak" else 1)
    return with_fields(built, {"steps": plan.steps, "batch_size": batch_size})
