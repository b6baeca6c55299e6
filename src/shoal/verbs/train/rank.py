"""One process of `shoal train`: open the world, enter the run's folder, walk the loop."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.errors import JobError
from shoal.job import Job, load_job, with_fields
from shoal.settings import Settings, TrainSettings
from shoal.verbs.train.loop import run_job
from shoal.world import Place, World


def train_here(
    place: Place,
    job: Job,
    settings: Settings[TrainSettings],
    choose_folder: Callable[[], Path],
    *,
    quiet: bool,
    named: str = "",
) -> tuple[int, Path]:
    """The exit code and the folder, which rank 0 chooses for all; `named`: the job, as on the command line."""
    values = settings.values
    threads_before = torch.get_num_threads()
    torch.set_num_threads(values.threads or threads_before)
    try:
        with World.open(values.layout, place=place, device=values.device, timeout_min=values.timeout_min) as world:
            folder = Path(world.decide(lambda: str(choose_folder())))
            if world.rank == 0 and not quiet:
                with contextlib.suppress(OSError):  # a terminal that has gone, or is full, ends no training
                    print(settings.table(), flush=True)
            run = run_job(
                job,
                world,
                folder=folder,
                facts={"settings": settings.rows(), "command": named},
                trace=values.trace,
                resume=values.resume,
                save_every=values.save_every,
                log_every=values.log_every,
                keep=values.keep,
                tensorboard=values.tensorboard,
                weights=values.weights,
                quiet=quiet,
            )
    except SystemExit as stop:
        raise JobError(f"the job's own code called sys.exit({stop.code}), and so ended the training.") from stop
    finally:
        torch.set_num_threads(threads_before)
    return (143 if run.stopped else 0), folder


def started(
    place: Place,
    *,
    job: Job | dict[str, Any],
    values: dict[str, Any],
    origin: dict[str, str],
    folder: str,
    quiet: bool,
    named: str = "",
) -> int:
    """A process that this machine's `start` made: forked, with the job itself, or fresh, with the name of it."""
    settings = Settings(values=TrainSettings(**values), origin=origin)
    built = job if isinstance(job, Job) else rebuild(job)
    return train_here(place, built, settings, lambda: Path(folder), quiet=quiet, named=named)[0]


def build(job: Job | str, values: TrainSettings) -> Job:
    """The job with the fields that were set."""
    fields = fields_of(values)
    return load_job(job, fields) if isinstance(job, str) else with_fields(job, fields)


def fields_of(values: TrainSettings) -> dict[str, Any]:
    """What was said of the job: `--set`, and `--steps` over it."""
    return {**values.set, **({} if values.steps is None else {"steps": values.steps})}


def rebuild(told: dict[str, Any]) -> Job:
    """A job from its name and fields."""
    return load_job(told["name"], told["fields"])
