"""What one process of `shoal train` does. Written with the public pieces alone: copy it when you outgrow it."""

from pathlib import Path
from typing import Any

from shoal.job import Job
from shoal.run import Run, assemble
from shoal.world import World


def run_job(job: Job, world: World, *, folder: Path, facts: dict[str, Any], **options: Any) -> Run:
    """Train a job on an open world to its last step, or until it is asked to stop.

    Args:
        folder: the run's folder.
        facts: what run.json keeps besides (settings and their origin).
        options: `resume`, `save_every`, `log_every`, `keep`, `tensorboard`, `quiet` of `assemble`.

    Raises:
        ShoalError: what cannot obey the law, before the first step; a step that is not finite.
    """
    run = assemble(job, world, folder=folder, **options)
    try:
        run.describe(facts)
        for step in run.steps():
            result = step()
            run.log(result)
            run.save_if_due()
        figures = run.evaluate() if not run.stopped else {}
        run.conclude(figures)
    finally:
        run.close()
    return run
