"""A fingerprint of samples, so that ranks can tell whether they read the same data."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def digest(value: Any) -> str:
    """A hash of what a sample (or a list of them) holds: tensors, arrays, images, numbers, text, in any nest."""
    found = hashlib.sha256()
    for leaf in tree_leaves(value):
        found.update(_bytes_of(leaf))
    return found.hexdigest()[:16]


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            leaf = leaf.to_dense()
        plain = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{leaf.dtype}{tuple(leaf.shape)}".encode() + bytes(plain.numpy().tobytes())
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return f"{leaf.dtype}{leaf.shape}".encode() + bytes(leaf.tobytes())
    if isinstance(leaf, bool | int | float | complex | str | bytes | np.generic | None):
        return repr(leaf).encode()
    if callable(getattr(leaf, "tobytes", None)):  # images of PIL, which is no dependency
        return bytes(leaf.tobytes())
    return type(leaf).__name__.encode()  # its repr may hold an address
