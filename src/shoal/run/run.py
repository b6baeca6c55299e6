"""A job assembled on a world: the iterator that the user's loop walks, and what happens around each step."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.agreement import check_first_step, check_replicas, fingerprints
from shoal.checkpoint import Checkpoint, Writer, identity_difference, read, read_manifest
from shoal.checkpoint.pack import pack
from shoal.checkpoint.state import capture, reading_plan, restore
from shoal.checkpoint.write import versions
from shoal.data import RankBatch, Shared
from shoal.dry import is_dry
from shoal.errors import CheckpointError, WorldError
from shoal.evaluate import evaluate
from shoal.folder import RunFolder
from shoal.history import NAME as HISTORY
from shoal.history import HistoryWriter
from shoal.job import Job, identity
from shoal.metrics.ledger import Ledger
from shoal.metrics.recorder import Recorder
from shoal.parallel.parts import Part, parts_of
from shoal.parallel.place import placement_of
from shoal.parallel.zero import OwnedStates
from shoal.record import Phase, is_pause
from shoal.run.copies import Copies
from shoal.step import Step, StepResult, seed_everything
from shoal.world import World

if TYPE_CHECKING:
    from shoal.run.tracing import Tracing

Around = Callable[[str], contextlib.AbstractContextManager[None]]
_TIMED_STEP = 3  # of a process: the first ones are slow


@dataclass(kw_only=True)
class Run:
    """A job assembled on a world: the state, and the verbs of a loop. Every method is called on every rank."""

    job: Job
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Shared
    evaluation: Shared | None
    ledger: Ledger
    recorder: Recorder
    folder: RunFolder | None = None
    save_every: int | None = None
    step: int = 0  # optimizer steps done
    stopped: bool = False  # asked to end (SIGTERM) before the last step
    _engine: Step = field(repr=False)
    _owned: OwnedStates | None = field(default=None, repr=False)
    _writer: Writer | None = field(default=None, repr=False)
    _saved: int | None = field(default=None, repr=False)
    _steps_here: int = field(default=0, repr=False)  # of this process
    _inside: bool = field(default=False, repr=False)  # of a step: still True after one that raised
    _tracing: "Tracing | None" = field(default=None, repr=False)
    _history: HistoryWriter | None = field(default=None, repr=False)
    _copies: Copies | None = field(default=None, repr=False)
    _apart: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two trainings the same: the job's values, but for those that each host has of its own."""
        return {**identity(self.job), **self._apart}

    def _begin(self, memory_copies: int | None) -> None:
        """The step is known at which this process begins."""
        place = self.world.place
        if memory_copies is not None and place.memory and not is_dry():
            self._copies = Copies(Path(place.memory), self.world, every=memory_copies, say=self.say)
        if self.folder is not None and self._writer is not None and self._writer.fence is not None:
            self._history = HistoryWriter(
                self.folder.path / HISTORY,
                step=self.step,
                generation=self._writer.fence.number,
                samples=self.data.num_samples,
                is_first=place.generation == 0,
            )

    def steps(self) -> Iterator[Callable[[], StepResult]]:
        """The steps that are left; call each one. Ends early, on all ranks together, after SIGTERM."""
        record = self.world.record
        record.loop(self.step)
        with _on_sigterm() as stop_asked:
            batches = self.data.batches(start_step=self.step)
            while self.step < self.job.steps and not self.stopped:
                if self._inside:
                    raise WorldError(
                        f"step {self.step + 1} raised an error that was caught. The other ranks wait in it, or have "
                        "gone on without this one: a run cannot leave a step out. Let the error end the run, and "
                        "resume from its checkpoint; a loss that is not finite is skipped with nonfinite='skip'."
                    )
                if self._tracing is not None:
                    self._tracing.before(self.step)
                with (
                    self.recorder.waiting_for_data(),
                    self._marked("data"),
                    record.phase(Phase.DATA, step=self.step + 1),
                ):
                    batch = next(batches)
                yield lambda batch=batch: self._one(batch, stop_asked.is_set())  # type: ignore[misc]

    def _one(self, batch: RankBatch, stop: bool) -> StepResult:
        first = not self.recorder.has_run and not is_dry()
        self._inside = True
        if first and batch.digest:
            self.world.agree({"the samples of the first global batch of the stream": batch.digest})
        before = fingerprints(self.model) if first else {}
        lrs = self._learning_rates() if first else {}
        with self.recorder.step(batch), self._marked(f"step {batch.step + 1}"):
            result = self._engine(batch, stop=stop)
        self.step = result.step
        self.stopped = result.stop
        if first:
            self._check_first(before, result, lrs)
        self._inside = False
        self._steps_here += 1
        self._keep(batch)
        if self._tracing is not None:
            self._tracing.after(self.step, ends=self.stopped)
        pipeline = placement_of(self.model).pipeline
        if pipeline is not None and self._steps_here == _TIMED_STEP and self.world.kind == "real":
            from shoal.run.schedule import picture_schedule  # what draws, others need not load

            with self.recorder.paused():
                folder = None if self.folder is None else self.folder.path
                self.say(picture_schedule(pipeline, self.world, folder, self.step))
        return result

    def _keep(self, batch: RankBatch) -> None:
        """What outlives this process, of a step that is done."""
        if self._history is not None:
            per_epoch = self.data.steps_per_epoch
            first = batch.sample_ids[0] if per_epoch is None else (self.step - 1) % per_epoch * self.job.batch_size
            self._history.add(step=self.step, epoch=batch.epoch, first=first, count=batch.num_global)
        if self._copies is not None:
            self._reconcile()
            self._copies.after(self.step, self._state)

    def _prepare_saves(self) -> None:
        """After step one the state of the optimizer exists; what cannot be cut or stored is said."""
        state = self._state()
        if self._writer is None or self.save_every is None:  # a save at the end alone has no steps to keep waiting
            pack(state)
        else:
            self._writer.prepare(state)

    def _learning_rates(self) -> dict[int, float]:
        return {id(p): float(group["lr"]) for group in self.optimizer.param_groups for p in group["params"]}

    def _check_first(self, before: dict[str, str], result: StepResult, lrs: dict[int, float]) -> None:
        check_replicas(self.model, self.world, result.step)
        if self.folder is not None:
            self._prepare_saves()
        threads = placement_of(self.model).threads
        if threads is not None and threads.takes_turns:
            self.say(
                "the forward draws random numbers, of which a process has one stream: the replicas run one after the "
                f"other. Side by side: --layout dp{self.world.layout.threads}"
            )
        if result.skipped:
            return
        without = check_first_step(before, self.model, self.optimizer, lrs)
        if without:
            self.say(
                f"{len(without)} trainable parameters got no gradient in this step and stay as they are, as in one "
                f"process: {', '.join(without[:5])}{', ...' if len(without) > 5 else ''}"
            )

    def watch(self, phase: Around) -> Around:
        """From now on, put `phase("compute")` around forward and backward of a step and `phase("update")` around the
        rest of it; returns what was there before."""
        before, self._engine.phase = self._engine.phase, phase
        return before

    def trace(self, num_steps: int) -> None:
        """Record steps that are to come into `trace/trace.json.gz` of the run's folder, one file for all ranks.

        Args:
            num_steps: from the third of this process on; of a run that is shorter, the last ones.

        Raises:
            WorldError: there is nothing to record, or nowhere to write it to.
        """
        from shoal.run.tracing import Tracing  # the profiler, which other runs need not load

        if self._tracing is not None:
            self._tracing.abandon()
        self._tracing = Tracing(self, num_steps)

    def _marked(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._tracing is None else self._tracing.mark(name)

    def log(self, result: StepResult) -> None:
        """Record a step; figures are read and shown on logged steps only, by rank 0."""
        if result.skipped:
            self.say(result.skipped)
        self.recorder.log(result)
        self._tell_of_saves()

    def say(self, text: str) -> None:
        """A line for the person who watches; rank 0 alone speaks."""
        self.recorder.note(text)

    def evaluate(self) -> dict[str, torch.Tensor]:
        """`loss` and the job's metrics over its evaluation data (empty without any), each sample once."""
        if self.evaluation is None:
            return {}
        if self.evaluation.num_samples:
            self.say(f"evaluates {self.evaluation.num_samples} samples")
        with self.world.record.phase(Phase.EVALUATE):
            self._reconcile()
            figures = evaluate(self.job, self.model, self.evaluation, self.world)
        self.recorder.log_evaluation(self.step, figures)
        return figures

    def save_if_due(self) -> None:
        """Save on every `save_every`-th step, and at the end."""
        ends = self.stopped or self.step >= self.job.steps
        if ends or (self.save_every is not None and self.step % self.save_every == 0):
            self.save()

    def save(self) -> None:
        """Write a checkpoint of this step; training goes on while it is written.

        Raises:
            WorldError: the replicas differ, so that there is no one state to save.
        """
        if self.folder is None or self._saved == self.step:
            return
        with self.world.record.phase(Phase.SAVE):
            self._save()

    def _save(self) -> None:
        self._reconcile()
        check_replicas(self.model, self.world, self.step)
        self._saved = self.step
        assert self._writer is not None, "a run with a folder has a writer on every rank"
        with self.recorder.paused():
            self._writer.submit(
                self._state(),
                step=self.step,
                job=self.identity,
                layout=str(self.world.layout),
            )

    def describe(self, facts: Mapping[str, Any] | None = None) -> None:
        """Say what runs, and keep it in run.json: layout, hosts, ledger, job, versions, and `facts`; collective."""
        for line in str(self.ledger).splitlines():
            self.say(line)
        hosts = self.world.hosts()
        if self.folder is not None and self.world.rank == 0:
            self.folder.describe(
                {
                    "job": {**self.identity, "steps": self.job.steps},
                    "layout": str(self.world.layout),
                    "world": {
                        "size": self.world.size,
                        "backend": self.world.backend,
                        "device": str(self.world.device),
                        "hosts": [{"name": name, "ranks": ranks} for name, ranks in hosts.items()],
                    },
                    "ledger": self.ledger.as_dict(),
                    "versions": versions(),
                    **(facts or {}),
                }
            )

    def conclude(self, figures: Mapping[str, torch.Tensor]) -> None:
        """Show how it went: the loss as a picture, what the job wants to show, and where everything is."""
        self.recorder.close()
        if self.stopped and self.world.place.record and is_pause(Path(self.world.place.record)):
            return  # a moment, and it goes on
        shown = {name: float(value) for name, value in figures.items() if value.numel() == 1}
        text = ""
        # Where each rank holds a part of the model, all of them run it, with the same draws; one speaks.
        if not self.stopped and (self.world.rank == 0 or placement_of(self.model).is_cut):
            seed_everything(self.job.seed, "show")
            text = self.job.show(self.model, shown)
        if self.world.rank != 0:
            return
        self.recorder.picture()
        for line in text.splitlines():
            self.recorder.note(line)
        if self._tracing is not None and self._tracing.told:
            self.recorder.note(self._tracing.told)
        if self.folder is not None:
            state = "stopped on request" if self.stopped else "done"
            self.recorder.note(f"{state} at step {self.step}; everything is in {self.folder.path}")

    def close(self) -> None:
        """Wait for what is still being written."""
        if self._tracing is not None:
            self._tracing.abandon()
        if self._writer is not None:
            self._writer.close(hurry=self._inside)  # after a step that failed, other ranks may be gone
            self._tell_of_saves()
        if self._history is not None:
            self._history.close()
        self.recorder.close()

    def _tell_of_saves(self) -> None:
        """What the writer's thread met (a full disk), said from this one."""
        while self._writer is not None and self._writer.events:
            self.say(self._writer.events.pop(0))

    def _state(self) -> dict[str, Any]:
        engine = self._engine
        state = capture(self.model, self.optimizer, engine.scheduler, engine.scaler, state_parts=self._state_parts())
        # Data order and random streams are functions of (seed, step, coordinates): the step says both.
        return {**state, "position": {"step": self.step, "seed": self.job.seed}}

    def _state_parts(self) -> dict[str, Part] | None:
        """With zero=1: of which parameters this rank holds the optimizer's state."""
        if self._owned is None:
            return None
        parts, held = parts_of(self.model), {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {
            name: replace(parts[name], axes=(*parts[name].axes, "dp"))
            for name, param in self.model.named_parameters()
            if id(param) in held and self._owned.owns(param)
        }

    def _reconcile(self) -> None:
        """Local BatchNorm statistics differ by rank as the job asked; what is saved and evaluated is rank 0's."""
        names = placement_of(self.model).local_norms
        group = self.world.data_side_group
        if self.world.kind != "real" or group is None:
            return
        for name in names:  # of each stage, what the first of its data ranks has
            for buffer in self.model.get_submodule(name).buffers():
                torch.distributed.broadcast(buffer, group_src=0, group=group)

    def _resume(self, path: Path) -> None:
        manifest = read_manifest(path)
        differs = identity_difference(manifest.job, self.identity)
        if differs:
            raise CheckpointError(
                f"{path} is of another training; these differ:\n  "
                + "\n  ".join(differs)
                + "\nSet the values back, name the run to go on with (--run runs/that), or start afresh "
                "(--resume never)."
            )
        checkpoint = self._read_everywhere(path, reading_plan(manifest, self.model, state_parts=self._state_parts()))
        engine = self._engine
        restore(
            checkpoint.tree,
            self.model,
            self.optimizer,
            engine.scheduler,
            engine.scaler,
            state_parts=self._state_parts(),
        )
        self.step = self._saved = checkpoint.step
        self.ledger = replace(self.ledger, step=self.step, lr=float(self.optimizer.param_groups[0]["lr"]))
        memory = self.world.place.memory
        where = "the copy in memory" if memory and path.is_relative_to(memory) else path
        self.say(f"resumed from {where} (step {checkpoint.step}, saved under layout {manifest.layout})")

    def _read_everywhere(self, path: Path, plan: Mapping[str, Part | None]) -> Checkpoint:
        """Every rank reads its part of the checkpoint that was chosen, or all stop together."""
        checkpoint, why = None, ""
        try:
            checkpoint = read(path, plan)
        except (CheckpointError, OSError) as error:
            why = f"{error}"
        problems = {rank: text for rank, text in enumerate(self.world.gather_text(why)) if text}
        if problems or checkpoint is None:
            rank, text = next(iter(problems.items()))
            raise CheckpointError(
                f"rank {rank} cannot read the checkpoint that was found good: {text} Ranks {list(problems)} fail. "
                "A run folder must lie where every host sees it, at the same path."
            )
        return checkpoint


@contextlib.contextmanager
def _on_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets (a pre-emption, a shutdown), or SIGUSR1 (a batch system's limit), in the loop."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {n: signal.signal(n, lambda *_: asked.set()) for n in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
