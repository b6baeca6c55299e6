"""The optimizer's state in parts, under data parallelism (ZeRO-1): each parameter is stepped by one rank, its owner.

    rank 0   gradients of a, b, c ─ step a, c ─┐
                                               ├─ each sends what it stepped ─ a, b, c, stepped, everywhere
    rank 1   gradients of a, b, c ─ step b ────┘

The optimizer stays the job's own object over the model's own parameters, whole ones, so that one which looks at a whole
matrix (Muon, Adafactor) sees it. Around its step, two hooks of torch hide the gradients of what other ranks own.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import JobError
from shoal.world import World

_BYTES_IN_FLIGHT = 2**28  # copies of parameters that are being sent, of all owners together


class OwnedStates:
    """Spreads the state of one optimizer over the data ranks.

    Invariant: after a step every rank holds the same parameters, and `optimizer.state` those that this rank owns.

    Raises:
        JobError: the optimizer may look at several parameters together, or evaluates a closure.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        _check(optimizer)
        self._world = world
        self._owners: dict[Tensor, int] = {}
        self._stepped: list[Tensor] = []
        self._hidden: dict[Tensor, Tensor | None] = {}
        self._deal(optimizer)
        for param in self._owners:
            if not self.owns(param):
                optimizer.state.pop(param, None)  # Adagrad begins with a state for each
        optimizer.register_step_pre_hook(self._hide)
        optimizer.register_step_post_hook(self._share)

    def owner(self, param: Tensor) -> int:
        """The data rank that holds the state of a parameter of the optimizer, and steps it."""
        return self._owners[param]

    def owns(self, param: Tensor) -> bool:
        """Whether that is this rank."""
        return self._owners[param] == self._world.data_rank

    def _deal(self, optimizer: torch.optim.Optimizer) -> None:
        """The largest first, each to the rank that has least; those that are added later join in."""
        loads = [0] * self._world.num_data
        for param, owner in self._owners.items():
            loads[owner] += param.nbytes
        new = [p for group in optimizer.param_groups for p in group["params"] if p not in self._owners]
        for param in sorted(new, key=lambda param: -param.nbytes):  # equal ones in the optimizer's order
            self._owners[param] = loads.index(min(loads))
            loads[self._owners[param]] += param.nbytes

    def _hide(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in args[1:]) or kwargs.get("closure") is not None:  # args[0]: the optimizer
            raise JobError("zero=1 does not go with optimizer.step(closure). Call backward before step().")
        self._deal(optimizer)
        self._stepped = [param for param in self._owners if param.grad is not None]
        self._hidden = {param: param.grad for param in self._stepped if not self.owns(param)}
        for param in self._hidden:
            param.grad = None

    def _share(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for param, grad in self._hidden.items():
            param.grad = grad
        self._hidden = {}
        if self._world.data_group is None:
            return
        limit = _BYTES_IN_FLIGHT // self._world.num_data
        owned = [[p for p in self._stepped if self.owner(p) == rank] for rank in range(self._world.num_data)]
        for buckets in itertools.zip_longest(*(_buckets(params, limit) for params in owned), fillvalue=()):
            _send(buckets, self._world)


def _check(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS) or not f"{kind.__module__}.".startswith("torch.optim."):
        raise JobError(
            f"zero=1 has each parameter stepped by one rank, and {kind.__name__} may look at several together. Take an "
            "optimizer of torch.optim (not LBFGS), or drop zero."
        )


def _buckets(params: Iterable[Tensor], limit_bytes: int) -> Iterator[list[Tensor]]:
    """Runs of one dtype, no larger than the limit where that is possible."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for param in sorted(params, key=lambda param: str(param.dtype)):
        if bucket and (num_bytes + param.nbytes > limit_bytes or param.dtype != bucket[0].dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(param)
        num_bytes += param.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def _send(buckets: Sequence[Sequence[Tensor]], world: World) -> None:
    """A bucket of each data rank, from it to all others, all at once."""
    flats, works = {}, []
    for owner, bucket in enumerate(buckets):
        if bucket:
            flats[owner] = torch.cat([param.flatten() for param in bucket])
            raw = flats[owner].view(torch.uint8)  # complex numbers too
            works.append(dist.broadcast(raw, group=world.data_group, group_src=owner, async_op=True))
    for work in works:
        work.wait()
    for owner, flat in flats.items():
        if owner != world.data_rank:
            for param, part in zip(buckets[owner], torch.split(flat, [p.numel() for p in buckets[owner]]), strict=True):
                param.copy_(part.view_as(param))
