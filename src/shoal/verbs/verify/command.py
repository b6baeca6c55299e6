"""shoal verify: is the training in a layout the training of one process? Few steps, in float64, on this CPU."""

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import JobError, ShoalError
from shoal.layout import Layout
from shoal.world import Place, World, before_torch

if TYPE_CHECKING:
    from shoal.job import Job
    from shoal.launch import Outcome
    from shoal.verbs.verify.passes import Plan
    from shoal.verbs.verify.recording import Recorded
    from shoal.verbs.verify.report import Numerics, Report
    from shoal.verbs.verify.shares import Share

    Pairs = Mapping[str, tuple[Recorded, Recorded]]

INTERRUPTED, MISTAKE = 130, 2
_LIMIT_MIN = 5.0  # for a collective; a rank may be this much ahead of another
Patch = Callable[[], contextlib.AbstractContextManager[Any]]


class VerifyError(ShoalError):
    """A verification that makes no sense, or a recording that cannot be made or compared."""


def command(
    job: "Job | str",
    layout: Layout | str,
    *,
    fields: Mapping[str, Any] | None = None,
    steps: int = 3,
) -> "Report":
    """Train a few steps in one process and in a layout, compare, and explain the first difference.

    Args:
        job: a Job, or its name as on the command line.
        fields: values of the job, as text or as they are.
        steps: with SGD, and again with the job's optimizer.

    Raises:
        ShoalError: what cannot be verified, before any process starts.
    """
    before_torch()
    if Place.find().size > 1:
        raise VerifyError(
            "verify starts its own processes, and is one of several already. Start it alone, without torchrun."
        )
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    layout.require_available()
    began = time.perf_counter()
    sharded = layout.fsdp > 1 or layout.zero is not None
    with (
        prepared(job, fields or {}, sharded=sharded, staged=layout.pp > 1) as built,
        tempfile.TemporaryDirectory(prefix="shoal-verify") as folder,
    ):
        from shoal.verbs.verify.passes import Plan

        plan = Plan(job=built, steps=min(steps, built.steps))
        reference = Path(folder) / "one-process"
        outcome = record(plan, "lone", reference)
        report = failed(outcome, str(layout), "in one process") or verify(plan, layout, reference, Path(folder))
    report.title = f"verify  {_name(job)}  {layout} against one process, {steps} steps in float64"
    report.seconds = time.perf_counter() - began
    return report


@contextlib.contextmanager
def prepared(
    job: "Job | str", fields: Mapping[str, Any], *, sharded: bool = True, staged: bool = True
) -> "Iterator[Job]":
    """The job, in a process that can fork ranks; its threads come back afterwards.

    Args:
        sharded, staged: import what `fsdp` and `pp` need here, once, and not in every rank.

    Raises:
        JobError: a job whose training is another one in each layout, by its own word.
    """
    from shoal.launch import warm_up

    loaded = sys.modules.get("torch")
    threads = loaded.get_num_threads() if loaded else None
    warm_up(also=(*_NEEDED, *(_NEEDED_BY_SHARDS if sharded else ()), *(_NEEDED_BY_STAGES if staged else ())))
    try:
        yield _checked(job, fields)
    finally:
        if threads is not None:
            sys.modules["torch"].set_num_threads(threads)


_NEEDED = ("shoal.run", "psutil", "safetensors.torch")
_NEEDED_BY_STAGES = ("shoal.parallel.pipeline",)
_NEEDED_BY_SHARDS = ("torch.distributed.fsdp", "torch._dynamo.config")


def _checked(job: "Job | str", fields: Mapping[str, Any]) -> "Job":
    from shoal.job import load_job, with_fields

    built = load_job(job, fields) if isinstance(job, str) else with_fields(job, fields)
    if built.batch_norm == "local":
        raise JobError(
            "batch_norm='local' asks for statistics of each rank's own samples, so this job is another training in "
            "every layout. Verify it with --set batch_norm=global."
        )
    return built


def verify(
    plan: "Plan",
    layout: Layout,
    reference: Path,
    folder: Path,
    *,
    patch: Patch = contextlib.nullcontext,
    quiet: bool = False,
) -> "Report":
    """Train in the layout, and compare with a reference that was recorded.

    Args:
        folder: for what is recorded here.
        patch: entered in every rank before it trains, to plant a mistake.
        quiet: do not show how a rank failed.
    """
    found = folder / "layout"
    outcome = record(plan, replace(layout, compile="none"), found, patch=patch, quiet=quiet)
    problem = failed(outcome, str(layout), f"in {layout}")
    if problem is not None:
        return problem
    return judge(plan, layout, reference, found, folder)


def record(
    plan: "Plan", layout: Layout | str, folder: Path, *, patch: Patch = contextlib.nullcontext, quiet: bool = False
) -> "Outcome":
    """Start the processes of a layout, and let them record what they see."""
    from shoal.verbs.verify.passes import record_layout, record_reference

    work = record_reference if layout == "lone" and isinstance(layout, str) else record_layout
    return _on_ranks(functools.partial(work, plan), layout, folder, patch=patch, quiet=quiet)


def _on_ranks(
    work: Callable[[World, Path], None], layout: Layout | str, folder: Path, *, patch: Patch, quiet: bool
) -> "Outcome":
    from shoal.launch import start
    from shoal.launch.screen import to_stderr

    layout = Layout.parse(layout) if isinstance(layout, str) else layout

    def rank(place: Place) -> int:
        with patch(), World.open(layout, place=place, device="cpu", timeout_min=_LIMIT_MIN) as world:
            work(world, folder)
        return 0

    screen = _say_nothing if quiet else to_stderr
    return start(rank, layout.num_ranks, show="none", screen=screen)


def _say_nothing(_: str) -> None:
    pass


def failed(outcome: "Outcome", layout: str, where: str) -> "Report | None":
    """The report of a training that came to no end; None where it did."""
    from shoal.verbs.verify.report import Report

    if outcome.exit_code == 0:
        return None
    if outcome.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    why = outcome.failures[0].error if outcome.failures else f"exit code {outcome.exit_code}"
    refused = outcome.exit_code == MISTAKE
    words = f"the job is refused {where}: {why}" if refused else f"the training failed {where}: {why}"
    return Report(title=layout, verdict="refused" if refused else "failed", sentence=words)


def judge(plan: "Plan", layout: Layout, reference: Path, found: Path, folder: Path) -> "Report":
    """Compare all trainings; explain the first difference."""
    from shoal.verbs.verify.compare import measure
    from shoal.verbs.verify.coverage import uncovered
    from shoal.verbs.verify.passes import DATA, OWN, RESUMED, SGD
    from shoal.verbs.verify.recording import Recorded
    from shoal.verbs.verify.report import Report, summarise

    twins = {"with SGD": (SGD, SGD), "at the turn of the epoch": (DATA, DATA), "with its optimizer": (OWN, OWN)}
    if plan.steps > 1:
        twins["after a resume"] = (RESUMED, OWN)
    pairs = {name: (Recorded(found / a), Recorded(reference / b)) for name, (a, b) in twins.items()}
    rows = [
        (name, row)
        for name, (ours, theirs) in pairs.items()
        for row in measure(ours, theirs, pairs["with its optimizer"][0] if name == "after a resume" else None)
    ]
    findings, worst = summarise(rows)
    ours, theirs = pairs["with SGD"]
    report = Report(
        title=str(layout),
        verdict="wrong" if findings else "same",
        sentence=f"{layout} trains as one process does.",
        findings=findings,
        worst=worst,
        uncovered=uncovered(layout, theirs, ours, [row for _, row in rows]),
    )
    if findings:
        _explain(report, pairs, plan, layout, folder)
    elif plan.has_real:
        report.numerics = numerics(plan, reference, found)
    return report


def _explain(
    report: "Report", pairs: "Mapping[str, tuple[Recorded, Recorded]]", plan: "Plan", layout: Layout, folder: Path
) -> None:
    from shoal.verbs.verify.diagnose import diagnose

    first = report.findings[0]
    could_tell = first.row.step == 1 and first.row.kind in ("gradients", "loss")
    shares = _shares(plan, layout, folder / "shares") if could_tell and layout.num_data * layout.num_parts > 1 else ()
    ours, theirs = pairs[first.training]
    found = diagnose(first.row, ours, theirs, shares)
    when = f"in step {first.row.step}, {first.training}" if first.row.step else "before the first step"
    report.sentence = f"{when}: {found.sentence}"
    report.ratio, report.cosine = found.ratio, found.cosine


def _shares(plan: "Plan", layout: Layout, folder: Path) -> "Sequence[Share]":
    """What each part of the batch says alone; nothing where that cannot be computed."""
    from shoal.verbs.verify.shares import read_shares, write_shares
    from shoal.verbs.verify.variant import variant

    def work(world: World, folder: Path) -> None:
        write_shares(variant(plan.job, precision="fp64", sgd=True), world, folder, layout)

    outcome = _on_ranks(work, "lone", folder, patch=contextlib.nullcontext, quiet=True)
    return read_shares(folder) if outcome.exit_code == 0 else ()


def numerics(plan: "Plan", reference: Path, found: Path) -> "Numerics":
    """The job's own precision: errors in multiples of what one ulp in the weights does to one process."""
    import torch

    from shoal.step import DTYPES
    from shoal.verbs.verify.compare import measure
    from shoal.verbs.verify.passes import NUDGED, REAL
    from shoal.verbs.verify.recording import Recorded
    from shoal.verbs.verify.report import Numerics, noise_ratio

    theirs = Recorded(reference / REAL)
    noise = [measure(Recorded(reference / name), theirs) for name in NUDGED]
    rows = measure(Recorded(found / REAL), theirs)
    ratio, what = noise_ratio(rows, noise, torch.finfo(DTYPES[plan.job.precision]).eps)
    return Numerics(precision=plan.job.precision, ratio=ratio, what=what)


def _name(job: "Job | str") -> str:
    return job if isinstance(job, str) else type(job).__name__
