"""Logits of which each rank holds its slice of the vocabulary, and the cross entropy that never puts them together.

Whatever else is done to them gathers them first, so any loss and any metric is right; only the usual ones are cheap.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoal.parallel.tensor.peers import Peers

_FACTS: set[Any] = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "is_sparse")),
}
_RESHAPES: set[Any] = {Tensor.reshape, Tensor.view, Tensor.flatten, torch.reshape, torch.flatten}
_CASTS: set[Any] = {Tensor.float, Tensor.double}


class SlicedLogits(Tensor):
    """Logits (.., V) that look whole; `local` (.., v) is this rank's slice, with its gradient."""

    local: Tensor
    peers: Peers
    sizes: Sequence[int]
    held: Tensor | None = None  # all of them, once something was written into them

    @staticmethod
    def of(local: Tensor, peers: Peers, sizes: Sequence[int]) -> "SlicedLogits":
        """Logits of sum(sizes) words, of which this rank computed its own."""
        shape = (*local.shape[:-1], sum(sizes))
        whole = Tensor._make_wrapper_subclass(SlicedLogits, shape, dtype=local.dtype, device=local.device)
        whole.local, whole.peers, whole.sizes = local, peers, sizes
        return whole

    def whole(self) -> Tensor:
        """All of them, on every rank."""
        return self.peers.gather(self.local, self.sizes) if self.held is None else self.held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, SlicedLogits) and _writes(func):
            first.held = first.whole()
            func(first.held, *args[1:], **kwargs)
            return first
        if isinstance(first, SlicedLogits) and first.held is None:
            if func in _CASTS:
                return first._like(func(first.local))
            if func in _RESHAPES:
                shape = func(torch.empty(first.shape, device="meta"), *args[1:], **kwargs).shape
                if shape[-1] == first.shape[-1]:
                    return first._like(first.local.reshape(*shape[:-1], first.local.shape[-1]))
            if func is F.cross_entropy and _is_plain(first, *args[1:], **kwargs):
                return _cross_entropy(first, *args[1:], **kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(SlicedLogits, SlicedLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    def _like(self, local: Tensor) -> "SlicedLogits":
        return SlicedLogits.of(local, self.peers, self.sizes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = torch.utils._pytree.tree_map_only(SlicedLogits, SlicedLogits.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def _writes(func: Any) -> bool:
    name: str = func.__name__
    return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )


def _is_plain(
    logits: SlicedLogits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    """Classes in the last dim, as indices, and none of the options that need all logits at once."""
    indices = isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == 1
    return logits.dim() == 2 and indices and weight is None and size_average is reduce is None and label_smoothing == 0


def _cross_entropy(
    logits: SlicedLogits, target: Tensor, *_: Any, ignore_index: int = -100, reduction: str = "mean", **__: Any
) -> Tensor:
    local = logits.local
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()  # as autocast does for the whole
    # Nothing but a look at each target: one outside of the vocabulary is an error here too, and on cuda an assertion.
    target.new_zeros(1).expand(logits.shape[-1])[target.masked_fill(target == ignore_index, 0)]
    start = sum(logits.sizes[: logits.peers.rank])
    losses: Tensor = _CrossEntropy.apply(local, target, start, ignore_index, logits.peers)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """Per row: log sum exp over all slices, less the logit of the target, which one rank holds."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, target: Tensor, start: int, ignore_index: int, peers: Peers) -> Tensor:
        most = local.amax(dim=-1) if local.shape[-1] else local.new_full(local.shape[:-1], float("-inf"))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=peers.group)
        shifted = (local - most.unsqueeze(-1)).exp()
        place = target - start
        mine = (place >= 0) & (place < local.shape[-1])
        place = place.masked_fill(~mine, 0)
        own = (local.gather(-1, place.unsqueeze(-1)).squeeze(-1) - most).masked_fill(~mine, 0.0)
        total, own = peers.add(torch.stack([shifted.sum(dim=-1), own])).unbind()
        ctx.save_for_backward(shifted, total, place, mine, target != ignore_index)
        return (total.log() - own).masked_fill(target == ignore_index, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        shifted, total, place, mine, counts = ctx.saved_tensors
        slope = shifted / total.unsqueeze(-1)
        slope.scatter_add_(-1, place.unsqueeze(-1), -mine.to(slope.dtype).unsqueeze(-1))
        return slope * (grad * counts).unsqueeze(-1), None, None, None, None
