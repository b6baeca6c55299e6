"""The arithmetic of the mesh against its definition: ranks counted through nested loops over the axes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import WorldError
from shoal.layout import Layout
from shoal.mesh import Mesh

AXES = ("pp", "dp", "fsdp", "cp", "tp")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = {axis: draw(st.integers(1, 3)) for axis in AXES}
    num_data = degrees["dp"] * degrees["fsdp"]
    ep = draw(st.sampled_from([d for d in range(1, num_data + 1) if num_data % d == 0]))
    return Layout(**degrees, ep=ep)


AXIS_SETS = st.sets(st.sampled_from(AXES)) | st.sets(st.sampled_from(["pp", "cp", "tp", "ep"]))


def by_definition(layout: Layout) -> list[dict[str, int]]:
    """The coordinates of every rank, the innermost axis counting fastest; `ep` counts data ranks in runs."""
    ranges = [range(getattr(layout, axis)) for axis in AXES]
    world = [dict(zip(AXES, place, strict=True)) for place in itertools.product(*ranges)]
    for place in world:
        place["ep"] = (place["dp"] * layout.fsdp + place["fsdp"]) % layout.ep
        place["experts"] = (place["dp"] * layout.fsdp + place["fsdp"]) // layout.ep
    return world


def same_but_for(axes: set[str], world: list[dict[str, int]], rank: int) -> list[int]:
    fixed = set(world[rank]) - axes - ({"dp", "fsdp"} if "ep" in axes else {"ep", "experts"})
    return [other for other, place in enumerate(world) if all(place[a] == world[rank][a] for a in fixed)]


@given(layouts())
def test_coordinates_count_the_innermost_axis_fastest(layout: Layout) -> None:
    mesh = Mesh.of(layout)
    world = by_definition(layout)
    assert mesh.size == layout.num_ranks == len(world)
    for rank, place in enumerate(world):
        assert mesh.coordinates(rank) == {axis: place[axis] for axis in AXES}
        assert mesh.coordinate(rank, "ep") == place["ep"]
        assert mesh.rank_of(**mesh.coordinates(rank)) == rank


@given(layouts(), AXIS_SETS, st.data())
def test_a_group_is_the_ranks_that_differ_only_on_its_axes(layout: Layout, axes: set[str], data: st.DataObject) -> None:
    mesh = Mesh.of(layout)
    rank = data.draw(st.integers(0, mesh.size - 1))
    assert list(mesh.group(rank, sorted(axes))) == same_but_for(axes, by_definition(layout), rank)


@given(layouts(), AXIS_SETS)
def test_the_groups_of_some_axes_part_the_world(layout: Layout, axes: set[str]) -> None:
    mesh = Mesh.of(layout)
    groups = list(mesh.groups(sorted(axes)))
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(mesh.size))
    assert all(list(mesh.group(rank, axes)) == list(group) for group in groups for rank in group)


@given(layouts(), st.sampled_from([*AXES, "ep"]))
def test_neighbours_stand_beside_a_rank_in_its_group(layout: Layout, axis: str) -> None:
    mesh = Mesh.of(layout)
    for rank in range(mesh.size):
        group = list(mesh.group(rank, axis))
        place = group.index(rank)
        line = [None, *group, None]
        assert mesh.neighbours(rank, axis, ring=False) == (line[place], line[place + 2])
        assert mesh.neighbours(rank, axis) == (group[place - 1], group[(place + 1) % len(group)])


@given(layouts())
def test_the_data_rank_counts_the_slices_of_the_batch(layout: Layout) -> None:
    mesh = Mesh.of(layout)
    world = by_definition(layout)
    assert mesh.num_data == layout.dp * layout.fsdp
    assert [mesh.data_rank(rank) for rank in range(mesh.size)] == [
        place["dp"] * layout.fsdp + place["fsdp"] for place in world
    ]


@given(layouts(), st.sampled_from([*AXES, "ep"]), st.integers(1, 60))
def test_an_axis_crosses_nodes_if_one_of_its_groups_does(layout: Layout, axis: str, ranks_per_node: int) -> None:
    mesh = Mesh.of(layout, ranks_per_node=ranks_per_node)
    nodes = [{rank // ranks_per_node for rank in group} for group in mesh.groups(axis)]
    assert mesh.crosses_nodes(axis) == any(len(each) > 1 for each in nodes)


def test_the_drawing_of_the_docstring_holds() -> None:
    mesh = Mesh.of(Layout.parse("pp2.dp2.tp2"))
    assert [list(group) for group in mesh.groups("tp")] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(mesh.group(5, "pp")) == [1, 5]
    assert list(mesh.group(5, ["pp", "tp"])) == [0, 1, 4, 5]


def test_experts_are_shared_out_among_neighbours_on_the_data_axes() -> None:
    mesh = Mesh.of(Layout.parse("dp2.fsdp2.tp2.ep4"))
    assert [list(group) for group in mesh.groups("ep")] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_mesh_draws_itself_on_few_lines() -> None:
    assert str(Mesh.of(Layout.parse("dp2.fsdp16.tp4.ep4"), ranks_per_node=8)).splitlines() == [
        "128 ranks",
        "  dp        2   rank 0 with 0 64, across nodes",
        "  fsdp     16   rank 0 with 0 4 8 12 16 20 24 28 .. 60, across nodes",
        "  tp        4   rank 0 with 0 1 2 3, in a node",
        "  ep        4   rank 0 with 0 4 8 12, across nodes",
    ]
    assert str(Mesh.of(Layout())) == "1 rank"


@pytest.mark.timeout(60)  # 1014 ranks; one pass over all groups would take minutes
def test_a_world_of_98304_ranks_answers_without_counting_them() -> None:
    mesh = Mesh.of(Layout.parse("pp16.dp24.fsdp32.tp8.ep64"), ranks_per_node=8)
    assert mesh.size == 98_304
    for rank in range(0, mesh.size, 97):
        assert mesh.rank_of(**mesh.coordinates(rank)) == rank
        assert len(mesh.group(rank, ["dp", "fsdp"])) == 768
        assert isinstance(mesh.group(rank, ["dp", "fsdp"]), range)
        assert mesh.neighbours(rank, "pp", ring=False)[0] == (rank - 6144 if rank >= 6144 else None)
    assert [axis for axis in (*AXES, "ep") if mesh.crosses_nodes(axis)] == ["pp", "dp", "fsdp", "ep"]
    assert next(mesh.groups("tp")) == range(8)


@pytest.mark.parametrize(
    ("query", "lesson"),
    [
        (lambda mesh: mesh.coordinates(8), "rank 8 is outside this world of 8; its ranks run to 7"),
        (lambda mesh: mesh.group(-1, "dp"), "rank -1 is outside"),
        (lambda mesh: mesh.neighbours(9, "tp"), "rank 9 is outside"),
        (lambda mesh: mesh.data_rank(8), "rank 8 is outside"),
        (lambda mesh: mesh.group(8, []), "rank 8 is outside"),
        (lambda mesh: mesh.group(0, "fsp"), "no axis 'fsp' in this mesh. Did you mean 'fsdp'?"),
        (lambda mesh: mesh.crosses_nodes("data"), "no axis 'data'"),
        (lambda mesh: next(mesh.groups(["dp", "ddp"])), "no axis 'ddp'"),
        (lambda mesh: mesh.rank_of(tp=2), "tp=2 is outside the axis tp, which runs to 1"),
        (lambda mesh: mesh.rank_of(dp=-1), "dp=-1 is outside"),
        (lambda mesh: mesh.rank_of(ep=0), "ep follows from dp and fsdp"),
        (lambda mesh: mesh.group(0, ["dp", "ep"]), "Ask for ep, or for dp and fsdp"),
        (lambda mesh: Mesh.of(Layout(dp=2), ranks_per_node=0), "at least 1 rank"),
    ],
)  # fmt: skip
def test_a_question_that_has_no_answer_is_refused(query, lesson: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WorldError) as caught:
        query(Mesh.of(Layout.parse("pp2.dp2.tp2")))
    assert lesson in str(caught.value)
