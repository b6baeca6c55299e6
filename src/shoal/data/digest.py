"""A fingerprint of samples, so that ranks can tell whether they read the same data."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def digest(value: Any) -> str:
    """A hash of what a value holds: tensors, arrays, images, numbers, text, in any nest; equal only if bit-equal."""
    found = hashlib.sha256()
    for leaf in tree_leaves(value):
        for part in _parts_of(leaf):
            found.update(part)
    return found.hexdigest()[:16]


def _parts_of(leaf: Any) -> tuple[bytes | memoryview, ...]:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach() if leaf.layout is torch.strided else leaf.detach().to_dense()
        plain = leaf.cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{leaf.dtype}{tuple(leaf.shape)}".encode(), plain.numpy().data
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return f"{leaf.dtype}{leaf.shape}".encode(), leaf.tobytes()
    if isinstance(leaf, bool | int | float | complex | str | bytes | np.generic | None):
        return (repr(leaf).encode(),)
    if callable(getattr(leaf, "tobytes", None)):  # images of PIL, which is no dependency
        return (leaf.tobytes(),)
    return (type(leaf).__name__.encode(),)  # its repr may hold an address
