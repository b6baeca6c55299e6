"""Refuses, before anything runs, what cannot be shared sample by sample."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from shoal.errors import DataError

_HAND_OVER = "Hand over the dataset itself: share(dataset, world, batch_size=...)."


def require_at_least(minimum: int, **values: int | None) -> None:
    """Each value is an integer of at least `minimum`, or None."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
            raise DataError(f"{name}={value!r} must be a whole number.")
        if value is not None and value < minimum:
            raise DataError(f"{name}={value} must be at least {minimum}.")


def require_dataset(dataset: Any) -> None:
    """Refuses a data set that shares itself out already, or that has no samples to share."""
    for lesson in (_is_loader, _is_no_dataset, _is_batch, _is_sharded):
        if refusal := lesson(dataset):
            raise DataError(f"share got {refusal}")


def is_stream(dataset: Any) -> bool:
    """Whether the data set is read by iterating. torch's own Dataset has an index that only raises."""
    if isinstance(dataset, IterableDataset):
        return True
    return _has(dataset, "__iter__") and not (_has(dataset, "__getitem__") and _has(dataset, "__len__"))


def count_samples(dataset: Any) -> int:
    """The length of a data set with an index, at least one."""
    name = type(dataset).__name__
    if not _has(dataset, "__getitem__"):
        raise DataError(
            f"share got {name}, which has neither __getitem__ with __len__ (a map-style dataset) nor "
            "__iter__ (an iterable one). Give it one of the two."
        )
    if not _has(dataset, "__len__"):
        raise DataError(
            f"share got {name}, which has __getitem__ but no __len__: the order of an epoch needs the number "
            "of samples. Add __len__."
        )
    num_samples = len(dataset)
    if num_samples == 0:
        raise DataError(f"share got {name} with no sample: len(dataset) is 0. Check the path or the filter.")
    return num_samples


def _is_loader(dataset: Any) -> str | None:
    if isinstance(dataset, DataLoader):
        return (
            "a DataLoader, which has formed the batches already, and would form the same on every rank. "
            "Hand over its dataset and its collate function: share(loader.dataset, world, batch_size=..., "
            "collate=loader.collate_fn)."
        )
    if isinstance(dataset, Sampler):
        return (
            f"a sampler ({type(dataset).__name__}). Which rank gets which sample follows from seed, epoch "
            f"and step, so no sampler is needed. {_HAND_OVER}"
        )
    return None


def _is_no_dataset(dataset: Any) -> str | None:
    if isinstance(dataset, type):
        return f"the class {dataset.__name__}, not an object of it. Call it: {dataset.__name__}(...)."
    if isinstance(dataset, str | bytes):
        return f"the text {dataset!r}, whose samples would be its letters. Open what it names first."
    if isinstance(dataset, Mapping) and 0 not in dataset:
        return f"a mapping with the keys {list(dataset)[:4]}: samples are numbered from 0. {_HAND_OVER}"
    if isinstance(dataset, Iterator):
        return (
            f"an iterator ({type(dataset).__name__}), which can be read once, while each epoch and each "
            "resume starts a new pass. Hand over an object whose __iter__ returns a new iterator."
        )
    return None


def _is_batch(dataset: Any) -> str | None:
    """Columns instead of rows: whole tensors of one length, as `default_collate` makes them."""
    if not isinstance(dataset, list | tuple) or len(dataset) < 2:
        return None
    if not all(isinstance(column, torch.Tensor) and column.ndim for column in dataset):
        return None
    same_length = len({len(column) for column in dataset}) == 1
    # A list of tensors that look alike may well be a list of samples.
    alike = len({(column.ndim, column.dtype) for column in dataset}) == 1
    if not same_length or (alike and isinstance(dataset, list)):
        return None
    return (
        f"{len(dataset)} tensors of length {len(dataset[0])}: a batch, not a dataset. "
        "Make its rows the samples: torch.utils.data.TensorDataset(*tensors)."
    )


def _is_sharded(dataset: Any) -> str | None:
    # The field in which Hugging Face's `split_dataset_by_node` records its split.
    split: Any = getattr(dataset, "_distributed", None)
    if hasattr(split, "rank") and hasattr(split, "world_size"):
        return (
            f"an iterable dataset split by rank already (part {split.rank} of {split.world_size}), so "
            "samples would be lost. Leave out split_dataset_by_node: share gives each rank its part."
        )
    if any((kind.__module__.partition(".")[0], kind.__name__) == _STREAMING for kind in type(dataset).__mro__):
        return (
            "a StreamingDataset of mosaicml-streaming, which shares itself out by rank, so samples would be "
            "lost. Read its files by an iterable dataset that yields every sample on every rank."
        )
    return None


_STREAMING = ("streaming", "StreamingDataset")


def _has(dataset: Any, method: str) -> bool:
    # Python looks special methods up on the class, never on the object.
    return hasattr(type(dataset), method)
