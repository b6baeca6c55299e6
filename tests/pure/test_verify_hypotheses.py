"""What a wrong tensor is: each guess holds where its mistake was made, and not where another one was."""

import pytest
import torch

from shoal.verbs.verify.figures import missing_squares, of_other_targets, of_wrong_counts
from shoal.verbs.verify.hypotheses import (
    Portion,
    Setting,
    amount,
    bias_count,
    is_normalised_alone,
    is_reordered,
    is_scaled,
    missing_reduction,
    of_portions,
    ratio_and_cosine,
    reasons,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def setting(micro=1, count=None, stages=1, **sizes):
    coordinates = [{}]
    for axis, size in sizes.items():
        coordinates = [{**at, axis: index} for at in coordinates for index in range(size)]
    stages = max(stages, sizes.get("pp", 1))
    return Setting(sizes=sizes, micro=micro, stages=stages, coordinates=coordinates, count=count)


@pytest.mark.parametrize(
    ("ratio", "where", "said"),
    [
        (2.0, setting(dp=2), ["summed over dp once too often"]),
        (0.25, setting(dp=2, tp=2), ["a sum over dp x tp is missing"]),
        (2.0, setting(dp=4, tp=2), ["summed over tp once too often", "number of processes"]),
        (3.0, setting(dp=2, micro=3), ["micro-batches are summed"]),
        (1 / 3, setting(dp=2, micro=3), ["number of micro-batches once too often"]),
        (40.0, setting(dp=2, count=40), ["it is the sum, not the mean"]),
        (20.0, setting(dp=2, count=40), ["the mean of the ranks' sums"]),
        (1 / 40, setting(dp=2, count=40), ["divided by the count twice"]),
        (2.0, setting(pp=2, micro=3), ["summed over pp once too often", "number of processes"]),
        (4.0, setting(pp=2, micro=3, stages=4), ["summed over the 4 stages"]),
        (0.25, setting(pp=2, dp=3, stages=4), ["divided by the number of stages, 4"]),
        (0.2, setting(pp=2, micro=5), ["number of micro-batches once too often"]),
        (1.7, setting(dp=2, micro=3, count=40), []),
        (2.0 + 1e-6, setting(dp=2), []),
    ],
)
def test_a_ratio_is_told_by_the_numbers_of_layout_and_batch(ratio, where, said):
    found = reasons(ratio, where)
    assert len(found) == len(said)
    for told, words in zip(found, said, strict=True):
        assert words in told


def test_amounts_are_said_in_words_where_there_are_some():
    assert [amount(ratio) for ratio in (0.5, 2.0, 1 / 3, 0.875)] == ["half of", "twice", "a third of", "0.875 times"]


@pytest.mark.parametrize(
    ("axes", "sizes", "word"),
    [(("dp",), {"dp": 2}, "mean"), (("tp",), {"dp": 2, "tp": 2}, "sum"), (("dp", "tp"), {"dp": 2, "tp": 2}, "mean")],
)
def test_a_reduction_that_is_missing_over_some_axes_is_found(axes, sizes, word):
    where = setting(**sizes)
    versions = [draw(5, seed=sum(at[axis] * 7**i for i, axis in enumerate(axes))) for at in where.coordinates]
    group = [
        v for v, at in zip(versions, where.coordinates, strict=True) if all(at[a] == 0 for a in at if a not in axes)
    ]
    reference = torch.stack(group).sum(0) if word == "sum" else torch.stack(group).mean(0)
    assert missing_reduction(versions, reference, where) == f"a {word} over {' x '.join(axes)} is missing"
    assert missing_reduction(versions, reference * 1.001, where) == ""


def test_a_sum_over_the_stages_that_hold_a_tied_weight_is_missing():
    where = setting(pp=4, dp=2)
    held = [draw(5, seed=at["pp"]) for at in where.coordinates]  # that of stage 0 where a stage holds none
    held = [held[0] if at["pp"] in (1, 2) else own for own, at in zip(held, where.coordinates, strict=True)]
    reference = held[0] + held[-1]
    assert missing_reduction(held, reference, where, holders=(0, 3)) == "a sum over pp is missing"
    assert missing_reduction(held, reference, where) == ""
    assert missing_reduction(held, reference * 1.001, where, holders=(0, 3)) == ""


def test_a_reduction_of_one_stage_alone_over_the_data_ranks_is_found():
    where = setting(pp=2, dp=2)
    held = [draw(5, seed=at["dp"]) for at in where.coordinates]
    mean = (held[0] + held[1]) / 2
    assert missing_reduction(held, mean, where, holders=(1,)) == "a mean over dp is missing"


def test_norms_of_stages_whose_squares_are_not_added_up_are_found():
    where = setting(pp=2, dp=2)
    assert missing_squares([3.0, 3.0, 4.0, 4.0], [5.0], where) == "the squares are not added up over pp"
    assert missing_squares([3.0, 3.0, 4.0, 4.0], [7.0, 5.0], where) == "the squares are not added up over pp"
    assert missing_squares([3.0, 3.0, 4.0, 4.1], [5.0], where) == ""


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([1, 2, 3, 0], "each those of the next"),
        ([3, 0, 1, 2], "each those of the one 3 further on"),
        ([3, 2, 1, 0], "in the opposite order"),
        ([2, 2, 2, 2], "all those of micro-batch 3"),
        ([0, 0, 3, 2], ""),
    ],
)
def test_targets_of_other_micro_batches_are_found_in_the_loss(order, said):
    # Of output i beside targets j.
    crossed = [[[(1.0 + 10 * i + j * j + 0.1 * i * j**3, 1.0 + j) for j in range(4)] for i in range(4)]]
    parts = [crossed[0][i][j] for i, j in enumerate(order)]
    loss = sum(value for value, _ in parts) / sum(count for _, count in parts)
    told = of_other_targets(loss, crossed)
    assert said in told
    assert bool(told) is bool(said)
    assert of_other_targets(loss, [[[None] * 4] * 4]) == ""
    assert of_other_targets(loss, [[[(1.0, 1.0)]]]) == ""


@pytest.mark.parametrize(
    ("times", "said"), [((1, 1, 4), "3 is counted 4 times"), ((0, 1, 1), "1 is left out"), ((1, 1.5, 1), "")]
)
def test_a_micro_batch_that_is_counted_wrongly_is_found_in_the_loss(times, said):
    parts = [[(3.0, 2.0), (5.0, 4.0), (11.0, 3.0)]]
    weighed = [(v * n, c * n) for (v, c), n in zip(parts[0], times, strict=True)]
    told = of_wrong_counts(sum(v for v, _ in weighed) / sum(c for _, c in weighed), parts)
    assert said in told
    assert bool(told) is bool(said)


def portions(counts, micro=1):
    return [
        Portion(data_rank=rank, micro=index, gradient=draw(4, seed=10 * rank + index), count=count)
        for rank, count in enumerate(counts)
        for index in range(micro)
    ]


def total(parts):
    return torch.stack([part.gradient for part in parts]).sum(0)


def test_the_share_of_one_rank_alone_is_found():
    parts = portions([3, 5])
    assert of_portions(0.7 * parts[1].gradient, parts) == "it is that of the samples of data rank 1 alone"


def test_a_share_that_is_left_out_is_found():
    parts = portions([3, 5, 2])
    assert of_portions(total(parts) - parts[2].gradient, parts) == "the share of data rank 2 is left out"


def test_a_micro_batch_alone_is_found():
    parts = portions([3, 5], micro=2)
    last = total([part for part in parts if part.micro == 1])
    assert of_portions(last / 8, parts) == "it is that of micro-batch 2 of 2 alone: the others are lost"


def test_a_micro_batch_that_is_left_out_is_found():
    parts = portions([3], micro=3)
    left = total([part for part in parts if part.micro != 1])
    assert of_portions(left / 9, parts) == "that of micro-batch 2 of 3 is left out"


def test_a_mean_of_means_is_found_where_parts_are_ragged():
    parts = portions([3, 5])
    means = sum(part.gradient / part.count for part in parts)
    assert "mean of the ranks' means" in of_portions(means / 2, parts)


@pytest.mark.parametrize("counts", [[3, 5], [4, 4], [3, 5, 2], [0, 4]])
def test_a_right_gradient_is_made_of_no_wrong_portions(counts):
    parts = [part for part in portions(counts) if part.count]
    if len(parts) > 1:
        assert of_portions(total(parts) / sum(counts), parts) == ""
    assert of_portions(draw(4, seed=99), parts) == ""
    assert of_portions(draw(4, seed=99), []) == ""


def test_a_factor_is_told_from_a_direction():
    reference = draw(3, 4)
    assert is_scaled(0.5 * reference, reference) == pytest.approx(0.5)
    assert is_scaled(reference + 1e-4 * draw(3, 4, seed=1), reference) is None
    ratio, cosine = ratio_and_cosine(-2 * reference, reference)
    assert (ratio, cosine) == (pytest.approx(-2.0), pytest.approx(-1.0))


def test_right_values_in_the_wrong_places_are_found():
    reference = draw(6, 2)
    assert is_reordered(reference[[3, 4, 5, 0, 1, 2]], reference)
    assert not is_reordered(2 * reference, reference)


@pytest.mark.parametrize("times", [0, 2, 3])
def test_a_bias_that_is_added_too_often_is_counted(times):
    bias, reference = draw(4), draw(2, 3, 4, seed=1)
    assert bias_count(reference + (times - 1) * bias, reference, bias) == pytest.approx(times)
    channels = draw(2, 4, 3, seed=1)
    assert bias_count(channels + (times - 1) * bias[:, None], channels, bias) == pytest.approx(times)


def test_other_differences_are_no_bias():
    bias, reference = draw(4), draw(2, 3, 4, seed=1)
    assert bias_count(reference + draw(2, 3, 4, seed=2), reference, bias) is None
    assert bias_count(2 * reference, reference, bias) is None


def test_statistics_of_one_rank_alone_are_seen_in_a_norms_output():
    rows = draw(8, 3) * 3 + 1
    weight, bias = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64), draw(3, seed=5)
    alone = torch.nn.functional.batch_norm(rows[:4], None, None, weight, bias, training=True)
    together = torch.nn.functional.batch_norm(rows, None, None, weight, bias, training=True)[:4]
    assert is_normalised_alone(alone, weight, bias)
    assert not is_normalised_alone(together, weight, bias)
