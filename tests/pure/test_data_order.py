"""The order of an epoch is a permutation, uniform, stable for ever, and cut without gaps."""

import tracemalloc
from functools import cache
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.order import mix, sample_order, split_evenly


@given(num_samples=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_every_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = sample_order(num_samples, seed, epoch, 0, num_samples)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num_samples))


@given(data=st.data(), num_samples=st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_a_stretch_of_the_order_is_what_the_whole_order_has_there(data: st.DataObject, num_samples: int) -> None:
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, num_samples))
    whole = sample_order(num_samples, 3, 1, 0, num_samples)
    assert sample_order(num_samples, 3, 1, start, stop).tolist() == whole[start:stop].tolist()


def test_the_order_never_changes_between_versions() -> None:
    assert sample_order(10, 0, 0, 0, 10).tolist() == [8, 9, 3, 0, 6, 7, 2, 1, 5, 4]
    assert sample_order(10, 0, 1, 0, 10).tolist() == [0, 9, 4, 5, 7, 3, 8, 6, 2, 1]
    assert sample_order(10**15, 7, 3, 10**14, 10**14 + 2).tolist() == [715898215451372, 579156370461365]


def test_the_middle_of_a_huge_epoch_takes_no_memory() -> None:
    tracemalloc.start()
    order = sample_order(2**62, 0, 0, 2**61, 2**61 + 512)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(order.tolist())) == 512
    assert all(0 <= index < 2**62 for index in order.tolist())
    assert peak_bytes < 1_000_000


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    assert sample_order(9, 5, 2, 3, 7, shuffle=False).tolist() == [3, 4, 5, 6]


def test_seed_and_epoch_each_give_another_order() -> None:
    orders = {tuple(sample_order(100, seed, epoch, 0, 100)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


NUM_EPOCHS = 2000


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5, 6, 7, 11, 16, 50])
def test_every_sample_is_equally_likely_at_every_position(num_samples: int) -> None:
    orders = _orders(num_samples)
    positions = np.arange(num_samples)
    counts = np.zeros((num_samples, num_samples))
    np.add.at(counts, (np.broadcast_to(positions, orders.shape), orders), 1)
    assert _deviation(counts, degrees=(num_samples - 1) ** 2) < 5


@pytest.mark.parametrize("num_samples", [3, 4, 5, 6, 8, 11])
def test_neighbours_in_the_order_are_uncorrelated(num_samples: int) -> None:
    orders = _orders(num_samples)
    counts = np.zeros((num_samples, num_samples))
    np.add.at(counts, (orders[:, 0], orders[:, 1]), 1)
    off_diagonal = counts[~np.eye(num_samples, dtype=bool)]
    assert _deviation(off_diagonal, degrees=len(off_diagonal) - 1) < 5


@pytest.mark.parametrize("num_samples", [2, 3, 5, 6])
def test_the_order_of_an_epoch_tells_nothing_about_the_next(num_samples: int) -> None:
    first = _orders(num_samples)[:, 0]
    counts = np.zeros((num_samples, num_samples))
    np.add.at(counts, (first[:-1], first[1:]), 1)
    assert _deviation(counts, degrees=num_samples**2 - 1) < 5


@cache
def _orders(num_samples: int) -> np.ndarray:
    return np.stack([sample_order(num_samples, 0, epoch, 0, num_samples) for epoch in range(NUM_EPOCHS)])


def _deviation(counts: np.ndarray, degrees: int) -> float:
    """Standard deviations by which chi-square exceeds its mean if all cells were equally likely."""
    expected = counts.sum() / counts.size
    return (((counts - expected) ** 2 / expected).sum() - degrees) / sqrt(2 * degrees)


@given(start=st.integers(0, 10**6), length=st.integers(0, 300), parts=st.integers(1, 40))
def test_an_even_split_has_no_gap_and_lengths_within_one(start: int, length: int, parts: int) -> None:
    pieces = [split_evenly(start, start + length, parts, index) for index in range(parts)]
    joined = [position for begin, end in pieces for position in range(begin, end)]
    assert joined == list(range(start, start + length))
    lengths = {end - begin for begin, end in pieces}
    assert max(lengths) - min(lengths) <= 1


def test_mixing_keeps_words_apart_by_place_and_number() -> None:
    words = [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (-1,), (2**63,), (1, 0, 0)]
    assert len({mix(*word) for word in words}) == len(words)
