"""States to save, and what it means that two of them are the same."""

import struct

import numpy as np
import torch

from shoal.checkpoint import newest_good, read


def same(a, b):
    """Exact equality: types, key order, bits of floats and tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(x) is type(y) for x, y in zip(a, b, strict=True))
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and np.shape(a) == np.shape(b) and a.tobytes() == b.tobytes()
    return a == b


def bits(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def state_of(step, size=1000):
    """A small training state in which every value tells the step that it is of."""
    return {
        "model": {"blocks.0.weight": torch.full((size,), float(step)), "blocks.0.bias": torch.full((3,), float(-step))},
        "optimizer": {
            "state": {"blocks.0.weight": {"step": torch.tensor(float(step)), "exp_avg": torch.full((size,), step / 7)}}
        },
        "rng": {
            "python": (3, tuple(range(step, step + 30)), None),
            "numpy": np.arange(step, step + 20, dtype=np.uint32),
        },
        "step": step,
    }


def newest_tree(folder):
    """What a resume would start from."""
    found, _ = newest_good(folder)
    return read(found.path).tree
