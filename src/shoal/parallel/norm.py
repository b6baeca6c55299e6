"""BatchNorm over the global batch: the statistics of one process, on any number of ranks, on CPU too.

    rank 0: 9 rows ─ mean, M2, 9 ─┐
                                  ├─ all_gather ─ merge by true counts ─ the same mean and variance everywhere
    rank 1: 1 row  ─ mean, M2, 1 ─┘

M2 is the sum of squared distances from the mean; (mean, M2, count) merge without cancellation
(Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979).

Dimensions: C channels (dim 1), R ranks.
"""

from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from shoal.errors import JobError


class Scope:
    """The ranks that share one batch, and whether this rank's part counts; one for all norms of a model."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.live = True
        self.names: list[str] = []

    @property
    def tracks(self) -> bool:
        """Whether the running statistics are kept here: on every rank, but by one alone of those that share them."""
        return True

    def gather(self, own: Tensor) -> Tensor:
        """(N) of this rank -> (R, N) of all."""
        gathered = own.new_empty(self.num_ranks, own.numel())
        try:
            # Into a list of rows: the one-tensor form was renamed between torch 2.9 and 2.13.
            dist.all_gather(list(gathered), own, group=self.group)
        except RuntimeError as error:
            if "imed out" in str(error):
                error.add_note(
                    "This rank waited in a BatchNorm for the statistics of the others. Is it in a branch that not "
                    "every rank runs? A BatchNorm sees the global batch, so every rank must call it in every step: "
                    "keep it out of the branch, or take GroupNorm or LayerNorm in there."
                )
            raise
        return gathered

    def add_up(self, own: Tensor) -> None:
        """The sum over all ranks, in place."""
        dist.all_reduce(own, group=self.group)

    def release(self) -> None:
        """The world closes: from here on each rank is alone."""
        self.group, self.num_ranks = None, 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scope":
        return self  # a copied model still takes part in the same group, which itself cannot be copied

    def __reduce__(self) -> tuple[type["Scope"], tuple[()]]:
        return Scope, ()  # a model unpickled elsewhere is alone there


class Moments(NamedTuple):
    """What a batch is to its norm: `mean` (C), biased `var` (C), `num_values` per channel (0-dim)."""

    mean: Tensor
    var: Tensor
    num_values: Tensor


class GlobalBatchNorm(_BatchNorm):
    """A BatchNorm whose batch, in training mode, is that of all ranks of its scope."""

    scope: Scope
    index: int  # among the norms of the model

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.scope.num_ranks == 1 or self._has_wrong_channels(input):
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # untyped in torch
        count = _count(input) if self.scope.live else 0
        moments = _merge(self._same_norm(self.scope.gather(_local_moments(input.detach(), count, self.index))))
        # Whoever holds two values knows that the world does; only the others look, and wait for the device.
        num_values = 2 if count > 1 else int(moments.num_values)
        if num_values == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{torch.Size([1, input.shape[1], *[1] * (input.dim() - 2)])}"
            )
        self._track(moments, empty=num_values == 0)
        output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            input, self.weight, self.bias, moments, self.eps, self.scope
        )
        return output

    def _has_wrong_channels(self, input: Tensor) -> bool:
        """True where torch's own forward must speak, before any collective."""
        sized = self.affine or self.track_running_stats
        return input.dim() < 2 or (sized and input.shape[1] != self.num_features)

    def _same_norm(self, gathered: Tensor) -> Tensor:
        """The ranks' moments without the index; statistics of two layers must never be merged."""
        indices, moments = gathered[:, -1], gathered[:, :-1]
        if gathered.is_cuda:  # looking would wait for the device: what is wrong becomes nan, and stops the step
            return torch.where((indices != self.index).any(), torch.nan, moments)
        others = sorted({int(index) for index in indices} - {self.index})
        if others:
            raise JobError(
                f"some ranks are in the BatchNorm {self.scope.names[others[0]]!r} while this one is in "
                f"{self.scope.names[self.index]!r}. Its batch is that of all ranks, so all must call the same norms in "
                "the same order. Are layers dropped or chosen at random? Replicas draw different random numbers: use "
                "GroupNorm or LayerNorm in such layers, or say batch_norm='local' in the job."
            )
        return moments

    @torch.no_grad()
    def _track(self, moments: Moments, *, empty: bool) -> None:
        if not self.track_running_stats or self.num_batches_tracked is None or not self.scope.tracks:
            return
        self.num_batches_tracked.add_(1)
        if empty or self.running_mean is None or self.running_var is None:
            return
        dtype = self.running_mean.dtype
        share = self.num_batches_tracked.to(dtype).reciprocal() if self.momentum is None else self.momentum
        unbiased = moments.var * (moments.num_values / (moments.num_values - 1))
        self.running_mean.lerp_(moments.mean.to(dtype), share)
        self.running_var.lerp_(unbiased.to(dtype), share)


class GlobalBatchNorm1d(GlobalBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the global batch."""


class GlobalBatchNorm2d(GlobalBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the global batch."""


class GlobalBatchNorm3d(GlobalBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over the global batch."""


class GlobalSyncBatchNorm(GlobalBatchNorm, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm`, on CPU too."""


_GLOBAL: dict[type[_BatchNorm], type[GlobalBatchNorm]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
    nn.BatchNorm3d: GlobalBatchNorm3d,
    nn.SyncBatchNorm: GlobalSyncBatchNorm,
}


def globalise_batch_norm(model: nn.Module, group: dist.ProcessGroup | Scope | None) -> list[str]:
    """Makes every BatchNorm of the model use the batch of the whole group, in place.

    Module objects, parameters, buffers and their names stay the user's; only the class of the norms changes.
    Gradients of weight and bias are this rank's part, to be summed over the group like those of any layer.
    Give it a group that nothing else uses: collectives of a group must come in the same order on every rank,
    and reductions that overlap with backward come earlier on a rank that leaves a parameter unused.

    Args:
        group: The ranks that share a batch, or what takes their place; None where there is only this process.

    Returns:
        The names of the converted modules.

    Raises:
        JobError: A BatchNorm has a forward of its own, a process group of its own, or is still lazy.
    """
    scope = group if isinstance(group, Scope) else Scope(group)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    refused = {name: why for name, norm in norms.items() if (why := _why_not(norm))}
    if refused and scope.num_ranks > 1:
        raise JobError(
            "Data-parallel BatchNorm sees the batch of all ranks; these modules cannot be given it:\n"
            + "\n".join(f"  {name or 'the model itself'}: {why}" for name, why in refused.items())
            + "\nOr state in the job that each rank normalises its own part: batch_norm='local'."
        )
    converted = {name: norm for name, norm in norms.items() if name not in refused}
    scope.names = list(converted)
    for index, norm in enumerate(converted.values()):
        norm.index = index  # type: ignore[assignment]  # as below
        norm.__class__ = _global_class(type(norm))  # type: ignore[arg-type]  # mypy: a metaclass's __hash__
        norm.scope = scope  # type: ignore[assignment]  # nn.Module types all attributes as tensors or modules
    return list(converted)


def has_batch_norm(model: nn.Module) -> list[str]:
    """The names of the modules that use batch statistics in training; those frozen by `eval()` do not."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or not model.training)
    ]


def release_batch_norm(model: nn.Module) -> None:
    """Lets go of the group: from here on every norm sees its own batch."""
    for module in model.modules():
        if isinstance(module, GlobalBatchNorm):
            module.scope.release()


def set_live(model: nn.Module, live: bool) -> None:
    """Says whether this rank's next batch counts; a stand-in (live=False) joins in with weight 0."""
    for module in model.modules():
        if isinstance(module, GlobalBatchNorm):
            module.scope.live = live


def _why_not(norm: _BatchNorm) -> str:
    """Why this module cannot be converted; empty where it can."""
    if isinstance(norm, _LazyNormBase):
        return "it is lazy and has not seen its shape yet; run one batch through the model in job.model()"
    if "forward" in vars(norm) or type(norm).forward not in _KNOWN_FORWARDS:
        return f"{type(norm).__qualname__} has its own forward; use nn.BatchNorm1d, 2d or 3d, or another norm"
    if isinstance(norm, nn.SyncBatchNorm) and norm.process_group is not None:
        return "it brings its own process_group; leave that out, the layout says which ranks share a batch"
    return ""


_KNOWN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, GlobalBatchNorm.forward)


@cache
def _global_class(plain: type[_BatchNorm]) -> type[GlobalBatchNorm]:
    if issubclass(plain, GlobalBatchNorm):
        return plain
    return _GLOBAL.get(plain) or type(f"Global{plain.__name__}", (GlobalBatchNorm, plain), {})


def _count(input: Tensor) -> int:
    return input.shape[0] * prod(input.shape[2:])


def _dims(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _like_channels(per_channel: Tensor, input: Tensor) -> Tensor:
    """(C) -> (1, C, 1, ...), so that it broadcasts over the input."""
    return per_channel.view(1, -1, *[1] * (input.dim() - 2))


def _compute_dtype(input: Tensor) -> torch.dtype:
    return torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype


def _local_moments(input: Tensor, count: int, index: int) -> Tensor:
    """[mean, M2, count, index of the norm] of this rank, (2C + 2) of float64; zeros where nothing counts."""
    moments = input.new_zeros(2 * input.shape[1] + 2, dtype=torch.float64)
    moments[-1] = index
    if count == 0:
        return moments
    values = input.to(_compute_dtype(input))
    mean = values.mean(_dims(input))
    m2 = (values - _like_channels(mean, input)).square_().sum(_dims(input))
    return torch.cat([mean, m2, mean.new_tensor([count, index])], out=moments)


def _merge(gathered: Tensor) -> Moments:
    """Merges the ranks' [mean, M2, count]; every rank does the same sums in the same order, so bit-equal."""
    num_channels = gathered.shape[1] // 2
    means, m2s, counts = torch.split(gathered, [num_channels, num_channels, 1], dim=1)
    count = counts.sum()
    divisor = count.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    return Moments(mean, m2 / divisor, count)


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with the gradient through the global mean and var.

    With xhat the normalised input and N the global count,
        dx = weight / std * (dy - sum(dy) / N - xhat * sum(dy * xhat) / N)    sums over all ranks (all_reduce)
        dweight = sum(dy * xhat),  dbias = sum(dy)                            sums over this rank
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Moments,
        eps: float,
        scope: Scope,
    ) -> Tensor:
        dtype = _compute_dtype(input)
        mean, var = moments.mean.to(dtype), moments.var.to(dtype)
        weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(var + eps), moments.num_values.to(dtype))
        ctx.scope, ctx.live = scope, scope.live
        return F.batch_norm(input, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inv_std, num_values = ctx.saved_tensors
        grad = grad_output.to(mean.dtype)
        xhat = (input - _like_channels(mean, input)).mul_(_like_channels(inv_std, input))
        sums = torch.stack([grad.sum(_dims(input)), (grad * xhat).sum(_dims(input))])
        if not ctx.live:
            sums = torch.zeros_like(sums)  # a stand-in may hold anything, and 0 * inf is not 0
        grad_bias, grad_weight = sums.clone()
        grad_input = torch.zeros_like(input)
        if ctx.needs_input_grad[0]:
            ctx.scope.add_up(sums)
        if ctx.needs_input_grad[0] and ctx.live:
            shift, slope = (_like_channels(s, input) for s in sums / num_values.clamp(min=1))
            scale = _like_channels(inv_std if weight is None else inv_std * weight, input)
            grad_input = (grad - shift).sub_(xhat.mul_(slope)).mul_(scale)
        grads = (grad_input, grad_weight, grad_bias)
        wanted = zip(grads, ctx.needs_input_grad[:3], strict=True)
        return *(grad if need else None for grad, need in wanted), None, None, None
