"""Map-style data: every layout and every number of workers gives the same samples, in the same order."""

import random
import traceback
from collections.abc import Iterable
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from shoal.data import RankBatch, Shared, share
from shoal.data.order import split_evenly
from shoal.errors import DataError


class Ids(Dataset[int]):
    """Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return index


class Augmented(Ids):
    """Sample i is i and one draw from each global stream."""

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]  # the class holds no ints
        draws = [random.random(), float(np.random.rand()), torch.rand((), dtype=torch.float64).item()]
        return torch.tensor([index, *draws], dtype=torch.float64)


class Counting(Ids):
    """Remembers what was read."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def rank(data_rank: int, num_data: int) -> SimpleNamespace:
    return SimpleNamespace(data_rank=data_rank, num_data=num_data, device=torch.device("cpu"))


def all_ranks(dataset: Any, num_data: int, **options: Any) -> list[Shared]:
    return [share(dataset, rank(number, num_data), **options) for number in range(num_data)]


def ids_by_step(ranks: Iterable[Shared], num_steps: int, start_step: int = 0) -> list[list[int]]:
    """The ids of each global batch: those of all ranks, joined in the order of the ranks."""
    steps = zip(*(islice(one.batches(start_step), num_steps) for one in ranks), strict=True)
    return [[index for batch in step for index in batch.sample_ids] for step in steps]


def rows(batch: RankBatch) -> torch.Tensor:
    return torch.cat(batch.micro)


@pytest.mark.parametrize("num_data", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_a_step_trains_on_the_same_samples_in_every_layout(num_data: int, micro: int) -> None:
    lone = ids_by_step([share(Ids(11), None, batch_size=4, seed=5)], num_steps=9)
    spread = ids_by_step(all_ranks(Ids(11), num_data, batch_size=4, seed=5, micro=micro), num_steps=9)
    assert spread == lone
    assert [len(ids) for ids in lone] == [4, 4, 3] * 3


@pytest.mark.parametrize("num_data", [1, 2, 4, 16])
def test_every_epoch_uses_every_sample_once(num_data: int) -> None:
    """D023: no tail is cut, for 11 samples over 4 ranks."""
    steps = ids_by_step(all_ranks(Ids(11), num_data, batch_size=4), num_steps=15)
    epochs = [list(chain(*steps[first : first + 3])) for first in range(0, 15, 3)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


@pytest.mark.parametrize("num_data", range(1, 9))
def test_evaluation_visits_each_sample_once_at_any_world_size(num_data: int) -> None:
    """D012: no sample is repeated to make shards equal; all ranks see the same number of steps."""
    shares = all_ranks(Ids(5), num_data, batch_size=3, shuffle=False, epochs=1)
    batches = [list(one.batches()) for one in shares]
    assert {len(own) for own in batches} == {2}
    seen = [index for own in batches for batch in own for index in batch.sample_ids]
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert ids_by_step(shares, num_steps=2) == [[0, 1, 2], [3, 4]]


def test_a_ragged_batch_is_spread_within_one_and_counted_truly() -> None:
    """D008: 6 samples over 4 ranks, and 2 samples over 4 ranks."""
    for num_samples, expected in [(6, [1, 2, 1, 2]), (2, [0, 1, 0, 1])]:
        batches = [next(one.batches()) for one in all_ranks(Ids(num_samples), 4, batch_size=8)]
        assert [batch.num_samples for batch in batches] == expected
        assert {batch.num_global for batch in batches} == {num_samples}
        assert all(batch.last_of_epoch for batch in batches)


def test_a_rank_without_samples_gets_the_first_of_the_batch_as_a_stand_in() -> None:
    empty, full = (next(one.batches()) for one in all_ranks(Ids(1), 2, batch_size=8, micro=3))
    assert (empty.num_samples, empty.sample_ids, rows(empty).tolist()) == (0, (), [0])
    assert (full.num_samples, full.sample_ids, rows(full).tolist()) == (1, (0,), [0])


def test_micro_batches_hold_the_samples_that_their_ids_name() -> None:
    """D059: inputs, labels and ids stay together."""
    labels = torch.arange(100) * 7
    shares = all_ranks(TensorDataset(torch.arange(100), labels), 3, batch_size=32, micro=4)
    for batch in (batch for one in shares for batch in islice(one.batches(), 8)):
        bounds = [split_evenly(0, batch.num_samples, len(batch.micro), part) for part in range(len(batch.micro))]
        for (start, stop), (inputs, targets) in zip(bounds, batch.micro, strict=True):
            assert tuple(inputs.tolist()) == batch.sample_ids[start:stop]
            assert torch.equal(targets, inputs * 7)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_continues_in_the_middle_of_an_epoch_under_another_layout(num_workers: int) -> None:
    """D126, D127: 20 samples, 2 ranks stop after 6; 1 and 4 ranks see the other 14, and then the next epoch."""
    before = ids_by_step(all_ranks(Ids(20), 2, batch_size=2, seed=1), num_steps=3)
    for num_data in (1, 4):
        after = ids_by_step(
            all_ranks(Ids(20), num_data, batch_size=2, seed=1, num_workers=num_workers), num_steps=17, start_step=3
        )
        assert sorted(chain(*before, *after[:7])) == list(range(20))
        assert sorted(chain(*after[7:])) == list(range(20))


def test_resume_reads_nothing_but_the_batch_it_starts_with() -> None:
    dataset = Counting(10**9)
    batch = next(share(dataset, None, batch_size=4).batches(start_step=10**12))
    assert dataset.read == list(batch.sample_ids)
    assert (batch.step, batch.epoch) == (10**12, 4000)


@pytest.mark.parametrize("start_step", range(8))
def test_augmentation_is_the_same_after_a_resume_and_in_workers(start_step: int) -> None:
    whole = [rows(batch) for batch in islice(share(Augmented(11), None, batch_size=4).batches(), 8)]
    for num_workers in (0, 2) if start_step in (0, 4) else (0,):
        resumed = share(Augmented(11), None, batch_size=4, num_workers=num_workers).batches(start_step)
        for expected, batch in zip(whole[start_step:], resumed, strict=False):
            assert torch.equal(rows(batch), expected)


@pytest.mark.parametrize("num_data", [2, 3])
def test_augmentation_is_the_same_in_every_layout(num_data: int) -> None:
    lone = [rows(batch) for batch in islice(share(Augmented(11), None, batch_size=4).batches(), 6)]
    shares = all_ranks(Augmented(11), num_data, batch_size=4, micro=2)
    for expected, *parts in zip(lone, *(one.batches() for one in shares), strict=False):
        assert torch.equal(torch.cat([rows(part) for part in parts if part.num_samples]), expected)


def test_augmentation_draws_anew_for_each_sample_epoch_and_stream() -> None:
    """D022: no two workers, samples or epochs repeat each other, nor do numpy and torch."""
    shared = share(Augmented(12), None, batch_size=4, num_workers=2)
    drawn = torch.cat([rows(batch) for batch in islice(shared.batches(), 9)])[:, 1:]
    assert drawn.unique().numel() == 3 * 36
    seeded = share(Augmented(12), None, batch_size=4, seed=1)
    assert not set(drawn.flatten().tolist()) & set(rows(next(seeded.batches()))[:, 1:].flatten().tolist())


def test_numpy_and_torch_do_not_draw_copies_of_one_stream() -> None:
    class Raw(Ids):
        def __getitem__(self, index: int) -> bool:
            numpy = np.random.randint(0, 2**32, size=3, dtype=np.uint32).tolist()
            return bool(set(numpy) & set(torch.randint(0, 2**32, (3,)).tolist()))

    assert not rows(next(share(Raw(64), None, batch_size=64).batches())).any()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Augmented(8), TensorDataset(torch.arange(8))])
def test_reading_data_leaves_the_streams_of_training_alone(dataset: Any, num_workers: int) -> None:
    def drawn(reading: bool) -> list[float]:
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        batches = share(dataset, None, batch_size=2, num_workers=num_workers).batches()
        values = []
        for _ in range(6):
            if reading:
                next(batches)
            values += [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return values

    assert drawn(reading=True) == drawn(reading=False)


def test_a_collate_function_that_draws_is_the_same_after_a_resume_and_in_workers() -> None:
    def masked(samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) * torch.randint(2, (len(samples),)) + random.random()

    def read(**options: Any) -> list[torch.Tensor]:
        shared = share(list(range(12)), None, batch_size=6, micro=2, collate=masked, **options)
        return [rows(batch) for batch in islice(shared.batches(1), 4)]

    state = torch.get_rng_state()
    alone, with_workers = read(), read(num_workers=2)
    assert all(torch.equal(one, other) for one, other in zip(alone, with_workers, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_collate_function_draws_the_same_for_the_same_micro_batch_of_another_layout() -> None:
    def noisy(samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) + torch.rand(len(samples), dtype=torch.float64)

    lone = next(share(list(range(8)), None, batch_size=8, micro=4, collate=noisy).batches())
    ranks = all_ranks(list(range(8)), 2, batch_size=8, micro=2, collate=noisy)
    spread = [micro for one in ranks for micro in next(one.batches()).micro]
    assert all(torch.equal(one, other) for one, other in zip(lone.micro, spread, strict=True))


def test_the_seed_of_a_rank_is_that_of_the_job() -> None:
    """D017: what ranks draw from their own streams before does not move the order."""
    orders = []
    for number, one in enumerate(all_ranks(Ids(6), 2, batch_size=6, seed=9)):
        torch.manual_seed(number)
        orders.append(next(one.batches()).sample_ids)
    assert sorted(orders[0] + orders[1]) == list(range(6))


def test_fingerprints_differ_where_ranks_drew_a_split_of_their_own() -> None:
    """D018: random_split from rank-dependent generators."""

    def fingerprint(generator_seed: int, **options: Any) -> str:
        generator = torch.Generator().manual_seed(generator_seed)
        train, _ = random_split(Ids(100), [80, 20], generator=generator)  # type: ignore[arg-type]  # int samples
        return share(train, None, batch_size=4, **options).fingerprint()

    assert fingerprint(0) == fingerprint(0)
    assert len({fingerprint(0), fingerprint(1), fingerprint(0, seed=1), fingerprint(0, shuffle=False)}) == 4


def test_lengths_and_epochs_are_known_before_reading() -> None:
    shared = share(Ids(11), rank(1, 3), batch_size=4)
    assert (shared.num_samples, shared.steps_per_epoch) == (11, 3)
    assert [shared.epoch_of(step) for step in range(7)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_run_of_two_epochs_ends_after_them() -> None:
    batches = list(share(Ids(5), None, batch_size=2, epochs=2).batches(start_step=1))
    assert [(batch.step, batch.epoch, batch.last_of_epoch) for batch in batches] == [
        (1, 0, False),
        (2, 0, True),
        (3, 1, False),
        (4, 1, False),
        (5, 1, True),
    ]
    assert list(share(Ids(5), None, batch_size=2, epochs=2).batches(start_step=6)) == []


def test_a_subset_is_indexed_by_its_own_numbers() -> None:
    batch = next(share(Subset(Ids(100), [90, 91, 92]), None, batch_size=3).batches())
    assert sorted(batch.sample_ids) == [0, 1, 2]
    assert sorted(rows(batch).tolist()) == [90, 91, 92]


class Broken(Ids):
    """Sample 3 cannot be read."""

    error: type[Exception] = KeyError

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise self.error("the user's own words")
        return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_sample_names_the_sample_and_the_users_line(num_workers: int) -> None:
    batches = share(Broken(5), None, batch_size=2, shuffle=False, num_workers=num_workers).batches()
    next(batches)
    with pytest.raises(KeyError) as caught:
        next(batches)
    shown = "".join(traceback.format_exception(caught.value)).replace("\\n", "\n")
    assert "while reading dataset[3] (epoch 0, step 1)" in shown
    assert "the user's own words" in shown
    assert "raise self.error" in shown


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_raises_stop_iteration_does_not_end_the_run_in_silence(num_workers: int) -> None:
    dataset = Broken(5)
    dataset.error = StopIteration
    batches = share(dataset, None, batch_size=2, shuffle=False, num_workers=num_workers).batches()
    next(batches)
    with pytest.raises(DataError, match=r"dataset\[3\] raised StopIteration \(epoch 0, step 1\)"):
        next(batches)


def test_an_error_while_collating_names_the_samples() -> None:
    ragged = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(RuntimeError, match="stack") as caught:
        next(share(ragged, None, batch_size=2, shuffle=False).batches())
    assert caught.value.__notes__ == ["while collating samples [0, 1] (epoch 0, step 0)"]
