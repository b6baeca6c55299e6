"""Randomness inside a sample: a function of (seed, epoch, sample), the same in every layout and worker."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from shoal.data.order import mix
from shoal.data.text import StdlibText, TextFolder, TokenFile, TokenWindows

# Exact types, since a subclass may draw: indexing them only looks up what is there.
_LOOK_UP_ONLY: tuple[type, ...] = (
    torch.Tensor,
    np.ndarray,
    list,
    tuple,
    range,
    TensorDataset,
    TokenWindows,
    StdlibText,
    TextFolder,
    TokenFile,
)


def draws_nothing(dataset: object, collate: object) -> bool:
    """Whether reading samples is known to use no random stream, so that none need be seeded or kept."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return collate is default_collate and type(dataset) in _LOOK_UP_ONLY


def seed_streams(*words: int) -> None:
    """Seeds the global streams of Python, numpy and torch (CPU) from `words`.

    `torch.manual_seed` would also reach for the accelerators, at many times the cost. Numpy and torch start
    one and the same Mersenne twister from 32 bits: from the same bits they would draw the same.
    """
    word = mix(*words)
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word >> 32)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Puts the global streams back as they were: reading data never shifts the dropout of training."""
    python, numpy, tensors = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(tensors)
