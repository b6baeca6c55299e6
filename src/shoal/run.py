"""assemble(job, world) -> Run: the one set-up behind every verb, and the iterator that the user's loop walks."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from shoal.agreement import (
    check_first_step,
    check_optimizer,
    check_replicas,
    check_same_model,
    fingerprint,
    fingerprints,
)
from shoal.checkpoint import Checkpoint, Writer, identity_difference, newest_good, read
from shoal.checkpoint.pack import pack
from shoal.checkpoint.state import capture, restore
from shoal.checkpoint.write import _versions
from shoal.data import Shared, share
from shoal.errors import CheckpointError, JobError
from shoal.evaluate import evaluate
from shoal.folder import RunFolder
from shoal.job import Job, Params, Scheduler, check_job, identity
from shoal.metrics.ledger import Ledger
from shoal.metrics.recorder import Recorder
from shoal.parallel.place import place, placement_of
from shoal.parallel.replicate import check_replicable
from shoal.step import Step, StepResult, seed_everything, use_fused
from shoal.world import World


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
    _writer: Writer | None = field(default=None, repr=False)
    _saved: int | None = field(default=None, repr=False)

    def steps(self) -> Iterator[Callable[[], StepResult]]:
        """The steps that are left; call each one. Ends early, on all ranks together, after SIGTERM."""
        with _on_sigterm() as stop_asked:
            batches = self.data.batches(start_step=self.step)
            while self.step < self.job.steps and not self.stopped:
                with self.recorder.waiting_for_data():
                    batch = next(batches)
                yield lambda batch=batch: self._one(batch, stop_asked.is_set())  # type: ignore[misc]

    def _one(self, batch: Any, stop: bool) -> StepResult:
        first = not self.recorder.has_run
        before = fingerprints(self.model) if first else {}
        with self.recorder.step(batch):
            result = self._engine(batch, stop=stop)
        self.step = result.step
        self.stopped = result.stop
        if first:
            self._check_first(before, result)
        return result

    def _check_first(self, before: dict[str, str], result: StepResult) -> None:
        check_replicas(self.model, self.world, result.step)
        if result.skipped:
            return
        without = check_first_step(before, self.model, self.optimizer, result.lr)
        if without:
            self.say(
                f"{len(without)} trainable parameters got no gradient in this step and stay as they are, as in one "
                f"process: {', '.join(without[:5])}{', ...' if len(without) > 5 else ''}"
            )

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
        self._reconcile()
        check_replicas(self.model, self.world, self.step)
        self._saved = self.step
        if self._writer is None:
            return  # replicated state is written once, by rank 0
        with self.recorder.paused():
            self._writer.submit(
                self._state(),
                step=self.step,
                job=identity(self.job),
                layout=str(self.world.layout),
            )

    def describe(self, facts: Mapping[str, Any] | None = None) -> None:
        """Say what runs, and keep it in run.json: layout, batch ledger, job, versions, and `facts`."""
        for line in str(self.ledger).splitlines():
            self.say(line)
        if self.folder is not None and self.world.rank == 0:
            self.folder.describe(
                {
                    "job": {**identity(self.job), "steps": self.job.steps},
                    "layout": str(self.world.layout),
                    "world": {
                        "size": self.world.size,
                        "backend": self.world.backend,
                        "device": str(self.world.device),
                    },
                    "ledger": self.ledger.as_dict(),
                    "versions": _versions(),
                    **(facts or {}),
                }
            )

    def conclude(self, figures: Mapping[str, torch.Tensor]) -> None:
        """Show how it went: the loss as a picture, what the job wants to show, and where everything is."""
        self.recorder.close()
        if self.world.rank != 0:
            return
        shown = {name: float(value) for name, value in figures.items() if value.numel() == 1}
        self.recorder.picture()
        text = "" if self.stopped else self.job.show(self.model, shown)
        for line in text.splitlines():
            self.recorder.note(line)
        if self.folder is not None:
            state = "stopped on request" if self.stopped else "done"
            self.recorder.note(f"{state} at step {self.step}; everything is in {self.folder.path}")

    def close(self) -> None:
        """Wait for what is still being written."""
        if self._writer is not None:
            self._writer.close()
            self._tell_of_saves()
        self.recorder.close()

    def _tell_of_saves(self) -> None:
        """What the writer's thread met (a full disk), said from this one."""
        while self._writer is not None and self._writer.events:
            self.say(self._writer.events.pop(0))

    def _state(self) -> dict[str, Any]:
        state = capture(self.model, self.optimizer, self._engine.scheduler, self._engine.scaler)
        # Data order and random streams are functions of (seed, step, coordinates): the step says both.
        return {**state, "position": {"step": self.step, "seed": self.job.seed}}

    def _reconcile(self) -> None:
        """Local BatchNorm statistics differ by rank as the job asked; what is saved and evaluated is rank 0's."""
        names = placement_of(self.model).local_norms
        if self.world.kind != "real" or not names:
            return
        for name in names:
            for buffer in self.model.get_submodule(name).buffers():
                torch.distributed.broadcast(buffer, src=0, group=self.world.side_group)

    def _resume(self, path: Path) -> None:
        checkpoint = self._read_everywhere(path)
        differs = identity_difference(checkpoint.manifest.job, identity(self.job))
        if differs:
            raise CheckpointError(
                f"{path} is of another training; these differ:\n  "
                + "\n  ".join(differs)
                + "\nStart afresh (--resume never, another --run), or set the values back."
            )
        restore(checkpoint.tree, self.model, self.optimizer, self._engine.scheduler, self._engine.scaler)
        self.step = self._saved = checkpoint.step
        self.say(f"resumed from {path} (step {checkpoint.step}, saved under layout {checkpoint.manifest.layout})")

    def _read_everywhere(self, path: Path) -> Checkpoint:
        """Every rank reads the checkpoint that rank 0 chose, or all stop together."""
        checkpoint, why = None, ""
        try:
            checkpoint = read(path)
        except (CheckpointError, OSError) as error:
            why = f"{error}"
        problems = {rank: text for rank, text in enumerate(self.world.gather_text(why)) if text}
        if problems or checkpoint is None:
            rank, text = next(iter(problems.items()))
            raise CheckpointError(
                f"rank {rank} cannot read the checkpoint that rank 0 found good: {text} Ranks {list(problems)} fail. "
                "A run folder must lie where every host sees it, at the same path."
            )
        return checkpoint


def assemble(
    job: Job,
    world: World,
    *,
    folder: Path | str | None = None,
    resume: Literal["auto", "never"] | Path | str = "never",
    save_every: int | None = None,
    log_every: int | None = None,
    keep: int = 3,
    tensorboard: bool = False,
    quiet: bool = False,
) -> Run:
    """Everything between a job and its first step, in the one right order; collective.

    Args:
        folder: the run's folder (checkpoints, metrics, logs); none is written without it.
        resume: `auto` takes the newest good checkpoint of the folder; a path, that of another run.
        save_every: steps between checkpoints, besides the one at the end.
        log_every: steps between logged ones; 1 in short runs.
        keep: checkpoints to keep.
        tensorboard: write TensorBoard's files too.
        quiet: show nothing.

    Raises:
        ShoalError: whatever cannot obey the law, before the first step.
    """
    check_job(job)
    world.layout.require_available()
    world.agree({"job": identity(job), "steps": job.steps, "layout": str(world.layout), "torch": torch.__version__})
    model = _build_model(job, world)
    data, evaluation, tokens = _build_data(job, world)
    _check_evaluation(model, evaluation, world)
    place(model, world, batch_norm=job.batch_norm)
    optimizer, scheduler = _build_optimizer(job, model)
    run_folder = RunFolder(Path(folder)) if folder is not None else None
    ledger = Ledger.of(job, world, data, lr=float(optimizer.param_groups[0]["lr"]), tokens_per_sample=tokens)
    run = Run(
        job=job,
        world=world,
        model=model,
        optimizer=optimizer,
        data=data,
        evaluation=evaluation,
        ledger=ledger,
        recorder=Recorder(
            job,
            world,
            folder=None if run_folder is None else run_folder.path,
            log_every=log_every,
            tokens=tokens is not None,
            tensorboard=tensorboard,
            quiet=quiet,
        ),
        folder=run_folder,
        save_every=save_every,
        _engine=Step(job, model, world, optimizer=optimizer, scheduler=scheduler),
    )
    left_out = check_optimizer(optimizer, model)
    if left_out:
        run.say(f"not in the optimizer, so never updated: {', '.join(left_out[:5])}")
    pack(run._state())  # what cannot be stored is said now, not at the first save
    path = world.decide(lambda: _enter_folder(run, resume, keep))
    if path:
        run._resume(Path(path))
    run.recorder.start(run.step)
    return run


def _build_model(job: Job, world: World) -> nn.Module:
    """The model as one process would build it: the same seed, then the same draws, on every rank."""
    seed_everything(job.seed)
    torch.manual_seed(job.seed)
    model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(f"{type(job).__name__}.model() returned {type(model).__name__}, not a torch.nn.Module.")
    check_replicable(model)
    if not model.training:
        model.train()  # as a whole in evaluation mode, as loaded weights often are; a part that is, is meant so
    model = model.to(world.device, torch.float64 if job.precision == "fp64" else None)
    check_same_model(model, world)
    return model


def _build_data(job: Job, world: World) -> tuple[Shared, Shared | None, int | None]:
    seed_everything(job.seed, "data")
    options: dict[str, Any] = {
        "batch_size": job.batch_size,
        "seed": job.seed,
        "collate": job.collate,
        "num_workers": world.layout.workers,
    }
    dataset = job.data()
    data = share(dataset, world, micro=world.layout.micro, **options)
    tokens, sample = _first_sample(job, dataset)
    held_out = job.evaluation()
    evaluation = None if held_out is None else share(held_out, world, shuffle=False, epochs=1, **options)
    # A data set that a rank has cut, split or drawn by itself would be cut a second time.
    world.agree(
        {
            "the length of the data": data.num_samples,
            "the data": data.fingerprint(),
            "the first sample of the data": sample,
            "the length of the evaluation data": evaluation and evaluation.num_samples,
        }
    )
    return data, evaluation, tokens


def _check_evaluation(model: nn.Module, evaluation: Shared | None, world: World) -> None:
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)}
    without = [name for name, norm in norms.items() if norm.running_mean is None]
    if without and evaluation is not None and world.num_data > 1:
        raise JobError(
            f"{without[0]} keeps no running statistics (track_running_stats=False), so evaluation normalises each "
            "batch by itself, and its result would depend on how many ranks share it. Keep running statistics, or "
            "leave Job.evaluation() out."
        )


def _first_sample(job: Job, dataset: Any) -> tuple[int | None, str]:
    """Tokens per sample (None: the input is no row of token ids), and a fingerprint of the first sample."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return None, ""  # a stream: reading from it might use it up
    seed_everything(job.seed, "first sample")
    sample = dataset[0]
    leaves = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    row = sample[0] if isinstance(sample, tuple | list) else sample
    is_tokens = isinstance(row, Tensor) and row.dim() == 1 and row.dtype in (torch.int32, torch.int64)
    return (row.numel() if is_tokens else None), " ".join(map(fingerprint, leaves))


def _build_optimizer(job: Job, model: nn.Module) -> tuple[torch.optim.Optimizer, Scheduler | None]:
    seed_everything(job.seed, "optimizer")
    params = Params(dict(model.named_parameters()))
    if not any(param.requires_grad for param in params):
        raise JobError(f"{type(job).__name__}.model() has no trainable parameter: nothing would be trained.")
    optimizer = job.optimizer(params)
    check_optimizer(optimizer, model)
    use_fused(optimizer)
    return optimizer, job.scheduler(optimizer)


def _enter_folder(run: Run, resume: str | Path, keep: int) -> str:
    """Rank 0 takes the folder for itself, and decides where to go on: a checkpoint's path, or empty for a start."""
    folder = None
    if run.folder is not None:
        run.folder.make()
        run._writer = Writer(run.folder.checkpoints, keep=keep)
        folder = run.folder.checkpoints
    if resume == "never":
        if folder and any(folder.glob("step_*")):
            raise CheckpointError(
                f"{folder} already holds checkpoints, which a fresh run would mix with its own. Go on with "
                "--resume auto, or choose another folder: --run runs/other"
            )
        return ""
    if resume == "auto":
        if folder is None:
            raise CheckpointError("resume='auto' needs a run folder to look in: assemble(..., folder='runs/mine').")
        found, skipped = newest_good(folder)
    else:
        found, skipped = newest_good(Path(resume))
        if found is None:
            raise CheckpointError(f"no good checkpoint in {resume}." + "".join(f"\n  {why}" for why in skipped))
    for why in skipped:
        run.say(f"left out: {why}")
    return "" if found is None else str(found.path)


@contextlib.contextmanager
def _on_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets (a pre-emption, a shutdown), while the loop runs."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
