"""What a run tells: every step is timed, logged ones are read, reduced over ranks, written and shown by rank 0."""

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.data import RankBatch
from shoal.job import Job
from shoal.metrics.clock import StepClock
from shoal.metrics.curve import can_draw_braille, draw_curve
from shoal.metrics.definitions import mfu
from shoal.metrics.events import EventWriter, read_events, set_aside
from shoal.metrics.flops import CONVENTION, FlopCount, count_flops
from shoal.metrics.memory import peak_memory_gib
from shoal.metrics.peak import Peak, device_peak
from shoal.metrics.progress import Progress
from shoal.metrics.reduce import combine
from shoal.metrics.utilisation import open_meter
from shoal.step import StepResult
from shoal.units import show_count
from shoal.world import World

_MAX_PROBES = 4
_RANK_KEYS = (
    "perf/step_time_s",
    "perf/samples_per_s",
    "perf/data_wait",
    "perf/data_wait_mean",
    "perf/device_utilisation",
    "perf/model_flops",
    "mem/peak_gib",
)
_TIMED = ("step_time_s", "samples_per_s", "tokens_per_s", "data_wait", "data_wait_mean", "model_flops_per_s", "mfu")


class Recorder:
    """Measures and tells. Its methods are called on every rank; rank 0 alone writes and speaks.

    Args:
        folder: where metrics.jsonl goes; None writes none.
        log_every: steps between logged ones; by default 1 up to 50 steps, then 10.
        tokens: of a sample, where samples are rows of token ids.
        quiet: say nothing at all (tests, benchmarks).
    """

    def __init__(
        self,
        job: Job,
        world: World,
        *,
        folder: Path | None = None,
        log_every: int | None = None,
        tokens: int | None = None,
        tensorboard: bool = False,
        quiet: bool = False,
        flops_scale: float = 1.0,
    ) -> None:
        self._job, self._world, self._folder = job, world, folder
        self._log_every = log_every or (1 if job.steps <= 50 else 10)
        self._tokens, self._tensorboard = tokens, tensorboard
        self._speaks = world.rank == 0 and not quiet
        self._is_heard = folder is not None or not quiet  # equal on every rank
        self._clock = StepClock()
        self._meter = open_meter(world.device, torch.get_num_threads())
        self._flops: FlopCount | None = None
        self._flops_scale = flops_scale
        self._flops_per_sample = 0.0
        self._num_global = 0
        self._peak: Peak | None = None
        # Replicas in threads share those of the process, of which the peak is; where there are fewer, each has one.
        threads = world.layout.threads
        self._num_devices = world.size * (threads if torch.get_num_threads() < threads else 1)
        self._probes = 0
        self._counted = torch.zeros((), dtype=torch.float64, device=world.device)
        self._samples = 0  # of all ranks, as long as `_counted`
        self._first: int | None = None  # the first step of this process
        self.notes: list[str] = []  # everything that was said
        self._early: list[str] = []  # what is said before the display exists
        self._progress: Progress | None = None
        self._closed = False
        self._is_counted = True  # the last step
        self.leaves_out = False  # the time of steps that are not as usual, such as traced ones
        self._events: EventWriter | None = None

    @property
    def model_flops(self) -> float:
        """What this rank computed of the model in its first step; added up over ranks they are those of the step."""
        assert self._flops is not None, "a step has run"
        return self._flops.model * self._flops_scale

    @property
    def has_run(self) -> bool:
        """Whether a step was taken since the start of this process."""
        return self._flops is not None

    def start(self, step: int) -> None:
        """Begin at a step: 0, or that of the checkpoint; later lines of metrics.jsonl are cut."""
        if self._world.rank == 0 and self._folder is not None:
            is_new = step == 0 and self._world.place.generation == 0
            if is_new and (place := set_aside(self._folder / "metrics.jsonl")) is not None:
                self.note(f"kept    the metrics of an earlier run in this folder: {place}")
            self._events = EventWriter(
                self._folder / "metrics.jsonl", resume_step=step or None, tensorboard=self._tensorboard
            )
        if self._speaks:
            self._progress = Progress(self._job.steps, start_step=step)
            for text in self._early:
                self._progress.note(text)

    def waiting_for_data(self) -> contextlib.AbstractContextManager[None]:
        """Around fetching the next batch."""
        return self._clock.paused() if self.leaves_out else self._clock.waiting()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Around work that belongs to no step."""
        return self._clock.paused()

    @contextlib.contextmanager
    def step(self, batch: RankBatch) -> Iterator[None]:
        """Around one step; the first one is counted in FLOPs."""
        self._is_counted = not self.leaves_out
        with contextlib.nullcontext() if self._is_counted else self._clock.paused():
            if self._flops is None:
                with count_flops() as self._flops:
                    yield
                self._num_global = batch.num_global
            else:
                yield
        if self._is_counted:
            self._clock.end_step(samples=batch.num_samples)

    def log(self, result: StepResult) -> None:
        """Take a step's result; read, reduce, write and show it where it is due."""
        if self._is_counted:
            self._counted += result.count
            self._samples += result.num_samples
        first = self._first is None
        self._first = result.step if self._first is None else self._first
        ends = result.step >= self._job.steps or result.stop
        if not (first or ends or result.step % self._log_every == 0):
            return
        values = self._figures(result)
        if self._events is not None:
            self._events.write(result.step, values)
        if self._progress is not None:
            self._progress.update(result.step, values)
        over = (values["perf/mfu"] or 0.0) > 1.0 and self._probes < _MAX_PROBES
        if self._is_heard and (first or over) and not ends:
            self._find_peak()

    def _figures(self, result: StepResult) -> dict[str, float | None]:
        interval = self._clock.take()
        own = {
            "perf/step_time_s": interval.step_time_s,
            "perf/samples_per_s": interval.per_second(interval.samples),
            "perf/data_wait": interval.data_wait,
            "perf/data_wait_mean": interval.data_wait,
            "perf/device_utilisation": self._meter.read(),
            "perf/model_flops": self.model_flops,
            "mem/peak_gib": peak_memory_gib(self._world.device),
        }
        rows = self._world.gather_floats([math.nan if own[key] is None else own[key] for key in _RANK_KEYS])  # type: ignore[misc]
        named = [{k: None if math.isnan(v) else v for k, v in zip(_RANK_KEYS, row, strict=True)} for row in rows]
        mesh = self._world.mesh
        values = combine(named, [mesh.data_rank(rank) for rank in range(len(rows))])
        flops_per_sample = (values.pop("perf/model_flops") or 0.0) / max(self._num_global, 1)
        counted, self._counted = float(self._counted), torch.zeros_like(self._counted)
        samples, self._samples = self._samples, 0
        if self._tokens is not None:
            # A loss over tokens counts those that it learned from; one over whole samples counts samples.
            tokens = samples * self._tokens if counted == samples else counted
            values["perf/tokens_per_s"] = interval.per_second(tokens)
        values["perf/model_flops_per_s"] = rate = flops_per_sample * (values["perf/samples_per_s"] or 0.0)
        peak = self._peak.flops if self._peak else None
        values["perf/mfu"] = mfu(rate, 1.0, self._num_devices, peak)
        if not interval.steps:  # all of them were left out
            values |= {key: None for name in _TIMED if (key := f"perf/{name}") in values}
        return {
            "train/loss": float(result.loss),
            "train/grad_norm": float(result.grad_norm),
            "train/lr": result.lr,
            **values,
        }

    def _find_peak(self) -> None:
        """After the first step: all ranks probe at the same time, as they compute at the same time.

        On a busy machine a probe may find too little, and a share of peak above 1 tells so; then it is tried again.
        """
        self._probes += 1
        with self._clock.paused():
            own = device_peak(self._world.device, self._job.precision)
        rows = self._world.gather_floats([own.flops if own else math.nan, self.model_flops])
        best = max((row[0] for row in rows if not math.isnan(row[0])), default=None)
        if own is None or best is None:
            self._peak = None
        elif self._peak is None or best > self._peak.flops:
            self._peak = replace(own, flops=best)
        if self._probes == 1:
            self._explain(sum(row[1] for row in rows))

    def _explain(self, flops: float) -> None:
        if not flops:
            return
        self.note(f"flops   {show_count(flops)}FLOP in step {self._first}: {CONVENTION}")
        self.note(f"mfu     against {self._num_devices} x {self._peak or 'n/a (no peak is known for this device)'}")
        uncounted = self._flops.uncounted if self._flops else set()
        if uncounted:
            self.note(f"flops   not counted, no formula: {', '.join(sorted(uncounted)[:5])}")

    def log_evaluation(self, step: int, figures: Mapping[str, Tensor]) -> None:
        """Write and show what an evaluation found; only numbers, a table of counts stays with the caller."""
        values = {f"eval/{name}": float(figure) for name, figure in figures.items() if figure.numel() == 1}
        if self._events is not None:
            self._events.write(step, values)
        if values:
            self.note("eval    " + "  ".join(f"{n.removeprefix('eval/')} {v:.4g}" for n, v in values.items()))

    def note(self, text: str) -> None:
        """A line for the person who watches."""
        self.notes.append(text)
        if self._progress is not None:
            self._progress.note(text)
        elif self._speaks and not self._closed:
            self._early.append(text)
        elif self._speaks:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def picture(self) -> None:
        """The loss of the whole run as a small picture."""
        if not self._speaks or self._folder is None:
            return
        events = read_events(self._folder / "metrics.jsonl")
        points = [(e["step"], e["train/loss"]) for e in events if "train/loss" in e]
        plain = not can_draw_braille(sys.stdout.encoding)
        if len(points) > 1:
            self.note(draw_curve([float(x or 0) for x, _ in points], [y for _, y in points], plain=plain))

    def close(self) -> None:
        """End the display and the files."""
        self._closed = True
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if self._events is not None:
            self._events.close()
