"""What cannot be shared is refused before anything runs, with the way out."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from shoal.data import share
from shoal.errors import DataError

ROWS = TensorDataset(torch.arange(4))


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class StreamingDataset(Numbers):
    """Stands for the class of the same name in the package `streaming`."""


StreamingDataset.__module__ = "streaming.base.dataset"


def split_by_node() -> Numbers:
    dataset = Numbers()
    dataset._distributed = SimpleNamespace(rank=1, world_size=2)  # type: ignore[attr-defined]  # as datasets does
    return dataset


@pytest.mark.parametrize(
    ("dataset", "lesson"),
    [
        (DataLoader(ROWS), r"a DataLoader, .* share\(loader.dataset"),
        (RandomSampler(ROWS), "a sampler .*no sampler is needed"),
        (DistributedSampler(ROWS, num_replicas=2, rank=0), r"a sampler \(DistributedSampler\)"),
        (BatchSampler(RandomSampler(ROWS), 2, drop_last=False), r"a sampler \(BatchSampler\)"),
        ([torch.zeros(8, 3), torch.zeros(8)], r"2 tensors of length 8: a batch, .*TensorDataset"),
        ((torch.zeros(8, 3), torch.zeros(8, 3)), "2 tensors of length 8: a batch"),
        ({"x": torch.zeros(8), "y": torch.zeros(8)}, r"a mapping with the keys \['x', 'y'\]"),
        ("data/train.txt", "the text 'data/train.txt'"),
        (NoLength, r"the class NoLength, .*Call it: NoLength\(\.\.\.\)"),
        (NoLength(), "NoLength, which has __getitem__ but no __len__"),
        (object(), "neither __getitem__ with __len__ .* nor __iter__"),
        (None, "NoneType, which has neither"),
        ((number for number in range(3)), r"an iterator \(generator\), which can be read once"),
        ([], "list with no sample"),
        (TensorDataset(torch.zeros(0)), "TensorDataset with no sample"),
        (split_by_node(), r"part 1 of 2\).*split_dataset_by_node"),
        (StreamingDataset(), "a StreamingDataset of mosaicml-streaming"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, lesson: str) -> None:
    with pytest.raises(DataError, match=lesson):
        share(dataset, None, batch_size=2)


@pytest.mark.parametrize(
    ("options", "lesson"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be a whole number"),
        ({"batch_size": True}, "batch_size=True must be a whole number"),
        ({"batch_size": 2, "micro": 0}, "micro=0 must be at least 1"),
        ({"batch_size": 2, "epochs": 0}, "epochs=0 must be at least 1"),
        ({"batch_size": 2, "num_workers": -1}, "num_workers=-1 must be at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], lesson: str) -> None:
    with pytest.raises(DataError, match=lesson):
        share(ROWS, None, **options)


def test_a_negative_step_is_refused_before_the_first_batch_is_asked_for() -> None:
    with pytest.raises(DataError, match="start_step=-1 must be at least 0"):
        share(ROWS, None, batch_size=2).batches(-1)


@pytest.mark.parametrize(
    "dataset",
    [
        [torch.zeros(3, 4), torch.zeros(3, 4)],
        [torch.zeros(3, 4), torch.zeros(3, 7)],
        [(torch.zeros(8, 3), torch.zeros(8))],
        torch.zeros(4, 2),
        {0: torch.zeros(1), 1: torch.zeros(1)},
        range(5),
    ],
)
def test_what_may_be_a_dataset_is_taken(dataset: Any) -> None:
    assert next(share(dataset, None, batch_size=1).batches()).num_samples == 1
