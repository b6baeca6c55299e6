"""Where the processes of `shoal train` come from: a launcher that is there already, or this machine."""

import contextlib
import dataclasses
import functools
import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import CheckpointError, LaunchError, ShoalError, WorldError
from shoal.folder import is_in_use, missing, new_folder, newest_folder
from shoal.layout import Layout, check_world
from shoal.settings import Settings, TrainSettings, resolve, with_preset
from shoal.world import Place, before_torch

if TYPE_CHECKING:
    from shoal.job import Job
    from shoal.launch.again import Terms
    from shoal.launch.nodes import Nodes

MISTAKE = 2  # of the user's: the message says what to do
STOPPED = 143  # 128 + SIGTERM: ended on request, with a checkpoint of the last step
INTERRUPTED = 130  # Ctrl-C


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training left: its folder, and the last figures of metrics.jsonl (loss, evaluation, speed)."""

    exit_code: int
    folder: Path
    figures: Mapping[str, float | None] = field(default_factory=dict)
    error: str = ""  # of the rank that failed first
    speaks: bool = True  # False in the processes of a launcher that are not rank 0


def train(job: "Job | str", layout: Layout | str | None = None, **settings: Any) -> Trained:
    """Train a job from a script, a notebook or `python -c`: on this machine, or in the world of a launcher.

    Args:
        job: a Job, or its name as on the command line.
        layout: by default data parallelism over the processes there are: one, without a launcher.
        settings: as the flags of `shoal train`: steps, run, resume, save_every, log_every, keep, device, threads,
            timeout_min, tensorboard, trace, set={"lr": "3e-4"}.

    Raises:
        ShoalError: what a person can mend, before any process starts.
        LaunchError: a process failed; the reason was shown.
        KeyboardInterrupt: Ctrl-C; every process has ended.
    """
    before_torch()
    told = None if layout is None else str(layout)
    done = command(job, resolve(TrainSettings, flags={"layout": told, **settings}))
    if done.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if done.exit_code not in (0, STOPPED):
        raise LaunchError(f"the training failed (exit code {done.exit_code}), first {done.error}")
    return done


def command(
    job: "Job | str",
    settings: Settings[TrainSettings],
    *,
    quiet: bool = False,
    fresh: bool | None = None,
    nodes: "Nodes | None" = None,
) -> Trained:
    """`shoal train`: join the world that a launcher made, or make one here.

    Args:
        quiet: show nothing but failures.
        fresh: start new interpreters instead of forks; by default where the device is a GPU.
        nodes: the machines that start together, each with this command.
    """
    if settings.values.preset is not None:
        from shoal.job import preset_of

        settings = with_preset(settings, preset_of(job, settings.values.preset))
    place = Place.find()
    joins = (place.size > 1 or place.source == "torchrun") and not _is_parent(place, nodes, settings.values)
    if joins and nodes is not None:
        raise WorldError(f"{place.source} has started the processes already, on all nodes: leave --nnodes out.")
    if joins and (settings.values.max_restarts or settings.values.elastic):
        raise WorldError(
            f"{place.source} has started the processes, and only it can start them again: leave --max-restarts and "
            "--elastic out here, give its own, and --resume auto."
        )
    layout, origin = _layout(settings, place if joins else None, _spelled(job), nodes)
    layout.require_available()
    settings = replace(
        settings,
        values=settings.values.model_copy(update={"layout": str(layout)}),
        origin={**settings.origin, "layout": origin},
    )
    _check_resume(settings.values)
    terms = _terms(layout, settings.values)
    run_folder, is_refused = _RunFolder(job, settings.values), False
    try:
        if not joins and (layout.num_ranks > 1 or terms.may_restart):
            done = _start(job, settings, run_folder.choose, quiet=quiet, fresh=fresh, nodes=nodes, terms=terms)
            is_refused = done.exit_code == MISTAKE
            return done
        with _ended_by_sigterm():
            from shoal.launch.warm import import_needed

            import_needed(also=("shoal.run",))
            from shoal.verbs.train.rank import build, train_here

            built = build(job, settings.values)
        code, folder = train_here(place, built, settings, run_folder.choose, quiet=quiet, named=_named(job))
        return _done(code, folder, speaks=place.rank == 0)
    except ShoalError:
        is_refused = True
        raise
    finally:
        run_folder.leave(is_refused=is_refused)


def _start(
    job: "Job | str",
    settings: Settings[TrainSettings],
    choose_folder: Callable[[], Path],
    *,
    quiet: bool,
    fresh: bool | None,
    nodes: "Nodes | None",
    terms: "Terms",
) -> Trained:
    """Make the world here. What can be wrong with the job is found in this process, before there are others."""
    from shoal.launch import start
    from shoal.launch.incident import INCIDENTS
    from shoal.launch.machine import has_accelerator
    from shoal.launch.outcome import forget_failure, keep_failure

    values = settings.values
    if fresh is None:
        fresh = (values.device or "cuda").startswith("cuda") and has_accelerator()
    with _ended_by_sigterm(), _one_thread(values.layout):
        from shoal.verbs.train.rank import build, started

        built = build(job, values)
        told = _by_name(job, built, values) if fresh else built
        is_first = nodes is None or nodes.rank == 0  # the folder is that of rank 0, wherever its file system is
        folder = choose_folder() if is_first else Path("runs")
        num_ranks = Layout.parse(values.layout).num_ranks
        began = time.time()
        is_ours = is_first and not is_in_use(folder)  # else it will be refused, and what lies there is another's
        if is_ours:
            forget_failure(folder)
        outcome = start(
            functools.partial(
                started,
                job=told,
                values=values.model_dump(exclude_unset=True),
                origin=dict(settings.origin),
                folder=str(folder),
                quiet=quiet,
                named=_named(job),
            ),
            num_ranks if nodes is None else values.nproc_per_node or num_ranks // nodes.num,
            threads=values.threads,
            log_dir=folder / "logs" if is_first else None,
            show="none" if quiet else "rank0",
            fresh=fresh,
            nodes=nodes,
            alike=_code_of(job),
            incidents=folder / INCIDENTS,
            terms=terms,
            keeps_memory=terms.may_restart and values.memory_copies != "off",
            claim=_claim if nodes is not None and terms.is_elastic else None,
            folder=str(folder) if is_first or values.run is not None else "",
        )
    if is_ours:
        keep_failure(folder, outcome, began)
    error = f"rank {outcome.failures[0].rank}: {outcome.failures[0].error}" if outcome.failures else ""
    return replace(_done(outcome.exit_code, folder), error=error)


def _is_parent(place: Place, nodes: "Nodes | None", values: TrainSettings) -> bool:
    """Whether a launcher (srun, a Kubernetes operator) has started one process per machine, to start its ranks."""
    if nodes is None:
        return place.size == 1 and (values.nproc_per_node or 1) > 1
    return (place.size, place.rank) == (nodes.num, nodes.rank)


def _claim(folder: str, number: int) -> int:
    """A number in the folder of a run, for the machine that leads it from now on."""
    from shoal.checkpoint.fence import Fence
    from shoal.folder import RunFolder

    of_run = RunFolder(Path(folder))
    of_run.make()
    return Fence.claim(of_run.checkpoints, number).number


def _terms(layout: Layout, values: TrainSettings) -> "Terms":
    """When ranks are started again, and with how few."""
    from shoal.launch.again import Terms, elastic

    least, most = elastic(values.elastic, layout.dp) if values.elastic is not None else (0, 0)
    replica = layout.num_ranks // layout.dp
    return Terms(max_restarts=values.max_restarts, replica=replica, least=least, most=most)


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGUSR1, on the paths that Ctrl-C takes."""


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Where no rank hears them, both end this process with a line; a handler of the caller's own stays."""

    def end(number: int, _: object) -> None:
        raise _Terminated(signal.Signals(number).name)

    is_ours = threading.current_thread() is threading.main_thread()
    ours = [n for n in (signal.SIGTERM, signal.SIGUSR1) if is_ours and signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    except _Terminated as told:
        sys.stderr.write(f"{told}: ended; no rank was running.\n")
        raise SystemExit(STOPPED) from None
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _one_thread(layout: str) -> Iterator[None]:
    """This process can fork ranks; afterwards it has its threads back, since a notebook goes on."""
    from shoal.launch import warm_up
    from shoal.launch.machine import default_threads

    loaded = sys.modules.get("torch")
    before = loaded.get_num_threads() if loaded else default_threads(1)
    # fully_shard drags the compiler in, a second that every rank would pay by itself.
    sharded = ("torch.distributed.fsdp", "torch._dynamo.config") if Layout.parse(layout).fsdp > 1 else ()
    warm_up(also=("shoal.run", "psutil", *sharded))
    try:
        yield
    finally:
        sys.modules["torch"].set_num_threads(before)


def _code_of(job: "Job | str") -> dict[str, str]:
    """The job's file, by name: it must be the same on every machine."""
    path = job.rpartition(":")[0] or job if isinstance(job, str) else ""
    return {Path(path).name: path} if path.endswith(".py") else {}


def _layout(
    settings: Settings[TrainSettings], there: Place | None, job: str, nodes: "Nodes | None"
) -> tuple[Layout, str]:
    """The layout that runs, and who said so; without one, data parallelism over the processes there are."""
    values, origin = settings.values, settings.origin
    if nodes is not None:
        layout = Layout(dp=nodes.num * (values.nproc_per_node or 1))
        layout = layout if origin["layout"] == "default" else Layout.parse(values.layout)
        if layout.num_ranks % nodes.num and values.nproc_per_node is None:
            raise WorldError(
                f"{layout} has {layout.num_ranks} ranks on {nodes.num} nodes: say on each how many it starts, "
                "--nproc-per-node."
            )
        return layout, origin["layout"]
    if there is not None and values.nproc_per_node not in (None, there.local_size):
        raise WorldError(
            f"{origin['nproc_per_node']} says {values.nproc_per_node} processes, but {there.source} has started "
            f"{there.local_size} on this node already. Leave it out."
        )
    size = there.size if there is not None else values.nproc_per_node
    if origin["layout"] == "default":
        who = f"{there.source}, {there.size} processes" if there is not None else origin["nproc_per_node"]
        return Layout(dp=size or 1), who
    layout = Layout.parse(values.layout)
    if size is not None:
        check_world(layout, size, job)
    return layout, origin["layout"]


def _check_resume(values: TrainSettings) -> None:
    if values.resume not in ("auto", "never") and not Path(values.resume).is_dir():
        raise CheckpointError(
            f"--resume {values.resume}: it is auto, never, or the folder of a run; there is no such folder."
        )


def _spelled(job: "Job | str") -> str:
    return job if isinstance(job, str) else "job.py"


def _named(job: "Job | str") -> str:
    """As on the command line; empty for an object."""
    return job if isinstance(job, str) else ""


def _name(job: "Job | str") -> str:
    """`digits`, `jobs/mine.py` -> mine, `jobs/mine.py:Big` -> big: the name of the run's folder."""
    if not isinstance(job, str):
        return type(job).__name__.lower()
    place, _, name = job.partition(":")
    return name.lower() or Path(place).stem


class _RunFolder:
    """How the run's folder is chosen; what was made for it goes again where it holds nothing that is worth a name."""

    def __init__(self, job: "Job | str", values: TrainSettings) -> None:
        self._job, self._values = job, values
        self._path: Path | None = None
        self._made: list[Path] = []

    def choose(self) -> Path:
        """Make it, or find it."""
        self._path, new = _choose_folder(self._job, self._values)
        self._made = [self._path / "logs", *new] if new else []
        return self._path

    def leave(self, *, is_refused: bool) -> None:
        """At the end; of a run that was refused before it logged a step, its notes go too."""
        if is_refused and self._path in self._made and not (_holds_steps(self._path) or is_in_use(self._path)):
            shutil.rmtree(self._path, ignore_errors=True)
        for folder in self._made:
            with contextlib.suppress(OSError):  # something is in it, or it is gone
                folder.rmdir()


def _holds_steps(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or any(folder.glob("checkpoints/step_*"))


def _choose_folder(job: "Job | str", values: TrainSettings) -> tuple[Path, list[Path]]:
    """The run's folder, made where it is new, and all that was made, the innermost first."""
    base = Path("runs") / _name(job)
    try:
        if values.run is not None:
            path, made = Path(values.run), missing(Path(values.run))
            path.mkdir(parents=True, exist_ok=True)
            return path, made
        found = newest_folder(base) if values.resume == "auto" else None
        if found is not None:
            return found, []
        made = missing(base.parent)
        path = new_folder(base)
        return path, [path, *made]
    except OSError as error:
        raise CheckpointError(
            f"the run folder {values.run or base} cannot be made: {error.strerror}. Choose another: --run DIR"
        ) from error


def _by_name(job: "Job | str", built: "Job", values: TrainSettings) -> dict[str, Any]:
    """How a fresh process, which shares no memory with this one, makes the same job again.

    Raises:
        LaunchError: it cannot, and why.
    """
    from shoal.errors import JobError
    from shoal.verbs.train.rank import fields_of, rebuild

    if isinstance(job, str):
        return {"name": job, "fields": fields_of(values)}
    cls = type(built)
    fields = {f.name: getattr(built, f.name) for f in dataclasses.fields(built) if f.init}
    why = ""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        why = f"{cls.__qualname__} is defined in {cls.__module__}, in a function or in a notebook"
    else:
        told = {"name": f"{cls.__module__}:{cls.__qualname__}", "fields": fields}
        try:
            copy: dict[str, Any] = json.loads(json.dumps(told))
            if rebuild(copy) == built:
                return copy
            why = "rebuilt from its fields it is another one"
        except (TypeError, ValueError, JobError) as error:
            why = str(error)
    raise LaunchError(
        f"on a GPU each process is a new interpreter, which imports the job by name, and this one cannot be: {why}. "
        f"Put it in a file and name that: shoal.train('jobs/mine.py:{cls.__name__}', ...)"
    )


def _done(exit_code: int, folder: Path, *, speaks: bool = True) -> Trained:
    from shoal.metrics.events import read_events

    events = read_events(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    last = {key: value for event in events for key, value in event.items()}
    return Trained(exit_code=exit_code, folder=folder, figures=last, speaks=speaks)
