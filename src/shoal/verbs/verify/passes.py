"""What the processes of a verification do: train a few steps, and write down what they see."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.data import RankBatch, Shared
from shoal.data.order import split_evenly
from shoal.job import Job
from shoal.parallel.clip import clip_factor
from shoal.run import Run, assemble
from shoal.step import StepResult
from shoal.verbs.verify.recording import START, Recording, name_of, write_facts
from shoal.verbs.verify.still import Still, without_dropout
from shoal.verbs.verify.variant import variant
from shoal.world import World

SGD, OWN, RESUMED, DATA, REAL, NUDGED = "sgd", "own", "resumed", "data", "real", ("nudged-1", "nudged-2")

# Weights and gradients are compared in every step; outputs, which take most of the memory, show where it began.
_STEPS_WITH_OUTPUTS = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained, for how long."""

    job: Job
    steps: int = 3
    real: bool = True  # also in the job's own precision

    @property
    def has_real(self) -> bool:
        return self.real and self.job.precision != "fp64"


def record_reference(plan: Plan, world: World, folder: Path) -> None:
    """The trainings of one process: what is right, and how far rounding alone takes it."""
    _record_float64(plan, world, folder)
    if plan.has_real:
        job = variant(plan.job, precision=plan.job.precision)
        walk(job, world, folder / REAL, steps=plan.steps)
        for seed, name in enumerate(NUDGED):
            walk(variant(job, precision=job.precision, nudge=seed), world, folder / name, steps=plan.steps)


def record_layout(plan: Plan, world: World, folder: Path) -> None:
    """The same trainings, spread; and one of them once more, resumed from what was saved after its first step."""
    kept = folder / "checkpointed" if plan.steps > 1 else None
    _record_float64(plan, world, folder, kept)
    if kept is not None:
        world.barrier()  # the checkpoint is complete on the disk before another rank looks for it
        job = variant(plan.job, precision="fp64")
        walk(job, world, folder / RESUMED, steps=1, folder=kept, resume="auto")
    if plan.has_real:
        walk(variant(plan.job, precision=plan.job.precision), world, folder / REAL, steps=plan.steps)


def _record_float64(plan: Plan, world: World, folder: Path, kept: Path | None = None) -> None:
    sgd = variant(plan.job, precision="fp64", sgd=True)
    data = walk(sgd, world, folder / SGD, steps=plan.steps, outputs=_STEPS_WITH_OUTPUTS)
    _look_ahead(data, world, folder / DATA)
    own = variant(plan.job, precision="fp64")
    walk(own, world, folder / OWN, steps=plan.steps, save_after=0 if kept is None else 1, folder=kept)


def _look_ahead(data: Shared, world: World, folder: Path) -> None:
    """Who gets which sample where one epoch ends and the next begins."""
    write_facts(folder / START, world.rank, {"data_rank": world.data_rank})
    last = data.steps_per_epoch
    for step in () if last is None else (last - 1, last):
        batch = next(iter(data.batches(step)))
        write_facts(folder / name_of(step + 1), world.rank, {"sample_ids": list(map(int, batch.sample_ids))})


def walk(
    job: Job, world: World, target: Path, *, steps: int, outputs: int = 0, save_after: int = 0, **options: Any
) -> Shared:
    """Assemble a job and record its next steps; returns its data.

    Args:
        outputs: in so many first steps, what each module returns, too.
        save_after: the step after which a checkpoint is written; 0 for none.
        options: of `assemble`.
    """
    run = assemble(job, world, quiet=True, **options)
    data, first = run.data, run.step + 1
    recording = Recording(
        target, run.model, run.optimizer, world=world, outputs=outputs, streams=True, first_step=first
    )
    try:
        for result, batch, silenced in _steps(run, steps):
            recording.step(
                result.loss,
                grad_norm=result.grad_norm,
                sample_ids=batch.sample_ids,
                micro_ids=_micro_ids(batch),
                count=float(result.count),
                clip=_clip(job, result),
                skipped=result.skipped,
                silenced=silenced,
            )
            if result.step == save_after:
                run.save()
    finally:
        recording.close()
        run.close()
    return data


def _steps(run: Run, steps: int) -> Iterator[tuple[StepResult, RankBatch, list[str]]]:
    still = Still()
    recurrent = without_dropout(run.model)
    tapped = _Tapped(run.data)
    run.data = tapped  # type: ignore[assignment]  # it answers as the data do
    for step in itertools.islice(run.steps(), steps):
        with still:
            result = step()
        assert tapped.batch is not None
        yield result, tapped.batch, [*recurrent, *sorted(still.silenced)]


class _Tapped:
    """The data of a run, and the batch that went by last."""

    def __init__(self, data: Shared) -> None:
        self._data = data
        self.batch: RankBatch | None = None

    def batches(self, start_step: int = 0) -> Iterator[RankBatch]:
        for batch in self._data.batches(start_step):
            self.batch = batch
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def _micro_ids(batch: RankBatch) -> list[list[int]]:
    """The samples of each micro-batch; none of a stand-in."""
    if batch.num_samples == 0:
        return []
    num, parts = batch.num_samples, len(batch.micro)
    return [list(map(int, batch.sample_ids[slice(*split_evenly(0, num, parts, i))])) for i in range(parts)]


def _clip(job: Job, result: StepResult) -> float:
    if job.clip_grad_norm is None:
        return 1.0
    return float(clip_factor(result.grad_norm.double(), job.clip_grad_norm))
