import math

import pytest

from shoal.metrics.reduce import REDUCTIONS, combine, reduction_of


def test_a_peak_on_one_rank_is_not_diluted():
    assert combine([{"mem/peak_gib": 1.0}, {"mem/peak_gib": 100.0}]) == {"mem/peak_gib": 100.0}


def test_the_slowest_rank_is_the_step_time_and_waits_show_as_worst_and_mean():
    rows = [
        {"perf/step_time_s": 1.0, "perf/data_wait": 0.1, "perf/data_wait_mean": 0.1},
        {"perf/step_time_s": 3.0, "perf/data_wait": 0.5, "perf/data_wait_mean": 0.5},
    ]
    world = combine(rows)
    assert world["perf/step_time_s"] == 3.0
    assert world["perf/data_wait"] == 0.5
    assert world["perf/data_wait_mean"] == pytest.approx(0.3)


def test_ranks_that_hold_the_same_samples_count_them_once_but_each_its_flops():
    # dp2.tp2: ranks 0, 1 hold one slice of the batch, ranks 2, 3 the other.
    rows = [{"perf/samples_per_s": rate, "perf/model_flops": 1e9} for rate in (10.0, 10.0, 6.0, 6.0)]
    world = combine(rows, data_ranks=[0, 0, 1, 1])
    assert world == {"perf/samples_per_s": 16.0, "perf/model_flops": 4e9}


def test_a_loss_was_reduced_over_samples_and_is_not_averaged_again():
    # 1 sample with loss 1 and 8 with loss 0: 1/9 on every rank, never the mean of means 0.5.
    assert combine([{"train/loss": 1 / 9}, {"train/loss": 1 / 9}]) == {"train/loss": 1 / 9}


def test_what_no_rank_knows_stays_unknown_and_what_some_know_is_theirs():
    rows = [{"perf/device_utilisation": None, "perf/mfu": None}, {"perf/device_utilisation": 0.5}]
    assert combine(rows) == {"perf/device_utilisation": 0.5, "perf/mfu": None}


@pytest.mark.parametrize("order", [(math.nan, 2.0), (2.0, math.nan)])
def test_a_nan_survives_the_maximum_wherever_it_stands(order):
    assert math.isnan(combine([{"mem/peak_gib": value} for value in order])["mem/peak_gib"])


def test_an_undeclared_figure_is_refused():
    with pytest.raises(AssertionError, match="declare"):
        reduction_of("perf/invented")
    assert reduction_of("eval/accuracy") == "global"


def test_one_rank_reduces_to_itself():
    row = dict.fromkeys(REDUCTIONS, 0.25)
    assert combine([row]) == row
