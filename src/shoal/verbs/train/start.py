"""Where the processes of `shoal train` come from: a launcher that is there already, or this machine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import LaunchError
from shoal.folder import new_folder, newest_folder
from shoal.layout import Layout, check_world
from shoal.settings import Settings, TrainSettings, resolve
from shoal.world import Place, World

if TYPE_CHECKING:
    from shoal.job import Job

STOPPED = 143  # 128 + SIGTERM: ended on request, with a checkpoint of the last step


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training left: its folder, and the last figures of metrics.jsonl (loss, evaluation, speed)."""

    exit_code: int
    folder: Path
    figures: Mapping[str, float | None] = field(default_factory=dict)
    speaks: bool = True  # False in the processes of a launcher that are not rank 0


def train(job: "Job | str", layout: str = "lone", **settings: Any) -> Trained:
    """Train a job on this machine, from a script, a notebook or `python -c`.

    Args:
        job: a Job, or its name as on the command line.
        settings: as the flags of `shoal train`: steps, run, resume, save_every, log_every, keep, device, threads,
            timeout_min, tensorboard, set={"lr": "3e-4"}.

    Raises:
        ShoalError: what a person can mend, before any process starts.
        LaunchError: a process failed; the reason was shown.
    """
    done = command(job, resolve(TrainSettings, flags={"layout": layout, **settings}))
    if done.exit_code not in (0, STOPPED):
        raise LaunchError(f"the training failed (exit code {done.exit_code}); the reason stands above.")
    return done


def command(job: "Job | str", settings: Settings[TrainSettings], *, quiet: bool = False) -> Trained:
    """`shoal train`: join the world that a launcher made, or make one here."""
    place = Place.find()
    layout = _layout(settings, place)
    start = _Start(job, layout=layout, settings=settings, quiet=quiet)
    if place.size > 1:
        check_world(layout, place.size, start.name)
        code, folder = start.run_here(place, lambda: str(start.folder()))
        return _done(code, folder, speaks=place.rank == 0)
    folder = start.folder()
    if layout.num_ranks == 1:
        return _done(start.run_here(place, lambda: str(folder))[0], folder)
    from shoal.launch import start as start_ranks
    from shoal.launch import warm_up

    warm_up()
    import shoal.run  # noqa: F401  (once here, instead of once in every process)

    outcome = start_ranks(
        lambda place: start.run_here(place, lambda: str(folder))[0],
        layout.num_ranks,
        threads=settings.values.threads,
        log_dir=folder / "logs",
    )
    return _done(outcome.exit_code, folder)


def _layout(settings: Settings[TrainSettings], place: Place) -> Layout:
    """The layout asked for; without one, data parallelism over the processes there are."""
    values = settings.values
    num_ranks = place.size if place.size > 1 else values.nproc_per_node or 1
    if settings.origin["layout"] == "default":
        return Layout(dp=num_ranks)
    layout = Layout.parse(values.layout)
    if values.nproc_per_node is not None and place.size == 1:
        check_world(layout, values.nproc_per_node)
    return layout


@dataclass(frozen=True)
class _Start:
    """What is to be trained, and how each process sets about it."""

    job: "Job | str"
    layout: Layout
    settings: Settings[TrainSettings]
    quiet: bool

    @property
    def name(self) -> str:
        """`digits`, `jobs/mine.py` -> mine, `jobs/mine.py:Big` -> big: the name of the run's folder."""
        if not isinstance(self.job, str):
            return type(self.job).__name__.lower()
        place, _, name = self.job.partition(":")
        return name.lower() if name else Path(place).stem

    def folder(self) -> Path:
        """The run's folder, made where it is new."""
        values = self.settings.values
        base = Path("runs") / self.name
        if values.run is not None:
            Path(values.run).mkdir(parents=True, exist_ok=True)
            return Path(values.run)
        found = newest_folder(base) if values.resume == "auto" else None
        return found or new_folder(base)

    def run_here(self, place: Place, choose_folder: Callable[[], str]) -> tuple[int, Path]:
        """One process: open the world, build the job, walk the loop."""
        import torch

        from shoal.verbs.train.loop import run_job

        values = self.settings.values
        if values.threads is not None:
            torch.set_num_threads(values.threads)
        with World.open(self.layout, place=place, device=values.device, timeout_min=values.timeout_min) as world:
            folder = Path(world.decide(choose_folder))
            if world.rank == 0 and not self.quiet:
                print(self.settings.table(), flush=True)
            run = run_job(
                self._build(),
                world,
                folder=folder,
                facts={"settings": self.settings.rows()},
                resume=values.resume,
                save_every=values.save_every,
                log_every=values.log_every,
                keep=values.keep,
                tensorboard=values.tensorboard,
                quiet=self.quiet,
            )
        return (STOPPED if run.stopped else 0), folder

    def _build(self) -> "Job":
        from shoal.job import load_job, with_fields

        values = self.settings.values
        fields = {**values.set, **({} if values.steps is None else {"steps": values.steps})}
        return load_job(self.job, fields) if isinstance(self.job, str) else with_fields(self.job, fields)


def _done(exit_code: int, folder: Path, *, speaks: bool = True) -> Trained:
    from shoal.metrics.events import read_events

    events = read_events(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    last = {key: value for event in events for key, value in event.items()}
    return Trained(exit_code=exit_code, folder=folder, figures=last, speaks=speaks)
