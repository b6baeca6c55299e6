"""Records some steps of a run on every rank, and puts them together into one file: see `metrics/trace.py`."""

import contextlib
import errno
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.errors import WorldError
from shoal.metrics.meter import axis_of
from shoal.metrics.profile import MARK, Asked, call_key, events_of
from shoal.metrics.trace import Event, Offset, RoundTrip, clock_offset, merge, rows_of, write_part
from shoal.metrics.watch import Watch
from shoal.parallel.place import placement_of
from shoal.parallel.replicate import native_silence
from shoal.world import World

if TYPE_CHECKING:
    from shoal.run.run import Run

_FIRST_STEP = 3  # of a process: the ones before it are slow
_ROUND_TRIPS = 8


class Tracing:
    """Steps to record. Every method is called on every rank; `told` is what there is to say at the end.

    Args:
        num_steps: from the third of this process on; of a run that is shorter, the last ones.

    Raises:
        WorldError: there is nothing to record, or nowhere to write it to.
    """

    def __init__(self, run: "Run", num_steps: int) -> None:
        if num_steps < 1:
            raise WorldError(f"a trace of {num_steps} steps shows nothing; it takes at least 1.")
        if run.folder is None:
            raise WorldError("a trace is written to the run's folder: assemble(..., folder='runs/mine').")
        if run.world.kind == "fake":
            raise WorldError("a fake world computes nothing that a trace could show.")
        left = run.job.steps - run.step
        first = run.step + max(0, min(_FIRST_STEP - 1 - run._steps_here, left - num_steps))
        self._steps = range(first, min(first + num_steps, run.job.steps))
        self._run, self._world, self._folder = run, run.world, run.folder.path / "trace"
        self._profile: Any = None  # while it records
        self._undo = contextlib.ExitStack()
        self._asked = _Flights(run.world)
        self._spans: list[Event] = []  # of the stages of a pipeline
        self.told = ""

    def mark(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Around a part of a step."""
        return contextlib.nullcontext() if self._profile is None else record_function(MARK + name)

    def before(self, step: int) -> None:
        """Before a step: `step` are done."""
        if self._steps and step == self._steps.start:
            with self._run.recorder.paused():
                self._start()
                self._world.barrier()  # or the first step shows whose profiler took longer to begin
        self._asked.since_ns = time.time_ns()

    def after(self, step: int, *, ends: bool) -> None:
        """After it."""
        if self._profile is None:
            return
        with self._run.recorder.paused():
            self._asked.take()
            pipeline = placement_of(self._run.model).pipeline
            self._spans += map(_of_span, pipeline.spans() if pipeline is not None else ())
            if ends or step == self._steps.stop:
                self._write(range(self._steps.start + 1, step + 1))

    def abandon(self) -> None:
        """The run is over, whether or not what was to be recorded has been."""
        if self._profile is not None:
            self._stop()

    def _start(self) -> None:
        run, watch = self._run, Watch(self._world, around=lambda what, axis: self.mark(f"{what} {axis}"))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._world.device.type == "cuda" else [])]
        # The replicas' threads were there before the profiler, which follows only what is begun under it.
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=self._world.layout.threads > 1)
        with native_silence():
            recorded = profile(activities=activities, record_shapes=True, experimental_config=config)
            recorded.start()
        self._profile = recorded
        self._undo.callback(run.watch, run.watch(self.mark))
        self._undo.enter_context(watch.messages())
        run.recorder.leaves_out = True

    def _stop(self) -> Any:
        recorded, self._profile = self._profile, None
        self._run.recorder.leaves_out = False
        self._undo.close()
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        with native_silence():
            recorded.stop()
        return recorded

    # -- the file ------------------------------------------------------------------------------------------

    def _write(self, steps: range) -> None:
        """What cannot be written is said, and ends no training."""
        recorded = self._stop()
        shown = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        why = self._unwritten(recorded, {"layout": str(self._world.layout), "steps": list(steps)})
        if why:
            self._run.say(f"there is no trace of {shown}: {why} The training goes on.")
        else:
            self.told = f"trace   {shown}: {self._whole} (open it at https://ui.perfetto.dev, or in chrome://tracing)"

    def _unwritten(self, recorded: Any, about: dict[str, Any]) -> str:
        """Each rank writes its part, and rank 0 the whole; collective. Returns why there is none."""
        world, offset, events, problems = self._world, measured_offset(self._world), list[Event](), list[str]()
        with _noted(problems):
            events = self._exported(recorded) + self._spans
        begins_ns = min((event.begin_ns for event in events), default=time.time_ns()) + offset.ns
        told = {"begins_ns": begins_ns, "offset_ns": offset.ns, "uncertainty_ns": offset.uncertainty_ns}
        ranks = [json.loads(text) for text in world.gather_text(json.dumps(told))]
        if not problems:
            zero_ns = min(rank["begins_ns"] for rank in ranks)
            with _noted(problems):
                rows = rows_of(world.rank, _label(world), events, offset=offset, zero_ns=zero_ns)
                write_part(self._part(world.rank), rows)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(world.gather_text("".join(problems))) if text]
        if world.rank == 0 and not failed:
            names = ("offset_ns", "uncertainty_ns")
            clocks = [{"rank": number} | {name: rank[name] for name in names} for number, rank in enumerate(ranks)]
            with _noted(failed):
                merge([self._part(rank) for rank in range(world.size)], self._whole, {**about, "clocks": clocks})
        return failed[0] if failed else ""

    @property
    def _whole(self) -> Path:
        return self._folder / "trace.json.gz"

    def _part(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.json.gz"

    def _exported(self, recorded: Any) -> list[Event]:
        self._folder.mkdir(exist_ok=True)
        whole = self._folder / f"rank_{self._world.rank}.profile.json"
        try:
            with native_silence():
                recorded.export_chrome_trace(str(whole))
            if not whole.exists():  # it raises nothing, and leaves a part of the file under another name
                raise OSError(errno.EIO, "the profiler could not; is the disk full?", str(whole))
            with whole.open(encoding="utf-8") as file:
                return events_of(json.load(file), self._asked.found())
        finally:
            for left in self._folder.glob(f"{whole.name}*"):
                left.unlink()


@contextlib.contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """What a disk refuses becomes a line of text; what was cut short on a full one can be no JSON."""
    try:
        yield
    except OSError as error:
        problems.append(f"{error.filename or 'a file of it'} cannot be written ({error.strerror or error}).")
    except (json.JSONDecodeError, UnicodeDecodeError, EOFError) as error:
        problems.append(f"what was written cannot be read again ({error}). Is the disk full?")


def _of_span(span: tuple[int, str, int, float, float]) -> Event:
    stage, kind, micro, begin_s, end_s = span
    return Event(
        lane="stages",
        name=f"{kind}{micro}",
        begin_ns=round(begin_s * 1e9),
        end_ns=round(end_s * 1e9),
        args={"stage": stage, "action": kind, "micro_batch": micro},
    )


def _label(world: World) -> str:
    """`rank 3  pp1 dp0`."""
    axes = [f"{axis}{world.mesh.coordinate(world.rank, axis)}" for axis, size in world.mesh.axes if size > 1]
    return "  ".join(filter(None, (f"rank {world.rank}", " ".join(axes))))


def measured_offset(world: World) -> Offset:
    """Of this rank's clock to that of rank 0, by messages there and back; collective."""
    group = world.opened.setup_group  # on the host, where clocks are
    if world.kind != "real" or group is None:
        return Offset()
    for rank in range(1, world.size):
        trips = [trip for _ in range(_ROUND_TRIPS) if (trip := _round_trip(world.rank, rank, group)) is not None]
        if rank == world.rank:
            return clock_offset(trips)
    return Offset()


def _round_trip(own: int, other: int, group: dist.ProcessGroup) -> RoundTrip | None:
    message = torch.zeros(2, dtype=torch.int64)
    if own == 0:
        dist.recv(message, other, group)
        message[0] = time.time_ns()
        message[1] = time.time_ns()
        dist.send(message, other, group)
    if own != other:
        return None
    sent_ns = time.time_ns()
    dist.send(message, 0, group)
    dist.recv(message, 0, group)
    returned_ns = time.time_ns()
    arrived_ns, answered_ns = map(int, message)
    return RoundTrip(sent_ns=sent_ns, arrived_ns=arrived_ns, answered_ns=answered_ns, returned_ns=returned_ns)


class _Flights:
    """What groups were asked for, as torch's flight recorder has it, which keeps the last calls of a process."""

    def __init__(self, world: World) -> None:
        self.since_ns = 0
        self._world = world
        self._calls: dict[str, Counter[str]] = {}
        self._is_whole = True

    def take(self) -> None:
        """The calls since then."""
        # Not in every build of torch, and empty where TORCH_FR_BUFFER_SIZE=0: then axes are not told, and no more.
        dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
        if self._world.kind != "real" or dump is None:
            return
        entries = json.loads(dump()).get("entries", [])
        new = [entry for entry in entries if entry["time_created_ns"] >= self.since_ns]
        # It is a ring: where all that it has is new, some of the new may be lost. Setting up has left older ones.
        self._is_whole &= len(new) < len(entries)
        for entry in new:
            calls = self._calls.setdefault(entry["process_group"][0], Counter())
            calls[call_key(entry["profiling_name"], entry["input_sizes"])] += 1

    def found(self) -> Asked:
        """All of them, with the axis of each group."""
        if not self._is_whole:
            return Asked()
        return Asked(axes={name: self._axis(name) for name in self._calls}, calls=self._calls)

    def _axis(self, name: Any) -> str:
        """Of a group by its name, which has a type of its own in some versions of torch; none for one that has gone."""
        try:
            group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]  # not exported
        except RuntimeError:
            return ""
        return axis_of(tuple(dist.get_process_group_ranks(group)), self._world)
