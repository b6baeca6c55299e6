"""What each part of the first global batch says alone: the gradient of its summed loss, in one process.

With these, a wrong gradient can be told apart: one rank's share only, a mean of the ranks' means, a micro-batch or
a rank that is left out.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.data import RankBatch, share
from shoal.job import Job
from shoal.layout import Layout
from shoal.run import assemble
from shoal.step import Forward, seed_everything
from shoal.verbs.verify.still import Still
from shoal.world import World


@dataclass(frozen=True, kw_only=True)
class Share:
    """Of one micro-batch of one data rank: gradients by parameter, the summed loss, and its count."""

    data_rank: int
    micro: int
    gradients: dict[str, Tensor]
    value: float
    count: float


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
    told: list[dict[str, float]] = []
    for data_rank in range(layout.num_data):
        batch = _first_batch(job, _Seat(data_rank, layout.num_data, world.device), layout.micro)
        for micro, part in enumerate(batch.micro if batch.num_samples else ()):
            seed_everything(job.seed, "step", 0, 0)
            run.optimizer.zero_grad(set_to_none=True)
            with Still():
                _, _, loss = forward(part)
                loss.value.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            grads = {n: p.grad.to_dense().contiguous() for n, p in run.model.named_parameters() if p.grad is not None}
            save_file(grads, folder / f"{len(told)}.safetensors")
            told.append(
                {
                    "data_rank": data_rank,
                    "micro": micro,
                    "value": float(loss.value.detach()),
                    "count": float(loss.count),
                }
            )
    run.close()
    (folder / "shares.json").write_text(json.dumps(told))


def _first_batch(job: Job, seat: _Seat, micro: int) -> RankBatch:
    seed_everything(job.seed, "data")
    collate = None if type(job).collate is Job.collate else job.collate
    shared = share(job.data(), seat, batch_size=job.batch_size, seed=job.seed, micro=micro, collate=collate)
    return next(iter(shared.batches()))


def read_shares(folder: Path) -> list[Share]:
    """As they were written."""
    told = json.loads((folder / "shares.json").read_text())
    return [Share(gradients=load_file(folder / f"{i}.safetensors"), **each) for i, each in enumerate(told)]
