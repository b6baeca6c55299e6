"""Iterable data: no sample twice, none lost, whoever reads."""

import random
from collections.abc import Iterator
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shoal.data import Shared, share
from shoal.errors import DataError


class Stream(IterableDataset[torch.Tensor]):
    """Yields its positions, each with a draw; shares itself out by worker as torch's manual advises."""

    def __init__(self, num_samples: int | None) -> None:
        self.num_samples = num_samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        numbers = count() if self.num_samples is None else iter(range(self.num_samples))
        for number in numbers if worker is None else islice(numbers, worker.id, None, worker.num_workers):
            yield torch.tensor([number, self.epoch, random.random()], dtype=torch.float64)


class Shards(Stream):
    """Four files of five samples; `skip` opens the right one."""

    def __init__(self, first: int = 0, opened: list[int] | None = None) -> None:
        super().__init__(20)
        self.first = first
        self.opened: list[int] = [] if opened is None else opened

    def skip(self, num_samples: int) -> "Shards":
        rest = Shards(self.first + num_samples, self.opened)
        rest.epoch = self.epoch
        return rest

    def __iter__(self) -> Iterator[torch.Tensor]:
        for shard in range(self.first // 5, 4):
            self.opened.append(shard)
            for number in range(max(self.first, shard * 5), shard * 5 + 5):
                yield torch.tensor([number, self.epoch, random.random()], dtype=torch.float64)


def all_ranks(dataset: Any, num_data: int, **options: Any) -> list[Shared]:
    worlds = [
        SimpleNamespace(data_rank=rank, num_data=num_data, device=torch.device("cpu")) for rank in range(num_data)
    ]
    return [share(dataset, world, **options) for world in worlds]


def rows_by_step(shares: list[Shared], num_steps: int, start_step: int = 0) -> list[torch.Tensor]:
    """The rows of each global batch: those of all ranks, joined in the order of the ranks."""
    steps = zip(*(islice(one.batches(start_step), num_steps) for one in shares), strict=True)
    return [torch.cat([part for batch in step if batch.num_samples for part in batch.micro]) for step in steps]


def numbers(rows: list[torch.Tensor]) -> list[list[int]]:
    return [step[:, 0].long().tolist() for step in rows]


THREE_EPOCHS_OF_TEN = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 3


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("num_data", [1, 2, 5])
def test_ranks_and_workers_share_a_stream_without_duplicate_or_loss(num_data: int, num_workers: int) -> None:
    """D019, D020: neither rank nor worker repeats what another one yields."""
    shares = all_ranks(Stream(10), num_data, batch_size=4, micro=2, num_workers=num_workers)
    assert numbers(rows_by_step(shares, num_steps=9)) == THREE_EPOCHS_OF_TEN


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_ends_for_all_ranks_at_the_same_step(num_workers: int) -> None:
    shares = all_ranks(Stream(9), 3, batch_size=4, epochs=2, num_workers=num_workers)
    batches = [list(one.batches()) for one in shares]
    told = [[(b.step, b.epoch, b.num_global, b.last_of_epoch) for b in own] for own in batches]
    assert told[0] == [
        (0, 0, 4, False),
        (1, 0, 4, False),
        (2, 0, 1, True),
        (3, 1, 4, False),
        (4, 1, 4, False),
        (5, 1, 1, True),
    ]
    assert told[1] == told[2] == told[0]
    assert [[b.num_samples for b in own][:3] for own in batches] == [[1, 1, 0], [1, 1, 0], [2, 2, 1]]


def test_a_pass_of_full_batches_ends_with_the_last_of_them() -> None:
    batches = list(share(Stream(8), None, batch_size=4, epochs=1).batches())
    assert [batch.last_of_epoch for batch in batches] == [False, True]
    assert [batch.sample_ids for batch in batches] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_endless_stream_is_read_as_far_as_needed(num_workers: int) -> None:
    shares = all_ranks(Stream(None), 2, batch_size=3, num_workers=num_workers)
    assert numbers(rows_by_step(shares, num_steps=3, start_step=5)) == [[15, 16, 17], [18, 19, 20], [21, 22, 23]]
    assert shares[0].steps_per_epoch is None
    assert shares[0].num_samples is None
    assert shares[0].epoch_of(7) is None


@pytest.mark.parametrize("start_step", range(8))
@pytest.mark.parametrize("dataset", [Stream(20), Shards()], ids=["reading", "skipping"])
def test_resume_continues_a_stream_bit_for_bit(dataset: Stream, start_step: int) -> None:
    """D139: in the third of four shards, at its edges, and in the next epoch, augmentation included."""
    whole = rows_by_step([share(dataset, None, batch_size=6)], num_steps=12)
    resumed = rows_by_step(all_ranks(dataset, 2, batch_size=6), num_steps=12 - start_step, start_step=start_step)
    assert torch.equal(torch.cat(resumed), torch.cat(whole[start_step:]))


def test_resume_skips_what_the_dataset_can_skip() -> None:
    dataset = Shards()
    assert next(share(dataset, None, batch_size=6).batches(2)).sample_ids == (12, 13, 14, 15, 16, 17)
    assert dataset.opened[-2:] == [2, 3]
    assert set(dataset.opened[:-2]) <= {0, 1}  # two short looks, to see that a skip changes nothing


def test_draws_are_the_same_in_workers_and_differ_between_samples_and_epochs() -> None:
    alone = torch.cat(rows_by_step([share(Stream(10), None, batch_size=4)], num_steps=6))
    with_workers = torch.cat(rows_by_step([share(Stream(10), None, batch_size=4, num_workers=2)], num_steps=6))
    assert torch.equal(alone, with_workers)
    assert alone[:, 2].unique().numel() == 20
    assert alone[:, 1].tolist() == [0] * 10 + [1] * 10


def test_reading_a_stream_leaves_the_streams_of_training_alone() -> None:
    batches = share(Stream(10), None, batch_size=4).batches()
    random.seed(1)
    expected = [random.random() for _ in range(4)]
    random.seed(1)
    drawn = [random.random() for _ in islice(batches, 4)]
    assert drawn == expected


def test_an_empty_stream_is_refused_and_not_waited_for() -> None:
    """D108: a rank that never gets a sample does not spin for ever."""
    with pytest.raises(DataError, match="pass 0 over the iterable dataset yields no sample"):
        next(share(Stream(0), None, batch_size=2).batches())


def test_a_stream_that_can_be_read_once_is_named_at_its_second_pass() -> None:
    class Once(IterableDataset[int]):
        def __init__(self) -> None:
            self.source = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.source

    batches = share(Once(), None, batch_size=2).batches()
    assert [next(batches).sample_ids for _ in range(2)] == [(0, 1), (2,)]
    with pytest.raises(DataError, match=r"pass 1 .* Each iter\(dataset\) must start a new pass"):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_stream_names_the_position(num_workers: int) -> None:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(3)
            raise OSError("the user's own words")

    batches = share(Broken(), None, batch_size=2, num_workers=num_workers).batches()
    with pytest.raises(OSError, match="the user's own words") as caught:
        list(batches)
    shown = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "while reading sample 3 of pass 0" in shown


def test_the_worker_is_hidden_while_the_stream_is_read_and_only_then() -> None:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        info = get_worker_info()
        return torch.tensor([-1 if info is None else info.num_workers])

    batches = share(Stream(8), None, batch_size=2, collate=collate, num_workers=2, epochs=1).batches()
    assert [batch.micro[0].item() for batch in batches] == [2, 2, 2, 2]
