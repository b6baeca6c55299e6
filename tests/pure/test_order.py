"""Ranks that run different blocks do the same collectives in the same order; acted out with threads, without torch.

A flow is the list of blocks that one rank runs, in its order; autograd goes through it backwards.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import JobError
from shoal.parallel.order import ROOT, Deed, Event, Order, backward_events

Flow = list[int]
UNITS = 5  # the root and four blocks


@dataclass
class Rank:
    """One rank's units: what is whole, and every collective that it took part in."""

    meet: Callable[[int], list[int]]
    whole: set[int] = field(default_factory=set)
    log: list[tuple[str, int]] = field(default_factory=list)
    owed: Counter[int] = field(default_factory=Counter)  # gradients that are yet to come
    most: int = 0  # units whole at once

    def agree(self, need: int) -> list[int]:
        return self.meet(need)

    def is_whole(self, unit: int) -> bool:
        return unit in self.whole

    def gather(self, unit: int) -> None:
        if unit not in self.whole:
            self.log.append(("gather", unit))
            self.whole.add(unit)
            self.most = max(self.most, len(self.whole))

    def wait(self, unit: int) -> None:
        assert unit in self.whole

    def release(self, unit: int) -> None:
        self.whole.discard(unit)

    def reduce(self, unit: int) -> None:
        assert self.owed[unit] == 0, f"{unit} is reduced before its gradient is there"
        self.log.append(("reduce", unit))
        self.whole.discard(unit)

    def forward(self, order: Order, flow: Flow, *, untold: int = 0) -> None:
        order.begin_forward("train")
        order.need_forward(ROOT)
        order.called(ROOT, tells=False)
        for unit in flow:
            order.need_forward(unit)
            assert {ROOT, unit} <= self.whole
            order.called(unit, tells=unit != untold)
            order.ran(unit)
        order.end_forward(has_gradient=True)

    def backward(self, order: Order, flow: Flow, *, unused: int = 0, untold: int = 0) -> None:
        """`unused`: the loss does not depend on the output of this block."""
        ran = [unit for unit in flow if unit != unused]
        self.owed = Counter(ran)
        order.need_backward(ROOT)
        order.look_ahead(ROOT)
        for unit in reversed(ran):
            order.need_backward(unit)
            assert {ROOT, unit} <= self.whole
            order.look_ahead(unit)
            self.owed[unit] -= 1
            if unit != untold:
                assert not order.over(unit)
        order.end_backward()


def act(flows: list[list[Flow]], *, keep_all: bool = False, micro: int = 1, **odd: int) -> list[Rank]:
    """flows[step][rank]; every rank in a thread of its own. Raises what a rank raises."""
    size = len(flows[0])
    barrier, said = threading.Barrier(size, timeout=10), [0] * size
    failed: list[BaseException] = []

    def run(number: int) -> None:
        def meet(need: int) -> list[int]:
            said[number] = need
            barrier.wait()
            told = list(said)
            barrier.wait()
            return told

        rank = ranks[number]
        rank.meet = meet
        order = Order([f"block {unit}" for unit in range(UNITS)], rank, keep_all=keep_all)
        try:
            for step in flows:
                for part in range(micro):
                    order.reduces = part == micro - 1
                    rank.forward(order, step[number], untold=odd.get("untold", 0))
                    rank.backward(order, step[number], **odd)
                assert rank.whole == set()
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    ranks = [Rank(meet=lambda need: [need]) for _ in range(size)]
    threads = [threading.Thread(target=run, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return ranks


def assert_in_step(ranks: list[Rank], num_steps: int) -> None:
    assert all(rank.log == ranks[0].log for rank in ranks)
    reduced = Counter(unit for deed, unit in ranks[0].log if deed == "reduce")
    assert reduced == dict.fromkeys(range(UNITS), num_steps)


def test_the_next_gather_runs_ahead_of_each_reduction():
    gather, reduce = (lambda unit: Event(Deed.GATHER, unit)), (lambda unit: Event(Deed.REDUCE, unit))
    assert backward_events([0, 1, 2, 3], {0}, reduces=True) == [
        gather(3),
        *(gather(2), reduce(3)),
        *(gather(1), reduce(2)),
        *(reduce(1), reduce(0)),
    ]


def test_what_stays_whole_is_not_gathered_for_backward():
    assert [event.unit for event in backward_events([0, 1, 2], {0, 1, 2}, reduces=True)] == [2, 1, 0]
    assert backward_events([0, 1, 2], {0, 1, 2}, reduces=False) == []


def test_where_all_ranks_run_all_blocks_no_more_is_gathered_than_runs():
    (rank, _) = ranks = act([[[1, 2, 3, 4]] * 2] * 2)
    assert_in_step(ranks, 2)
    assert Counter(rank.log)["gather", 2] == 4
    assert Counter(rank.log)["gather", ROOT] == 2
    assert rank.most == 3  # the root, the block that runs, the one ahead


def test_a_rank_that_leaves_blocks_out_takes_part_in_them():
    assert_in_step(act([[[1, 2, 3, 4], [1, 4], []], [[], [2, 3], [4]]]), 2)


def test_the_order_is_that_in_which_the_blocks_ran_not_that_of_their_names():
    ranks = act([[[4, 2, 3, 1]] * 2, [[4, 3], [2, 1]]])
    assert_in_step(ranks, 2)
    assert [unit for deed, unit in ranks[0].log if deed == "gather"][:5] == [0, 4, 2, 3, 1]


def test_a_block_that_runs_again_later_stays_whole_in_between():
    (rank, _) = ranks = act([[[1, 2, 1, 3, 1, 4]] * 2] * 2)
    assert_in_step(ranks, 2)
    second = rank.log[len(rank.log) // 2 :]
    assert Counter(second)["gather", 1] == 1


def test_while_gradients_accumulate_nothing_is_reduced():
    assert_in_step(act([[[1, 2, 3, 4], [1, 3]]] * 2, micro=3), 2)


def test_a_block_that_moves_is_refused_where_blocks_are_dropped_after_use():
    with pytest.raises(JobError, match=r"block 2 runs out of the order .* reshard=false"):
        act([[[1, 2, 3, 4]] * 2, [[1, 3, 2, 4]] * 2])


def test_a_block_by_itself_is_refused():
    order = Order(["the model", "block 1"], Rank(meet=lambda need: [need]), keep_all=False)
    with pytest.raises(JobError, match="block 1 is called by itself"):
        order.need_forward(1)


parts_of_one_order = st.lists(st.booleans(), min_size=6, max_size=6).map(
    lambda kept: [unit for unit, stays in zip([1, 2, 2, 3, 1, 4], kept, strict=True) if stays]
)
any_flow = st.lists(st.integers(1, UNITS - 1), max_size=6)


@settings(deadline=None, max_examples=60)
@given(
    later=st.lists(st.lists(parts_of_one_order, min_size=3, max_size=3), max_size=3),
    first=st.lists(parts_of_one_order, min_size=2, max_size=2),
    micro=st.integers(1, 2),
    unused=st.integers(0, 4),
    untold=st.integers(0, 1),
)
def test_any_parts_of_one_order(later, first, micro, unused, untold):
    flows = [[[1, 2, 2, 3, 1, 4], *first], *later]
    assert_in_step(act(flows, micro=micro, unused=unused, untold=untold), len(flows))


@settings(deadline=None, max_examples=100)
@given(flows=st.lists(any_flow, min_size=3, max_size=3), unused=st.integers(0, 4), untold=st.integers(0, 4))
def test_any_flow_at_all_the_first_time(flows, unused, untold):
    assert_in_step(act([flows], unused=unused, untold=untold), 1)


@settings(deadline=None, max_examples=60)
@given(
    flows=st.lists(st.lists(any_flow, min_size=3, max_size=3), min_size=1, max_size=4),
    micro=st.integers(1, 2),
    unused=st.integers(0, 4),
    untold=st.integers(0, 4),
)
def test_any_flow_at_all_where_blocks_stay_whole(flows, micro, unused, untold):
    assert_in_step(act(flows, keep_all=True, micro=micro, unused=unused, untold=untold), len(flows))
