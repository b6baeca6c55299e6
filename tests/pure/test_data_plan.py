"""Ranks and micro-batches cut the same global batch, whatever the layout."""

from dataclasses import replace

import pytest

from shoal.data.plan import GlobalBatch, count_steps, cut, locate

SIZES = [1, 2, 3, 4, 5, 7, 8, 11, 12, 13]


@pytest.mark.parametrize("num_samples", SIZES)
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8, 20])
def test_the_steps_of_an_epoch_visit_every_position_once(num_samples: int, batch_size: int) -> None:
    steps_per_epoch = count_steps(num_samples, batch_size)
    for epoch in range(3):
        steps = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
        batches = [locate(step, num_samples, batch_size) for step in steps]
        assert [position for batch in batches for position in range(batch.start, batch.stop)] == list(
            range(num_samples)
        )
        assert {batch.epoch for batch in batches} == {epoch}
        assert [batch.step for batch in batches] == list(steps)
        assert [batch.last_of_epoch for batch in batches] == [False] * (steps_per_epoch - 1) + [True]
        assert all(batch.stop - batch.start == batch_size for batch in batches[:-1])


@pytest.mark.parametrize("num_ranks", range(1, 10))
@pytest.mark.parametrize("micro", [1, 2, 3, 5])
@pytest.mark.parametrize("num_global", range(1, 14))
def test_ranks_and_micro_batches_join_to_the_global_batch(num_global: int, num_ranks: int, micro: int) -> None:
    batch = GlobalBatch(step=2, epoch=0, start=40, stop=40 + num_global, last_of_epoch=True)
    plans = [cut(batch, rank=rank, num_ranks=num_ranks, micro=micro) for rank in range(num_ranks)]
    real = [plan for plan in plans if plan.num_samples]
    joined = [position for plan in real for start, stop in plan.micro for position in range(start, stop)]
    assert joined == list(range(40, 40 + num_global))
    shares = [plan.num_samples for plan in plans]
    assert sum(shares) == num_global
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("num_samples", range(1, 9))
@pytest.mark.parametrize("micro", [1, 2, 3, 7])
def test_micro_batches_are_never_empty_and_within_one_of_each_other(num_samples: int, micro: int) -> None:
    plan = cut(_batch(num_samples), rank=0, num_ranks=1, micro=micro)
    lengths = [stop - start for start, stop in plan.micro]
    assert len(lengths) == min(micro, num_samples)
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1


def test_a_rank_without_samples_holds_the_first_of_the_batch_and_counts_none() -> None:
    plans = [cut(_batch(2), rank=rank, num_ranks=4, micro=3) for rank in range(4)]
    assert [(plan.num_samples, plan.micro) for plan in plans] == [
        (0, ((10, 11),)),
        (1, ((10, 11),)),
        (0, ((10, 11),)),
        (1, ((11, 12),)),
    ]


def test_step_number_alone_finds_the_place() -> None:
    """Resume in the middle of epoch 10**9 costs what step 0 costs."""
    batch = locate(3 * 10**9 + 1, num_samples=11, batch_size=4)
    first = GlobalBatch(step=1, epoch=0, start=4, stop=8, last_of_epoch=False)
    assert batch == replace(first, step=3 * 10**9 + 1, epoch=10**9)


def _batch(num_samples: int) -> GlobalBatch:
    return GlobalBatch(step=0, epoch=0, start=10, stop=10 + num_samples, last_of_epoch=False)
