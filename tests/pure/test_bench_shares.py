"""Where a step goes adds up, and each wait is counted once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.metrics.shares import Spent, shares, slow_ranks
from shoal.metrics.watch import ALL


def test_what_a_rank_waits_for_is_no_computing():
    spent = Spent(
        wall_s=10.0,
        data_s=1.0,
        phases_s={"compute": 7.0, "update": 1.5},
        waits_s={("compute", "tp"): 2.0, ("update", "tp"): 0.25, ("compute", ALL): 0.5},
        hidden_s={"dp": 1.5},
    )
    assert spent.seconds() == pytest.approx(
        {"data": 1.0, "compute": 3.0, "comm dp": 1.5, "comm tp": 2.25, "waiting": 0.5, "update": 1.25, "other": 0.5}
    )


def test_the_bubble_is_what_the_schedule_says_of_what_was_waited_and_never_more():
    waits_s = {("compute", "pp"): 3.0, ("compute", ALL): 1.0}

    def found(bubble_s):
        spent = Spent(wall_s=10.0, data_s=0.0, phases_s={"compute": 10.0}, waits_s=waits_s, bubble_s=bubble_s)
        return {name: s for name, s in spent.seconds().items() if name in ("bubble", "comm pp", "waiting", "compute")}

    assert found(2.5) == {"bubble": 2.5, "comm pp": 1.5, "waiting": 0.0, "compute": 6.0}
    assert found(9.0) == {"bubble": 4.0, "comm pp": 0.0, "waiting": 0.0, "compute": 6.0}


seconds = st.floats(0, 5)


@given(
    st.lists(
        st.builds(
            Spent,
            wall_s=st.floats(1, 30),
            data_s=seconds,
            phases_s=st.fixed_dictionaries({"compute": seconds, "update": seconds}),
            waits_s=st.dictionaries(
                st.tuples(st.sampled_from(["compute", "update"]), st.sampled_from(["dp", "tp", "pp", ALL])), seconds
            ),
            hidden_s=st.dictionaries(st.sampled_from(["dp", "dp+fsdp"]), seconds),
            bubble_s=seconds,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_shares_add_up_to_the_whole(ranks):
    assert sum(shares(ranks).values()) == pytest.approx(1.0)


def working(*work_ms, step_ms=100.0):
    """Of one rank: its work in each step, of which none took longer."""
    return Spent(wall_s=step_ms / 1e3, data_s=0.0, phases_s={}, work_s=[ms / 1e3 for ms in work_ms])


def test_a_rank_is_slow_by_its_own_work_and_not_by_its_waits():
    quick, slow = working(60, 62, 61, 60), working(95, 96, 94, 95)
    assert slow_ranks([quick, quick, slow, quick]) == {2: pytest.approx(0.0345)}
    assert slow_ranks([slow, slow]) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (working(0.2, 0.1, 0.2, 0.1, step_ms=2.0), working(1.1, 1.0, 1.1, 1.0, step_ms=2.0)),  # ten times next to none
        (working(2, 2, 2, 2), working(20, 21, 20, 20)),  # ten times, in a step of 100 ms that is waited for elsewhere
        (
            working(60, 61, 60, 62, 60),
            working(61, 700, 60, 600, 61),
        ),  # it had no core in two steps of five
        (working(60, 90, 60, 90), working(90, 60, 90, 60)),  # now this one, now that
        (working(10, 10), working(90, 90)),  # in two steps anything may happen
        (working(), working()),  # a benchmark of an older shoal
    ],
)
def test_no_rank_is_called_slow_for_little_or_for_a_moment(one, other):
    assert slow_ranks([one, other]) == {}
