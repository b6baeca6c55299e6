"""What crosses a cut, and where a model is cut: arithmetic on a list of calls."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LayoutError
from shoal.parallel.pipeline.program import Call, Cut, Meta, Program, balance, holders


def chain(num_atoms, *, skip=()):
    """token, then atoms that each use the value before them, and those in `skip` the first value too."""
    calls = [
        Call(f"a{i}", f"a{i}", ((i - 1,) if i else ()) + ((0,) if i in skip else ()), (i,)) for i in range(num_atoms)
    ]
    return Program(calls, [Meta((1,), None, True)] * num_atoms, (num_atoms - 1,))


def dearest(owner, costs):
    sums = {}
    for atom, stage in owner.items():
        sums[stage] = sums.get(stage, 0) + costs[atom]
    return max(sums.values())


def test_a_value_crosses_every_cut_between_its_maker_and_its_last_user():
    program = chain(6, skip={5})
    cut = Cut.of(program, {f"a{i}": i // 2 for i in range(6)}, 3)
    assert cut.homes == (0, 0, 1, 1, 2, 2)
    assert cut.enters == ((), (0, 1), (0, 3))  # value 0 is passed on by stage 1, which does not use it
    assert cut.leaves(2) == ()
    assert cut.last == (1, 3, 5)


def test_a_function_runs_where_the_latest_of_its_inputs_is_and_one_of_parameters_where_it_is_used_first():
    calls = [
        Call("", "expand", (), (0,), frozenset({"class_token"})),
        Call("a", "a", (), (1,)),
        Call("b", "b", (1,), (2,)),
        Call("", "cat", (0, 2), (3,)),
        Call("c", "c", (3,), (4,)),
    ]
    program = Program(calls, [Meta((1,), None, True)] * 5, (4,))
    cut = Cut.of(program, {"a": 0, "b": 1, "c": 2}, 3)
    assert cut.homes == (1, 0, 1, 1, 2)
    assert cut.enters == ((), (1,), (3,))
    assert holders(program, cut, {"a": ["a.w"], "b": ["w"], "c": ["w"]}) == {
        "class_token": {1},
        "a.w": {0},
        "w": {1, 2},
    }


def test_what_the_model_returns_reaches_the_last_stage():
    program = chain(4)
    program.returns = (0, 3)
    assert Cut.of(program, {f"a{i}": i for i in range(4)}, 4).enters == ((), (0,), (0, 1), (0, 2))


def test_an_atom_may_not_need_what_a_later_stage_makes():
    with pytest.raises(LayoutError, match="is called on what stage 1"):
        Cut.of(chain(2), {"a0": 1, "a1": 0}, 2)


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_the_dearest_stage_costs_as_little_as_any_cut_allows(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    named = {f"a{i}": float(cost) for i, cost in enumerate(costs)}
    owner = balance(chain(len(costs)), named, num_stages)
    stages = [owner[f"a{i}"] for i in range(len(costs))]
    assert stages == sorted(stages)
    assert set(stages) == set(range(num_stages))
    best = min(
        max(sum(costs[low:high]) for low, high in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
    )
    assert dearest(owner, named) == best


def test_d116_blocks_that_do_not_divide_and_d166_a_heavy_head():
    """40 layers on 16 stages; four layers of 10 with a head of 8 on two: 20 and 28, or 30 and 18."""
    even = {f"a{i}": 1.0 for i in range(40)}
    assert dearest(balance(chain(40), even, 16), even) == 3
    costs = {"a0": 10.0, "a1": 10.0, "a2": 10.0, "a3": 10.0, "a4": 8.0}
    assert dearest(balance(chain(5), costs, 2), costs) == 28


def test_d178_an_atom_that_is_called_again_keeps_what_runs_between_in_its_stage():
    calls = [Call(atom, atom, (i - 1,) if i else (), (i,)) for i, atom in enumerate("abcbd")]
    program = Program(calls, [Meta((1,), None, True)] * 5, (4,))
    owner = balance(program, dict.fromkeys("abcd", 1.0), 3)
    assert owner == {"a": 0, "b": 1, "c": 1, "d": 2}
    with pytest.raises(LayoutError, match="this model has 3"):
        balance(program, dict.fromkeys("abcd", 1.0), 4)


def test_layers_that_tensor_parallelism_cuts_together_stay_together():
    costs = {f"a{i}": 1.0 for i in range(4)}
    assert balance(chain(4), costs, 2, [("a1", "a2")])["a1"] == balance(chain(4), costs, 2, [("a1", "a2")])["a2"]
    with pytest.raises(LayoutError, match="tensor parallelism cuts together"):
        balance(chain(4), costs, 4, [("a1", "a2")])


def test_what_is_written_in_place_stays_in_the_stage_of_those_that_have_read_it():
    """b reads a's value; then a function writes a view of it, as c does with d's."""
    calls = [
        Call("a", "a", (), (0,)),
        Call("", "view", (0,), (1,)),
        Call("b", "b", (0,), (2,)),
        Call("", "mul_", (1,), (3,), writes=(0, 1)),
        Call("c", "c", (2, 3), (4,)),
        Call("", "relu_", (4,), (5,), writes=(4,)),
        Call("d", "d", (5,), (6,)),
    ]
    program = Program(calls, [Meta((1,), None, True)] * 7, (6,))
    assert program.writers() == {("b", "a")}
    owner = balance(program, dict.fromkeys("abcd", 1.0), 3, [*program.writers()])
    assert owner == {"a": 0, "b": 0, "c": 1, "d": 2}
    assert Cut.of(program, owner, 3).homes == (0, 0, 0, 0, 1, 1, 2)
    with pytest.raises(LayoutError, match=r"mul_ .in stage 0. writes in place into a value that stage 1 has too"):
        Cut.of(program, {"a": 0, "b": 1, "c": 1, "d": 2}, 3)
    with pytest.raises(LayoutError, match=r"this model has 3 .* before it is written in place"):
        balance(program, dict.fromkeys("abcd", 1.0), 4, [*program.writers()])
