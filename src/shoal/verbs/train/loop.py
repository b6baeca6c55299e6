"""What one process of `shoal train` does. Written with the public pieces alone: copy it when you outgrow it."""

from pathlib import Path
from typing import Any

from shoal.checkpoint import list_checkpoints
from shoal.errors import CheckpointError
from shoal.job import Job
from shoal.run import Run, assemble
from shoal.world import World


def run_job(
    job: Job, world: World, *, folder: Path, facts: dict[str, Any], trace: int | None = None, **options: Any
) -> Run:
    """Train a job on an open world to its last step, or until it is asked to stop.

    Args:
        folder: the run's folder.
        facts: what run.json keeps besides (settings and their origin).
        trace: steps to record.
        options: `resume`, `save_every`, `log_every`, `keep`, `tensorboard`, `quiet` of `assemble`.

    Raises:
        ShoalError: what cannot obey the law, before the first step; a step that is not finite.
        CheckpointError: on rank 0, when all is done but the last checkpoint could not be written.
    """
    run = assemble(job, world, folder=folder, **options)
    try:
        is_done = run.step == run.job.steps
        _say_where_it_begins(run, options.get("resume", "never"))
        run.describe(facts)
        if trace is not None:
            run.trace(trace)
        for step in run.steps():
            result = step()
            run.log(result)
            run.save_if_due()
        figures = run.evaluate() if not run.stopped else {}
        run.conclude(figures)
    finally:
        run.close()
    if not is_done:
        _check_saved(run)
    return run


def _say_where_it_begins(run: Run, resume: str) -> None:
    last = run.job.steps
    if run.step > last:
        raise CheckpointError(
            f"the checkpoint is of step {run.step}, and {last} steps are asked for. Ask for more (--steps), or resume "
            "from an earlier one in a folder of its own."
        )
    if run.step == last:
        run.say(f"nothing left to train: all {last} steps are done")
    elif run.step == 0 and resume == "auto":
        where = run.folder.path if run.folder else "no folder"
        run.say(f"no checkpoint to resume from in {where}: starts at step 0 (a run elsewhere: --run runs/that)")


def _check_saved(run: Run) -> None:
    if run.world.rank != 0 or run.folder is None:
        return
    steps = [found.step for found in list_checkpoints(run.folder.checkpoints)]
    if run.step not in steps:
        raise CheckpointError(
            f"step {run.step} is done, but its checkpoint could not be written to {run.folder.checkpoints}. "
            + (f"The newest there is of step {max(steps)}." if steps else "There is none.")
        )
