"""What each part of the first global batch says alone: the gradient of its summed loss, in one process.

With these, a wrong gradient can be told apart: one rank's share only, a mean of the ranks' means, a micro-batch or
a rank that is left out.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.data import RankBatch, share
from shoal.job import Job
from shoal.layout import Layout
from shoal.run import assemble
from shoal.step import Forward, on_device, seed_everything
from shoal.verbs.verify.still import Still
from shoal.world import World

_MOST_PARTS = 16  # whose targets are tried on each other's outputs


@dataclass(frozen=True, kw_only=True)
class Share:
    """Of one micro-batch of one data rank: gradients by parameter, the summed loss, and its count.

    Attributes:
        against: the loss of its output with the targets of each micro-batch of the rank, (value, count); None where the
            two are not of one shape.
    """

    data_rank: int
    micro: int
    gradients: dict[str, Tensor]
    value: float
    count: float
    against: Sequence[tuple[float, float] | None] = ()


@dataclass(frozen=True)
class _Seat:
    """A data rank that is not there."""

    data_rank: int
    num_data: int
    device: torch.device


def write_shares(job: Job, world: World, folder: Path, layout: Layout) -> None:
    """Compute them in this one process, as the layout would deal the batch out."""
    run = assemble(job, world, quiet=True)
    forward = Forward(job, run.model, world)
    folder.mkdir(parents=True, exist_ok=True)
    told: list[dict[str, Any]] = []
    for data_rank in range(layout.num_data):
        batch = _first_batch(job, _Seat(data_rank, layout.num_data, world.device), layout.num_parts)
        parts = batch.micro if batch.num_samples else ()
        for micro, part in enumerate(parts):
            seed_everything(job.seed, "step", 0, 0)
            run.optimizer.zero_grad(set_to_none=True)
            with Still():
                output, _, loss = forward(part)
                against = _against(forward, output, part, parts, job, world)
                loss.value.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            grads = {n: p.grad.to_dense().contiguous() for n, p in run.model.named_parameters() if p.grad is not None}
            save_file(grads, folder / f"{len(told)}.safetensors")
            told.append(
                {
                    "data_rank": data_rank,
                    "micro": micro,
                    "value": float(loss.value.detach()),
                    "count": float(loss.count),
                    "against": against,
                }
            )
    run.close()
    (folder / "shares.json").write_text(json.dumps(told))


def _against(
    forward: Forward, output: Any, own: Any, parts: Sequence[Any], job: Job, world: World
) -> list[tuple[float, float] | None]:
    found: list[tuple[float, float] | None] = []
    for part in parts if len(parts) <= _MOST_PARTS else ():
        if _shapes(part) != _shapes(own):
            found.append(None)
            continue
        with torch.no_grad():
            loss = forward.loss(output, on_device(part, job, world))
        found.append((float(loss.value), float(loss.count)))
    return found


def _shapes(batch: Any) -> list[Any]:
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(batch)]


def _first_batch(job: Job, seat: _Seat, micro: int) -> RankBatch:
    seed_everything(job.seed, "data")
    collate = None if type(job).collate is Job.collate else job.collate
    shared = share(job.data(), seat, batch_size=job.batch_size, seed=job.seed, micro=micro, collate=collate)
    return next(iter(shared.batches()))


def read_shares(folder: Path) -> list[Share]:
    """As they were written."""
    told = json.loads((folder / "shares.json").read_text())
    return [Share(gradients=load_file(folder / f"{i}.safetensors"), **each) for i, each in enumerate(told)]
