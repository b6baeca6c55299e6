"""Bandwidths as nccl-tests defines them, and the line that finds latency and bandwidth again."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.metrics.links import (
    OPERATIONS,
    algorithm_bandwidth,
    bus_bandwidth,
    bus_factor,
    fit_line,
    ring_bound_s,
)

SIZES = [4**k for k in range(5, 15)]  # 1 KiB to 256 MiB
PUBLISHED = {  # nccl-tests, doc/PERFORMANCE.md, summary; send_recv: "point-to-point" is its own bus bandwidth
    #                    2 ranks, 4 ranks, 8 ranks
    "all_reduce": (1.0, 1.5, 1.75),
    "all_gather": (0.5, 0.75, 0.875),
    "reduce_scatter": (0.5, 0.75, 0.875),
    "all_to_all": (0.5, 0.75, 0.875),
    "broadcast": (1.0, 1.0, 1.0),
    "send_recv": (1.0, 1.0, 1.0),
}


def test_the_factors_are_the_published_ones():
    assert {name: tuple(bus_factor(name, n) for n in (2, 4, 8)) for name in OPERATIONS} == PUBLISHED


def test_a_gigabyte_summed_over_8_ranks_in_10_ms_moves_175_gb_per_s_over_each_link():
    assert algorithm_bandwidth(1e9, 0.010) == pytest.approx(100e9)
    assert bus_bandwidth("all_reduce", 8, 1e9, 0.010) == pytest.approx(175e9)


@settings(deadline=None)
@given(num_ranks=st.integers(2, 4096), size=st.floats(1, 1e12), seconds=st.floats(1e-6, 1e3))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(num_ranks, size, seconds):
    halves = [bus_bandwidth(name, num_ranks, size, seconds) for name in ("reduce_scatter", "all_gather")]
    assert bus_bandwidth("all_reduce", num_ranks, size, seconds) == pytest.approx(sum(halves))


@settings(deadline=None)
@given(num_ranks=st.integers(2, 4096), size=st.floats(1, 1e12), link=st.floats(1e6, 1e12))
def test_at_the_ring_bound_the_bus_bandwidth_is_that_of_the_link(num_ranks, size, link):
    bound_s = ring_bound_s(num_ranks, size, link)
    assert bus_bandwidth("all_reduce", num_ranks, size, bound_s) == pytest.approx(link)


@settings(deadline=None)
@given(latency_s=st.floats(1e-7, 1e-1), bytes_per_s=st.floats(1e6, 1e12), num_sizes=st.integers(2, len(SIZES)))
def test_the_line_finds_exact_times_again(latency_s, bytes_per_s, num_sizes):
    sizes = SIZES[:num_sizes]
    line = fit_line((size, latency_s + size / bytes_per_s) for size in sizes)
    assert line is not None
    assert line.max_deviation < 1e-9
    for size in sizes:
        assert line.seconds(size) == pytest.approx(latency_s + size / bytes_per_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_line_finds_latency_and_bandwidth_through_noise(seed):
    draw = random.Random(seed)
    latency_s, bytes_per_s = 500e-6, 1.5e9
    line = fit_line((size, (latency_s + size / bytes_per_s) * draw.uniform(0.9, 1.1)) for size in SIZES)
    assert line is not None
    assert line.latency_s == pytest.approx(latency_s, rel=0.1)
    assert line.bytes_per_s == pytest.approx(bytes_per_s, rel=0.1)
    assert 0 < line.max_deviation < 0.25


def test_one_slow_large_message_does_not_become_the_latency_of_all():
    times = [(size, 1e-4 + size / 1e9) for size in SIZES]
    size, seconds = times.pop()
    line = fit_line([*times, (size, 1.5 * seconds)])
    assert line is not None
    assert line.latency_s == pytest.approx(1e-4, rel=0.1)
    assert line.seconds(1024) == pytest.approx(1e-4, rel=0.1)


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 10), min_size=2, max_size=len(SIZES)))
def test_no_times_make_a_latency_or_a_bandwidth_negative_and_no_neighbour_is_better(times):
    points = list(zip(SIZES, times, strict=False))
    line = fit_line(points)
    assert line is not None
    assert line.latency_s >= 0
    assert line.s_per_byte >= 0

    def error(latency_s: float, s_per_byte: float) -> float:
        return sum(((latency_s + s_per_byte * size - seconds) / seconds) ** 2 for size, seconds in points)

    best = error(line.latency_s, line.s_per_byte)
    for up in (0.99, 1.01):
        assert best <= error(line.latency_s * up, line.s_per_byte) + 1e-9
        assert best <= error(line.latency_s, line.s_per_byte * up) + 1e-9


def test_times_that_do_not_grow_have_no_bandwidth_and_one_size_has_no_line():
    falling = fit_line([(1024, 2e-3), (4096, 1e-3)])
    assert falling is not None
    assert falling.bytes_per_s is None
    assert falling.latency_s == pytest.approx(1.2e-3)
    assert fit_line([(1024, 1e-3), (1024, 2e-3)]) is None
