"""One process of `shoal train`: open the world, enter the run's folder, walk the loop."""

import contextlib
import json
import signal
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import torch

from shoal.errors import JobError
from shoal.job import Job, load_job, with_fields
from shoal.layout import Layout
from shoal.settings import Settings, TrainSettings, of_host
from shoal.verbs.train.loop import run_job
from shoal.world import Place, World, host_names


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
    layout = _filling(settings, place)
    settings = replace(settings, values=settings.values.model_copy(update={"layout": str(layout)}))
    values = settings.values
    threads_before = torch.get_num_threads()
    torch.set_num_threads(values.threads or threads_before)
    try:
        with World.open(layout, place=place, device=values.device, timeout_min=values.timeout_min) as world:
            _check_hosts(values, world)
            folder = Path(world.decide(lambda: place.folder or str(choose_folder())))
            if world.rank == 0 and not quiet and not place.generation:
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
                memory_copies=_every(values.memory_copies),
                quiet=quiet,
                apart=_apart(job, values),
            )
    except SystemExit as stop:
        raise JobError(f"the job's own code called sys.exit({stop.code}), and so ended the training.") from stop
    finally:
        torch.set_num_threads(threads_before)
    return (143 if run.stopped else 0), folder


def _filling(settings: Settings[TrainSettings], place: Place) -> Layout:
    """The layout, with as many data replicas as there are ranks for where that was left open.

    A generation may be smaller than the first; and without a layout, no machine knows how many ranks others start.
    """
    layout = Layout.parse(settings.values.layout)
    is_open = settings.values.elastic is not None or settings.origin["layout"] == "default"
    if place.source != "shoal" or place.size == layout.num_ranks or not is_open:
        return layout
    layout = replace(layout, dp=place.size * layout.dp // layout.num_ranks)
    return replace(layout, zero=None) if layout.num_data == 1 else layout


def _every(memory_copies: str) -> int | None:
    """Steps between copies: None for none, 0 for as many as are cheap."""
    return None if memory_copies == "off" else 0 if memory_copies == "auto" else int(memory_copies)


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
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process; the parent passes it on as SIGTERM
    settings = Settings(values=TrainSettings(**values), origin=origin)
    built = job if isinstance(job, Job) else rebuild(job)
    return train_here(place, built, settings, lambda: Path(folder), quiet=quiet, named=named)[0]


def build(job: Job | str, values: TrainSettings) -> Job:
    """The job with the fields that were set."""
    told = fields_of(values)
    return load_job(job, told) if isinstance(job, str) else with_fields(job, told)


def fields_of(values: TrainSettings) -> dict[str, Any]:
    """What was said of the job: `--set`, with what holds on this host, and `--steps` over it.

    Raises:
        JobError: a value of this host alone that is no path here.
    """
    here = of_host(values.set, host_names())
    for key in values.set:
        name, _, host = key.partition("@")
        if host in host_names() and not Path(here[name]).exists():
            raise JobError(
                f"--set {key}={here[name]}: there is no such path on this host ({host}). What a host has of its own is "
                "the place of its data; every other value is one for all, or the ranks would train different things."
            )
    return {**here, **({} if values.steps is None else {"steps": values.steps})}


def _apart(job: Job, values: TrainSettings) -> dict[str, Any]:
    """The fields that hosts have of their own, with what holds where no host is named."""
    defaults = {f.name: f.default for f in fields(job)}
    found = {}
    for name in {key.partition("@")[0] for key in values.set if "@" in key}:
        told = values.set.get(name, defaults.get(name))
        found[name] = "each host's own" if told is MISSING else str(told)
    return found


def _check_hosts(values: TrainSettings, world: World) -> None:
    """Whoever is named in `--set field@host` takes part."""
    named = sorted({key.partition("@")[2] for key in values.set if "@" in key})
    rows = [json.loads(row) for row in world.gather_text(json.dumps([named, host_names()]))]
    hosts = list(dict.fromkeys(name for _, names in rows for name in names))
    if missing := [name for told, _ in rows for name in told if name not in hosts]:
        there = ", ".join(hosts)
        raise JobError(f"--set ...@{missing[0]}=...: no rank runs on a host of that name; they run on {there}.")


def rebuild(told: dict[str, Any]) -> Job:
    """A job from its name and fields."""
    return load_job(told["name"], told["fields"])
