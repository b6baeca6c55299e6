"""Evaluation: each sample once at any world size, sums and counts added, divided once."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.additive import check_additive
from shoal.data import Shared
from shoal.errors import JobError
from shoal.job import Job, Sum
from shoal.layout import Layout
from shoal.parallel.mode import evaluating
from shoal.parallel.place import placement_of
from shoal.step import Forward, rounds, seed_everything
from shoal.world import World

T = TypeVar("T")

_COARSER = 4  # a part in training keeps all that its backward needs, one in evaluation nothing
_FILLED = 4  # micro-batches per stage: filling and draining are then a small part. More would hold more activations


def num_parts(layout: Layout) -> int:
    """Into how many parts a rank's batch is cut in evaluation, where a layout trains on micro-batches."""
    return -(-layout.micro // _COARSER)


def evaluate(
    job: Job, model: nn.Module, data: Shared, world: World, *, num_steps: int | None = None
) -> dict[str, Tensor]:
    """`loss` and the job's metrics over a dataset, equal on every rank and to one process.

    The model is in evaluation mode and each module returns to the mode it had; there is no gradient. Where ranks hold
    parts of the model, one without samples takes part with a stand-in; else it simply waits at the end. With
    `num_steps`, only the first batches are seen.
    """
    forward = Forward(job, model, world)
    streams = (job.seed, "evaluation", world.data_rank)
    seed_everything(*streams)
    sums: dict[str, Sum] = {}
    in_step = placement_of(model).is_cut
    cuts = world.num_data * world.layout.micro > 1

    def count(output: Any, moved: Any, loss: Sum) -> None:
        if cuts and not sums:
            what = f"{type(job).__name__}.metrics()"
            check_additive(lambda o, b: _checked(job.metrics(o, b)), output, moved, what)
        for name, figure in {"loss": loss, **_checked(job.metrics(output, moved))}.items():
            wide = Sum(figure.value.detach().double(), _float(figure.count))
            sums[name] = sums[name] + wide if name in sums else wide

    def through_stages(parts: Sequence[tuple[Any, bool]], num_before: int) -> None:
        forward.through_stages(
            [part for part, _ in parts],
            lambda number, *made: count(*made) if parts[number][1] else None,
            has_backward=False,
            seed=lambda number, stage: seed_everything(*streams, "micro", num_before + number, stage),
        )

    with evaluating(model), torch.no_grad():
        batches = islice(data.batches(), num_steps)
        live_parts = (rounds(batch, world, data.micro) if in_step or batch.num_samples else [] for batch in batches)
        if world.layout.pp > 1:
            num_done = 0
            for parts in _long_enough(live_parts, _FILLED * world.layout.pp):
                through_stages(parts, num_done)
                num_done += len(parts)
        else:
            for part, is_live in chain.from_iterable(live_parts):
                made = forward(part)
                if is_live:
                    count(*made)
    return {name: total.mean() for name, total in _add_over_ranks(sums, world).items()}


def _long_enough(batches: Iterable[list[T]], least: int) -> Iterator[list[T]]:
    """The parts of several batches in a row, so many at least: a pipeline is not filled and drained for each."""
    row: list[T] = []
    for parts in batches:
        row += parts
        if len(row) >= least:
            yield row
            row = []
    if row:
        yield row


def _float(count: Tensor | float) -> float:
    return float(count)


def _checked(metrics: dict[str, Sum]) -> dict[str, Sum]:
    if not isinstance(metrics, Mapping):
        raise JobError(f"metrics() returned {type(metrics).__name__}; it must be a dict of Sums, {{}} for none.")
    for name, figure in metrics.items():
        if not isinstance(figure, Sum) or not isinstance(figure.value, Tensor):
            raise JobError(
                f"metric {name!r} is {type(figure).__name__}, not a Sum(tensor, count). A mean per batch cannot be "
                "averaged over ragged batches; Sum((output.argmax(-1) == target).sum(), len(target)) can. AUC, F1 and "
                "their like do not add up: return Sum(confusion_matrix, len(target)), and derive them from it."
            )
    return metrics


def _add_over_ranks(sums: dict[str, Sum], world: World) -> dict[str, Sum]:
    """One collective for all metrics. A rank without samples learns their names and shapes from the others."""
    shapes: dict[str, list[int]] = {}
    for row in world.gather_text(json.dumps({name: list(s.value.shape) for name, s in sums.items()})):
        shapes |= json.loads(row)
    if not shapes:
        return {}
    zeros = {
        name: Sum(torch.zeros(shape, dtype=torch.float64, device=world.device), 0.0) for name, shape in shapes.items()
    }
    parts = [zeros[name] + sums[name] if name in sums else zeros[name] for name in sorted(shapes)]
    flat = torch.cat([torch.cat([part.value.flatten(), part.value.new_tensor([part.count])]) for part in parts])
    if world.kind == "real" and world.num_data * world.layout.pp > 1:  # of a pipeline, the last stage alone has any
        dist.all_reduce(flat, group=world.axis_group("pp", "dp", "fsdp", side=True))
    total, start = {}, 0
    for name in sorted(shapes):
        numel = math.prod(shapes[name])
        total[name] = Sum(flat[start : start + numel].view(shapes[name]), flat[start + numel])
        start += numel + 1
    return total
