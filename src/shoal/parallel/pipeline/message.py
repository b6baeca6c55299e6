"""What crosses a cut: one message of bytes for each micro-batch and direction.

Its first bytes say which tensors are there: a value without gradient is not one whose gradient is zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.dry import has_numbers
from shoal.parallel.pipeline.program import Meta

_ALIGNED = 64  # bytes; kernels read faster from here


def pack(tensors: Sequence[Tensor | None], metas: Sequence[Meta], device: torch.device) -> Tensor:
    """One message of bytes: which are there, then each."""
    starts, size = _places(metas)
    message = torch.empty(size, dtype=torch.uint8, device=device)
    message[: len(metas)] = 0
    for place, (tensor, meta, start) in enumerate(zip(tensors, metas, starts, strict=True)):
        if tensor is not None:
            message[place] = 1
            _at(message, meta, start).copy_(tensor.detach())
    return message


def unpack(message: Tensor, metas: Sequence[Meta], *, all_there: bool = False) -> list[Tensor | None]:
    """What `pack` was given, in the memory of the message.

    Args:
        all_there: known beforehand, so that nothing need be read on the host.
    """
    starts, _ = _places(metas)
    is_known = all_there or not has_numbers(message)
    there = [True] * len(metas) if is_known else [bool(flag) for flag in message[: len(metas)].cpu()]
    return [_at(message, meta, at) if yes else None for yes, meta, at in zip(there, metas, starts, strict=True)]


def message_bytes(metas: Sequence[Meta]) -> int:
    """How long it is."""
    return _places(metas)[1]


def _places(metas: Sequence[Meta]) -> tuple[list[int], int]:
    starts, at = [], _rounded(len(metas))
    for meta in metas:
        starts.append(at)
        at += _rounded(meta.numel * meta.dtype.itemsize)
    return starts, at


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _at(message: Tensor, meta: Meta, start: int) -> Tensor:
    return message[start : start + meta.numel * meta.dtype.itemsize].view(meta.dtype).view(meta.shape)
