"""How features are shared out in whole heads, and how the code of a model tells where its heads are."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.parallel.tensor.heads import Narrow, Rules, Seen, Watch, matched
from shoal.parallel.tensor.units import Units


def test_units_are_shared_out_evenly_where_they_divide() -> None:
    units = Units(count=4, parts=(12,), num_ranks=2)
    assert [units.share(rank) for rank in range(2)] == [(0, 2), (2, 4)]
    assert [units.spans(rank) for rank in range(2)] == [((0, 6),), ((6, 12),)]
    assert units.sizes() == [6, 6]


def test_the_first_ranks_take_what_is_over() -> None:
    units = Units(count=3, parts=(12,), num_ranks=2)
    assert [units.share(rank) for rank in range(2)] == [(0, 2), (2, 3)]
    assert units.sizes() == [8, 4]
    assert Units(count=257, parts=(257,), num_ranks=2).sizes() == [129, 128]


def test_each_fused_part_is_shared_out_by_itself() -> None:
    """Two key-value heads: q has 2 x 6 features, k and v 2 x 2 each."""
    units = Units(count=2, parts=(12, 4, 4), num_ranks=2)
    assert units.spans(0) == ((0, 6), (12, 14), (16, 18))
    assert units.spans(1) == ((6, 12), (14, 16), (18, 20))
    assert units.sizes() == [10, 10]


def test_a_size_in_units_is_less_on_a_rank() -> None:
    units = Units(count=3, parts=(12,), num_ranks=2)
    assert [units.local(6, rank) for rank in range(2)] == [4, 2]
    assert [units.local(3, rank) for rank in range(2)] == [2, 1]


@given(st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 9))
def test_spans_of_all_ranks_are_every_feature_once_and_sizes_differ_by_a_unit_at_most(
    count: int, per_unit: list[int], num_ranks: int
) -> None:
    units = Units(count, tuple(count * n for n in per_unit), num_ranks)
    features = [f for rank in range(num_ranks) for start, stop in units.spans(rank) for f in range(start, stop)]
    assert sorted(features) == list(range(sum(units.parts)))
    assert units.sizes() == [sum(stop - start for start, stop in units.spans(rank)) for rank in range(num_ranks)]
    assert max(units.sizes()) - min(units.sizes()) <= sum(per_unit)
    assert sum(units.local(sum(units.parts), rank) for rank in range(num_ranks)) == sum(units.parts)


# -- which dims of a reshape hold the same elements ----------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((6, 64), (6, 4, 16), [([0], [0]), ([1], [1, 2])]),
        ((2, 5, 12), (2, 5, 3, 4), [([0], [0]), ([1], [1]), ([2], [2, 3])]),
        ((2, 4, 5, 3), (8, 5, 3), [([0, 1], [0]), ([2], [1]), ([3], [2])]),
        ((5, 2, 12), (5, 8, 3), [([0], [0]), ([1, 2], [1, 2])]),
        ((4, 3), (12,), [([0, 1], [0])]),
        ((12,), (12,), [([0], [0])]),
    ],
)
def test_the_smallest_runs_of_dims_that_hold_the_same(before, after, expected) -> None:  # type: ignore[no-untyped-def]
    assert list(matched(before, after)) == expected


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(shapes, st.data())
def test_runs_of_dims_hold_as_many_elements_in_as_out_and_none_is_left(shape: list[int], data: st.DataObject) -> None:
    """Whichever way neighbours are merged."""
    after: list[int] = []
    for size in shape:
        if after and data.draw(st.booleans()):
            after[-1] *= size
        else:
            after.append(size)
    for whole, other in ((shape, after), (after, shape)):
        runs = list(matched(tuple(whole), tuple(other)))
        for ins, outs in runs:
            assert torch.Size([whole[i] for i in ins]).numel() == torch.Size([other[o] for o in outs]).numel()
        assert [i for ins, _ in runs for i in ins] == list(range(len(whole)))
        assert [o for _, outs in runs for o in outs] == list(range(len(other)))


# -- what the code of a model shows --------------------------------------------------------------------


def watched(code, *tensors: Tensor) -> Seen:  # type: ignore[no-untyped-def]
    watch = Watch()
    with watch:
        code(*tensors)
    return watch.seen


FEATURES = torch.zeros(2, 5, 12)


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x.view(2, 5, 4, 3),
        lambda x: x.view(2, 5, 4, -1),
        lambda x: x.reshape([2, 5, -1, 3]),
        lambda x: torch.reshape(x, (2, 5, 4, 3)),
        lambda x: x.unflatten(-1, (4, 3)),
        lambda x: torch.unflatten(x, 2, (4, -1)),
    ],
)
def test_the_number_of_heads_is_seen_in_any_spelling_and_is_the_likeliest(code) -> None:  # type: ignore[no-untyped-def]
    assert watched(code, FEATURES).head_counts([12])[0] == 4


def test_of_query_and_key_value_heads_the_fewer_are_the_units() -> None:
    def code(q: Tensor, k: Tensor) -> None:
        q.view(2, 5, 6, 2)
        k.view(2, 5, 3, 2)

    assert watched(code, FEATURES, torch.zeros(2, 5, 6)).head_counts([12, 6])[0] == 3


def test_a_reshape_of_other_features_tells_nothing() -> None:
    assert watched(lambda x: x.view(2, 5, 4, 3), FEATURES).head_counts([24]) == []


def test_heads_behind_a_leading_three_are_the_second_size() -> None:
    assert watched(lambda x: x.view(2, 5, 3, 2, 2), FEATURES).head_counts([12])[0] == 2


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (lambda x: x.chunk(3, dim=-1), (4, 4, 4)),
        (lambda x: x.split(4, dim=-1), (4, 4, 4)),
        (lambda x: torch.split(x, [6, 3, 3], dim=2), (6, 3, 3)),
        (lambda x: x.split_with_sizes([8, 2, 2], dim=-1), (8, 2, 2)),
        (lambda x: x.view(2, 5, 3, 2, 2), (4, 4, 4)),
        (lambda x: x.view(2, 5, 2, 6), (6, 6)),
    ],
)
def test_the_ways_in_which_fused_features_are_taken_apart_are_seen(code, parts) -> None:  # type: ignore[no-untyped-def]
    ways = watched(code, FEATURES).fused(12)
    assert parts in ways
    assert (12,) in ways


def test_features_that_nothing_takes_apart_are_not_fused() -> None:
    assert watched(lambda x: x * 2, FEATURES).fused(12) == [(12,)]
    assert Seen(reshapes=defaultdict(list), splits=defaultdict(list)).head_counts([12]) == []


# -- sizes of the whole, put right on a part -----------------------------------------------------------


def learnt(code, units: Units, rank: int, size: int = 12):  # type: ignore[no-untyped-def]
    """Rules that code shows: run whole, then on the rank's part of the last dim."""
    seen = watched(code, torch.zeros(2, 5, size))
    rules = Rules(units, rank)
    with Narrow(rules, seen):
        code(torch.zeros(2, 5, units.sizes()[rank]))
    return rules


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x.view(len(x), 5, 4, 3),
        lambda x: x.view(len(x), 5, 4, -1),
        lambda x: x.view(-1, 5, 4, 3),
        lambda x: x.reshape(len(x), -1, 4, 3),
        lambda x: x.unflatten(-1, (4, 3)),
    ],
)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_gets_its_own_number_of_heads_also_of_another_batch(code, rank: int) -> None:  # type: ignore[no-untyped-def]
    """Four heads on three ranks: 2, 1, 1."""
    units = Units(4, (12,), 3)
    rules = learnt(code, units, rank)
    heads = (2, 1, 1)[rank]
    for batch in (2, 7):
        with Narrow(rules):
            assert code(torch.zeros(batch, 5, 3 * heads)).shape == (batch, 5, heads, 3)


def test_a_split_by_sizes_of_the_whole_is_a_split_by_those_of_the_rank() -> None:
    def code(x: Tensor) -> tuple[Tensor, ...]:
        return x.split([6, 3, 3], dim=-1)

    rules = learnt(code, Units(3, (6, 3, 3), 2), rank=1)
    with Narrow(rules):
        assert [tuple(piece.shape) for piece in code(torch.zeros(7, 5, 4))] == [(7, 5, 2), (7, 5, 1), (7, 5, 1)]


@pytest.mark.parametrize("batch", [2, 3, 7])
def test_heads_that_are_merged_into_the_batch_are_so_at_any_batch_size(batch: int) -> None:
    def code(x: Tensor) -> Tensor:
        heads = x.view(len(x), 5, 4, 3).transpose(1, 2)
        merged = heads.reshape(4 * len(x), -1, 3)
        return merged.view(len(x), -1, 5, 3)

    rules = learnt(code, Units(4, (12,), 2), rank=0)
    with Narrow(rules):
        assert code(torch.zeros(batch, 5, 6)).shape == (batch, 2, 5, 3)
        merged = torch.arange(batch * 30.0).view(batch, 5, 6)
        expected = merged.view(batch, 5, 2, 3).transpose(1, 2)
        assert torch.equal(code(merged), expected)


def test_what_no_rule_is_about_is_left_as_it_is() -> None:
    rules = learnt(lambda x: x.view(len(x), 5, 4, 3), Units(4, (12,), 2), rank=0)
    with Narrow(rules):
        assert torch.zeros(6, 4).view(2, 3, 4).shape == (2, 3, 4)
        assert torch.zeros(6, dtype=torch.float32).view(torch.int32).dtype == torch.int32
