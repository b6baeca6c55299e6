"""`share(dataset, world, ...)`: batches by step number, the same samples in every layout."""

import hashlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Subset, default_collate

from shoal.data.check import count_samples, is_stream, require_at_least, require_dataset
from shoal.data.loader import load
from shoal.data.plan import RankBatch, Sharing, count_steps
from shoal.data.reader import MapReader, Reader, StreamReader


class DataAxis(Protocol):
    """What sharing needs to know of a world: this process's place on the axis of data parallelism."""

    @property
    def data_rank(self) -> int: ...
    @property
    def num_data(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


def share(
    dataset: Any,
    world: DataAxis | None,
    *,
    batch_size: int,
    seed: int = 0,
    micro: int = 1,
    shuffle: bool = True,
    collate: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    epochs: int | None = None,
) -> "Shared":
    """Shares a data set out among the data ranks, batch by batch of the global order.

    Args:
        dataset: map-style (`__len__`, `__getitem__`) or iterable (`__iter__`, which must yield every sample
            on every rank, in the same order; see `shoal.data.stream` for `skip` and `set_epoch`).
        world: None for a single process.
        batch_size: samples per step over all ranks. The last batch of an epoch may be smaller.
        seed: decides the order of each epoch, and what the global streams of Python, numpy and torch yield
            inside `dataset[i]`, by epoch and index. `collate` may draw too, the same again after a resume;
            but a layout that cuts micro-batches elsewhere calls it on others.
        micro: micro-batches per rank and step; fewer where a rank has fewer samples.
        shuffle: an iterable data set keeps its own order either way.
        collate: makes a micro-batch of a list of samples; None is torch's `default_collate`.
        num_workers: processes that read ahead. Each reads the whole of an iterable data set.
        epochs: where to end; None goes on for ever. `shuffle=False, epochs=1` visits each sample once.

    Raises:
        DataError: the data set is empty, is no data set, or is shared out already.
    """
    require_dataset(dataset)
    require_at_least(1, batch_size=batch_size, micro=micro, epochs=epochs)
    require_at_least(0, num_workers=num_workers)
    sharing = Sharing(
        batch_size=int(batch_size),
        rank=world.data_rank if world else 0,
        num_ranks=world.num_data if world else 1,
        micro=int(micro),
        seed=int(seed),
        shuffle=shuffle,
        epochs=epochs,
    )
    return Shared(
        dataset,
        sharing,
        collate or default_collate,
        num_workers=num_workers,
        pin_memory=world is not None and world.device.type == "cuda",
    )


class Shared:
    """A data set shared out: `batches(step)` starts anywhere.

    Attributes:
        num_samples: samples of one epoch; None where only reading tells (an iterable data set).
        steps_per_epoch: likewise.
    """

    def __init__(
        self,
        dataset: Any,
        sharing: Sharing,
        collate: Callable[[list[Any]], Any],
        *,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self.num_samples = None if is_stream(dataset) else count_samples(dataset)
        self.steps_per_epoch = self.num_samples and count_steps(self.num_samples, sharing.batch_size)
        self.dataset = dataset
        self._sharing = sharing
        self._collate = collate
        self._num_workers = num_workers
        self._pin_memory = pin_memory

    @property
    def micro(self) -> int:
        """Into how many micro-batches a rank's batch is cut, where it has as many samples."""
        return self._sharing.micro

    def batches(self, start_step: int = 0) -> Iterator[RankBatch]:
        """This rank's batches from step `start_step` on.

        Earlier samples are not read, but for an iterable data set that cannot skip them.
        The number of steps is the same on every rank. Close the iterator, or drop it, to end its workers.
        """
        require_at_least(0, start_step=start_step)
        epochs = self._sharing.epochs
        if epochs is None or self.steps_per_epoch is None:
            steps: range | count[int] = count(start_step)
        else:
            steps = range(start_step, epochs * self.steps_per_epoch)
        return load(self._reader(), steps, num_workers=self._num_workers, pin_memory=self._pin_memory)

    def epoch_of(self, step: int) -> int | None:
        """The epoch in which a step lies; None for an iterable data set, whose batches tell it."""
        return None if self.steps_per_epoch is None else step // self.steps_per_epoch

    def fingerprint(self) -> str:
        """One line that is equal on ranks that share the same samples in the same order.

        Ranks that drew a split of their own, or read a folder that differs, show it here. No sample is read:
        a data set may open its files only once it is in a worker.
        """
        digest = hashlib.sha256()
        dataset = self.dataset
        while isinstance(dataset, Subset):
            digest.update(np.asarray(dataset.indices, dtype=np.int64).tobytes())
            dataset = dataset.dataset
        what = f"{type(dataset).__name__} of {'any length' if self.num_samples is None else self.num_samples}"
        sharing = self._sharing
        order = f"batches of {sharing.batch_size}, seed {sharing.seed}, shuffle {sharing.shuffle}"
        return f"{what}, {order}, indices {digest.hexdigest()[:12]}"

    def _reader(self) -> Reader:
        if self.num_samples is None:
            return StreamReader(self.dataset, self._sharing, self._collate)
        return MapReader(self.dataset, self.num_samples, self._sharing, self._collate)
