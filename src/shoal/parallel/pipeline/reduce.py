"""Gradients when all micro-batches of a pipeline are through: added over stages that share a weight, and data ranks."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.dry import is_dry
from shoal.parallel.parts import local_of
from shoal.world import World

_BUCKET_BYTES = 100 << 20


class LateReduction:
    """One reduction per optimizer step.

    Invariant: after `settle` the gradient of a parameter is the sum over the stages that use it of the mean over the
    data ranks; one that was used nowhere keeps `None`, and of one that is in other stages this rank has a gradient
    without elements, so that every rank's optimizer sees the same parameters.

    Args:
        holders: of every parameter, the coordinates on pp that hold it.
    """

    def __init__(self, model: nn.Module, world: World, holders: Mapping[str, Sequence[int]]) -> None:
        rank = world.mesh.coordinate(world.rank, "pp")
        self._model, self._world = model, world  # parameters by name: shards take the places of whole ones
        self._named: dict[str, nn.Parameter] = {}
        self._held = [name for name, ranks in holders.items() if rank in ranks]
        self._shared = {name: ranks for name, ranks in holders.items() if rank in ranks and len(ranks) > 1}

    def close(self) -> None:
        """The world is gone; so are the ranks to add up with."""
        self._shared = {}

    def sent_bytes(self) -> int:
        """Of gradients that this rank tells other stages of, in a step."""
        rank, named = self._world.mesh.coordinate(self._world.rank, "pp"), dict(self._model.named_parameters())
        times = {name: len(ranks) - 1 if rank == ranks[0] else 1 for name, ranks in self._shared.items()}
        return sum(count * local_of(named[name]).nbytes for name, count in times.items())

    def settle(self) -> None:
        """After the last backward of a step; collective."""
        if self._world.kind != "real" and not is_dry():
            return
        self._named = named = self._named or dict(self._model.named_parameters())
        if not is_dry():
            self._agree_on_use(list(named.values()))
        grads = {name: named[name].grad for name in self._held}
        for name, ranks in self._shared.items():
            if (grad := grads[name]) is not None:
                self._add_over_stages(local_of(grad), ranks)
        if self._world.num_data > 1 and self._world.layout.fsdp == 1:  # shards are reduced already
            for bucket in _buckets([grad for grad in grads.values() if grad is not None]):
                self._average(bucket)

    def _agree_on_use(self, params: Sequence[nn.Parameter]) -> None:
        """A parameter that any rank has used gets a gradient on all."""
        counts = torch.tensor([p.grad is not None for p in params], dtype=torch.int32, device=self._world.device)
        dist.all_reduce(counts, group=self._world.side_group)
        for param, count in zip(params, self._world.read(counts) or (), strict=True):
            if count and param.grad is None:
                param.grad = torch.zeros_like(param)

    def _add_over_stages(self, grad: Tensor, ranks: Sequence[int]) -> None:
        """The first of them adds up and tells the others: all have the same bits."""
        group = self._world.axis_group("pp")
        assert group is not None, "a real world has groups"
        first, *others = (dist.get_global_rank(group, rank) for rank in ranks)
        if self._world.rank != first:
            dist.send(grad.contiguous(), first, group=group)
            dist.recv(grad, first, group=group)
            return
        part = torch.empty_like(grad)
        for other in others:
            dist.recv(part, other, group=group)
            grad += part
        for other in others:
            dist.send(grad.contiguous(), other, group=group)

    def _average(self, grads: Sequence[Tensor]) -> None:
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=self._world.data_group)
        flat /= self._world.num_data
        for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Of one dtype each, and of a size that is worth a message."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        bucket: list[Tensor] = []
        for grad in (grad for grad in grads if grad.dtype == dtype):
            bucket.append(grad)
            if sum(g.nbytes for g in bucket) >= _BUCKET_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
