"""One rank: assembled and stepped on shapes, and metered."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from shoal.data import RankBatch
from shoal.dry import as_shapes, dry_run
from shoal.job import Job, load_job, with_fields
from shoal.layout import Layout
from shoal.metrics.meter import Metered
from shoal.parallel.parts import local_of, parts_of
from shoal.parallel.pipeline.schedule import stages_of
from shoal.parallel.pipeline.timetable import bubble, timetable
from shoal.parallel.place import placement_of
from shoal.run import Run, assemble
from shoal.run.metered import metered, states
from shoal.step import Forward, Step, call_of, on_device
from shoal.verbs.plan.command import PlanError
from shoal.verbs.plan.micro import enough, most_alive, to_begin_with
from shoal.verbs.plan.report import RankFigures
from shoal.world import Place, World

_RANKS_PER_NODE = 8
_NUM_SHAPES = 4


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Of one rank, and what all of them share."""

    figures: RankFigures
    ledger: str
    bubble: float | None
    num_params: int  # of the whole model
    notes: list[str]


def built(job: Job | str, fields: Mapping[str, Any]) -> Job:
    """The job with these values."""
    return load_job(job, fields) if isinstance(job, str) else with_fields(job, fields)


def plan_rank(job: Job, layout: Layout, rank: int) -> RankPlan:
    """Assemble this rank of the layout and let it step.

    Raises:
        PlanError: the job decides by numbers.
    """
    place = Place(
        rank=rank,
        size=layout.num_ranks,
        local_rank=rank % _RANKS_PER_NODE,
        local_size=min(_RANKS_PER_NODE, layout.num_ranks),
        num_nodes=-(-layout.num_ranks // _RANKS_PER_NODE),
        source="flags",
    )
    if layout.tp == 1:  # with it a run refuses by-name; without it the ranks hold the same
        job = with_fields(job, {"init": "whole"})
    # Compiled code holds and computes much the same, and cannot run on shapes that are ours.
    with World.open(replace(layout, compile="none"), kind="fake", place=place) as world, dry_run():
        try:
            run = assemble(job, world, quiet=True)
            return _planned(run)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise PlanError(
                f"{type(job).__name__} asks for numbers ({error}), and a plan has shapes alone. Let model and loss "
                "decide by shapes or settings, or measure it where it fits: shoal train --steps 5"
            ) from error


def _planned(run: Run) -> RankPlan:
    world, layout = run.world, run.world.layout
    read = next(run.data.batches())
    batch = replace(read, micro=as_shapes(read.micro))
    coordinate = world.mesh.coordinate(world.rank, "pp")
    num_micro = enough(layout, coordinate) if _are_alike(run, batch) else layout.micro
    fewer = to_begin_with(layout)
    _survey(run, batch)
    first, second = _metered_step(run, batch, fewer), _metered_step(run, batch, num_micro)
    # The first step has made the optimizer's state and the second is as all that follow. Both do once what is done
    # once per step. Micro-batches are alike, so the difference is what one of them costs, and the rest is arithmetic.
    left, step = layout.micro - num_micro, num_micro - fewer

    def scaled(few: float, many: float) -> int:
        return round(many + (many - few) / step * left) if left else round(many)

    parameters = [local_of(p) for p in run.model.parameters()]
    figures = RankFigures(
        rank=world.rank,
        coordinates={axis: at for axis, at in world.mesh.coordinates(world.rank).items() if world.mesh.sizes[axis] > 1},
        stages=stages_of(layout, coordinate) if layout.pp > 1 else [],
        shapes=_shapes(run),
        parameter_bytes=_storage_bytes(parameters),
        gradient_bytes=_storage_bytes(local_of(p.grad) for p in run.model.parameters() if p.grad is not None),
        optimizer_bytes=_storage_bytes(states(run.optimizer)),
        peak_bytes=second.peak_bytes,
        alive=most_alive(layout, coordinate),
        flops=scaled(first.flops.hardware, second.flops.hardware),
        model_flops=scaled(first.flops.model, second.flops.model),
        sent_bytes={axis: scaled(first.sent_bytes[axis], second.sent_bytes[axis]) for axis in second.sent_bytes},
    )
    notes = [f"FLOPs have no formula for {name}" for name in sorted(second.flops.uncounted)]
    return RankPlan(
        figures=figures, ledger=str(run.ledger), bubble=_bubble(run), num_params=_num_params(run), notes=notes
    )


def _survey(run: Run, batch: RankBatch) -> None:
    """What a pipeline looks at in its first step, on shapes of the whole model, is no part of any step that follows."""
    pipeline = placement_of(run.model).pipeline
    if pipeline is not None:
        calls = [call_of(run.job, on_device(part, run.job, run.world)) for part in batch.micro]
        pipeline.prepare(calls, has_backward=True, around=Forward(run.job, run.model, run.world).autocast)


def _metered_step(run: Run, batch: RankBatch, num_micro: int) -> Metered:
    """One optimizer step over the first micro-batches of a batch."""
    world = replace(run.world, layout=replace(run.world.layout, schedule=None, micro=num_micro))
    step = Step(run.job, run.model, world, optimizer=run.optimizer, scheduler=None)
    step.scaler = None  # it asks whether a gradient overflows; it adds no memory
    run.optimizer.zero_grad(set_to_none=True)
    with metered(run, batch.micro) as found:
        step(replace(batch, micro=batch.micro[:num_micro]))
    return found


def _are_alike(run: Run, batch: RankBatch) -> bool:
    """Whether all micro-batches of the rank are of the same shapes."""
    shapes = {tuple(leaf.shape for leaf in tree_leaves(part) if isinstance(leaf, Tensor)) for part in batch.micro}
    return len(shapes) == 1 and len(batch.micro) == run.world.layout.micro


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Each piece of memory once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _shapes(run: Run) -> dict[str, tuple[int, ...]]:
    """Of the largest parameters, one of each kind: blocks repeat."""
    named = sorted(run.model.named_parameters(), key=lambda item: -local_of(item[1]).numel())
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, param in named:
        if local_of(param).numel():
            kinds.setdefault(re.sub(r"\d+", "*", name), (name, tuple(local_of(param).shape)))
    return dict(list(kinds.values())[:_NUM_SHAPES])


def _num_params(run: Run) -> int:
    """Of the whole model, shared ones once."""
    parts = parts_of(run.model)
    return sum(math.prod(parts[name].shape) for name, _ in run.model.named_parameters())


def _bubble(run: Run) -> float | None:
    layout, pipeline = run.world.layout, placement_of(run.model).pipeline
    if pipeline is None:
        return None
    times = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    return bubble(timetable(layout, lambda kind, stage: times[kind] * pipeline.shares[stage]), layout.pp)
