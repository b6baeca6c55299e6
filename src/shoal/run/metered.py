"""One step of a run, metered: what a rank computes, holds and sends in it."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.metrics.meter import Metered, metering
from shoal.parallel.parts import local_of
from shoal.parallel.place import placement_of
from shoal.parallel.replicate import DryReplica
from shoal.run.run import Run


def metered(run: Run, inputs: Any = ()) -> contextlib.AbstractContextManager[Metered]:
    """Within: what the run computes, holds and sends is counted.

    Args:
        inputs: the batch, or a tree that holds it.
    """
    known: dict[str, Iterable[Tensor]] = {
        "parameters": [*map(local_of, run.model.parameters()), *run.model.buffers()],
        "optimizer": list(states(run.optimizer)),
        "inputs": [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)],
    }
    return metering(run.world, known, _gradients(run))


def states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors that an optimizer keeps, as they lie on this rank."""
    for state in optimizer.state.values():
        yield from (local_of(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def _gradients(run: Run) -> Callable[[], Iterator[Tensor]]:
    """The gradients that there are at any moment, reduced or not."""
    placement, params = placement_of(run.model), list(run.model.parameters())

    def now() -> Iterator[Tensor]:
        yield from (local_of(param.grad) for param in params if param.grad is not None)
        if placement.shards is not None:
            yield from placement.shards.own_gradients().values()
        if isinstance(placement.replica, DryReplica):
            yield from placement.replica.buckets.values()

    return now
