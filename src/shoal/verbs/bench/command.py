"""shoal bench JOB: layouts side by side. Each has a world of its own; they take turns, and the loss is the same."""

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.layout import Layout
from shoal.units import show_seconds
from shoal.verbs.bench.measured import Measured
from shoal.verbs.bench.report import Report
from shoal.verbs.bench.turns import Turns
from shoal.world import Place, World, before_torch

if TYPE_CHECKING:
    from shoal.job import Job
    from shoal.verbs.bench.arm import Plan

INTERRUPTED = 130
_LIMIT_MIN = 60.0  # for a collective: a world waits while the others have their turns


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

    Raises:
        ShoalError: what cannot be compared, before any process starts.
        BenchError: a process failed; the reason was shown.
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
    warm_up(also=_needed(chosen))
    from shoal.verbs.bench.arm import Plan

    plan = Plan(rounds=rounds, block=block, warm_up=max(3, block // 2), watched=max(4, block))
    jobs = [_job_for(job, fields or {}, layout, mode, plan) for layout in chosen]
    largest = max(layout.num_ranks * layout.threads for layout in chosen)
    session = functools.partial(
        _session,
        threads=threads or default_threads(largest),
        device=device or (None if on_gpu else "cpu"),
        quiet=quiet,
    )
    found = _apart(session, jobs, chosen, plan) if apart else session(jobs, chosen, plan)
    best = max((row for row in found if row.peak_flops), key=lambda row: row.peak_flops or 0, default=None)
    if best is not None:  # one device of one machine: what a busy moment hid from one layout, another has found
        found = [replace(row, peak_flops=best.peak_flops, peak_source=best.peak_source) for row in found]
    return Report(
        job=job if isinstance(job, str) else type(job).__name__,
        fields=dict(fields or {}),
        mode=mode,
        rows=found,
        cores=num_cores(),
        seconds=time.perf_counter() - began,
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


def _apart(session: Any, jobs: Sequence["Job"], layouts: Sequence[Layout], plan: "Plan") -> list[Measured]:
    """One world at a time, made anew for each round."""
    rows: list[Measured] = []
    for job, layout in zip(jobs, layouts, strict=True):
        rows += session([job], [layout], replace(plan, rounds=1))
    for _ in range(plan.rounds - 1):
        for place, (job, layout) in enumerate(zip(jobs, layouts, strict=True)):
            if not rows[place].error:
                (again,) = session([job], [layout], replace(plan, rounds=1))
                rows[place] = replace(again, times_s=[*rows[place].times_s, *again.times_s])
    return rows


def _session(
    jobs: Sequence["Job"],
    layouts: Sequence[Layout],
    plan: "Plan",
    *,
    threads: int,
    device: str | None,
    quiet: bool,
) -> list[Measured]:
    """Worlds that are all alive: the ranks of all of them are those of one launch."""
    from shoal.launch import start

    firsts = [sum(layout.num_ranks for layout in layouts[:arm]) for arm in range(len(layouts))]
    turns = Turns(len(layouts), plan.rounds + 2)
    screen_fd = None if quiet else os.dup(2)
    with tempfile.TemporaryDirectory(prefix="shoal-bench") as folder:

        def rank(place: Place) -> int:
            arm = max(arm for arm, first in enumerate(firsts) if first <= place.rank)
            own = _place(place, arm, firsts[arm], layouts[arm].num_ranks)
            _take_part(jobs[arm], layouts[arm], own, plan, turns, arm, Path(folder), device, screen_fd)
            return 0

        try:
            outcome = start(rank, firsts[-1] + layouts[-1].num_ranks, threads=threads, show="none")
        finally:
            turns.close()
            if screen_fd is not None:
                os.close(screen_fd)
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        if outcome.exit_code != 0:
            raise BenchError(f"a process failed (exit code {outcome.exit_code}); the reason is shown above.")
        return [Measured.of(json.loads((Path(folder) / f"{arm}.json").read_text())) for arm in range(len(layouts))]


def _place(place: Place, arm: int, first: int, size: int) -> Place:
    """Where a rank of the launch stands in the world of its layout."""
    own = place.rank - first
    rendezvous = f"{place.rendezvous}-{arm}"
    return replace(
        place,
        rank=own,
        size=size,
        local_rank=own,
        local_size=size,
        rendezvous=rendezvous,
        source="shoal" if size > 1 else "lone",
    )


def _take_part(
    job: "Job",
    layout: Layout,
    place: Place,
    plan: "Plan",
    turns: Turns,
    arm: int,
    folder: Path,
    device: str | None,
    screen_fd: int | None,
) -> None:
    from shoal.verbs.bench.arm import measure

    began, share = time.monotonic(), 0.0

    def say(text: str) -> None:
        if place.rank == 0 and screen_fd is not None:
            left = f"  {show_seconds((time.monotonic() - began) * (1 - share) / share)} left" if share else ""
            os.write(screen_fd, f"{text}{left}\n".encode())

    def own_turns() -> Any:
        nonlocal share
        if place.rank > 0:
            yield from range(plan.rounds + 2)
            return
        for turn, share in turns.taken(arm):  # noqa: B007  (what is over, for `say`)
            yield turn

    counted = own_turns()
    try:
        with World.open(layout, place=place, device=device, timeout_min=_LIMIT_MIN) as world:
            found = measure(job, world, plan, counted, say)
    except SystemExit as stop:
        error = f"the job's own code called sys.exit({stop.code})"
        found = Measured(layout=str(layout), num_devices=layout.num_ranks, batch_size=job.batch_size, error=error)
    except ShoalError as error:
        found = Measured(layout=str(layout), num_devices=layout.num_ranks, batch_size=job.batch_size, error=f"{error}")
    for _ in counted:
        pass  # a layout that is refused passes its turns on
    if place.rank == 0:
        assert found is not None
        (folder / f"{arm}.json").write_text(json.dumps(found.as_dict()))
        sys.stdout.flush()
