"""Does a loss add up? Only then is it the same over the parts that ranks and micro-batches see."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.dry import is_dry
from shoal.errors import JobError
from shoal.job import Sum

Sums = Callable[[Any, Any], Mapping[str, Sum]]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # and 0.05 below; a loss that does not add up is far off


def check_additive(sums: Sums, output: Any, batch: Any, what: str) -> None:
    """Cut one part of a batch in two, and compare the sum over the halves with the sum over the whole.

    Nothing is said where that cannot be tried: shapes alone, a part of one sample, outputs that are not cut along the
    batch, sums that draw random numbers.

    Args:
        sums: `(output, batch) -> {name: Sum}`, a loss or metrics; called without gradient.

    Raises:
        JobError: it does not add up, so another layout would be another training.
    """
    num_samples = _common_length(batch)
    if is_dry() or num_samples is None or num_samples < 2 or _is_ambiguous(output, num_samples):
        return
    with torch.no_grad():
        try:
            whole, again = sums(output, batch), sums(output, batch)
            half = num_samples // 2
            first = sums(_cut(output, num_samples, slice(0, half)), _cut(batch, num_samples, slice(0, half)))
            second = sums(_cut(output, num_samples, slice(half, None)), _cut(batch, num_samples, slice(half, None)))
        except Exception:
            return  # the job's code does not take a cut batch: that proves nothing, and real errors come in the step
    for name in whole:
        if name not in first or name not in second or not _same(whole[name], again[name]):
            continue
        if not _same(whole[name], first[name] + second[name]):
            raise JobError(
                f"{what} does not add up{f' ({name})' if len(whole) > 1 else ''}: over {num_samples} samples it is "
                f"{_show(whole[name])}, but over its halves {_show(first[name])} + {_show(second[name])}. Ranks and "
                "micro-batches see parts of the batch, so in this layout it would be another training. Is it a mean, "
                "or a maximum, wrapped as Sum(mean, 1)? Use mean_loss or token_loss, or give the sum and its count. "
                "Is a term added once per batch? Multiply it by the count. Does it compare samples with each other "
                "(contrastive)? Then train it with --layout lone."
            )


def _common_length(batch: Any) -> int | None:
    lengths = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    return lengths.pop() if len(lengths) == 1 else None


def _is_ambiguous(output: Any, num_samples: int) -> bool:
    """A time dimension as long as the batch: nobody knows which of the two to cut."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return any(tensor.dim() > 2 and list(tensor.shape).count(num_samples) > 1 for tensor in tensors)


def _cut(tree: Any, num_samples: int, part: slice) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        return tensor[part] if tensor.dim() and tensor.shape[0] == num_samples else tensor

    return tree_map_only(Tensor, cut, tree)


def _same(a: Sum, b: Sum) -> bool:
    if a.value.shape != b.value.shape:
        return False
    tolerance = _TOLERANCE.get(a.value.dtype, 0.05)
    scale = float(a.value.detach().double().abs().max()) + 1e-12 if a.value.numel() else 1.0
    apart = float((a.value.detach().double() - b.value.detach().double()).abs().max()) if a.value.numel() else 0.0
    return math.isclose(float(a.count), float(b.count), rel_tol=1e-6) and (apart <= tolerance * scale or apart != apart)


def _show(sums: Sum) -> str:
    value = f"{float(sums.value):.6g}" if sums.value.numel() == 1 else f"a tensor {tuple(sums.value.shape)}"
    return f"Sum({value}, {float(sums.count):g})"
