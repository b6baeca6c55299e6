"""The grammar: what parses prints back, what cannot run is refused with a lesson."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LayoutError
from shoal.layout import AXES, OPTIONS, Layout, check_world, nearest_layouts

DEGREES = st.one_of(st.just(1), st.integers(1, 12))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any valid layout, drawn so that each option is given only where its rule lets it be."""
    common: dict[str, Any] = {
        "micro": draw(st.integers(1, 40)),
        "recompute": draw(st.sampled_from(["none", "block", "selective"])),
        "offload": draw(st.sampled_from(["none", "cpu"])),
        "workers": draw(st.integers(0, 9)),
    }
    if draw(st.booleans()):
        return Layout(threads=draw(st.integers(1, 64)), **common)
    degrees = {axis: draw(DEGREES) for axis in ("pp", "dp", "fsdp", "cp", "tp")}
    num_data = degrees["dp"] * degrees["fsdp"]
    degrees["ep"] = draw(st.sampled_from([d for d in range(1, num_data + 1) if num_data % d == 0]))
    if degrees["fsdp"] > 1:
        common["reshard"] = draw(st.sampled_from([None, True, False]))
    if degrees["tp"] > 1:
        common["sequence"] = draw(st.booleans())
    if num_data > 1 and common.get("reshard") is None:
        common["zero"] = draw(st.sampled_from([None, 1, 2, 3]))
    if degrees["pp"] > 1:
        common |= draw(pipelines(degrees["pp"]))
    if common.get("schedule") not in ("zb", "zbv", "dualpipev"):
        common["compile"] = draw(st.sampled_from(["none", "block"]))
    return Layout(**degrees, **common)


@st.composite
def pipelines(draw: st.DrawFn, pp: int) -> dict[str, Any]:
    virtual = draw(st.integers(1, 4))
    schedules = {
        "gpipe": {},
        "1f1b": {"micro": pp + draw(st.integers(0, 9))},
        "interleaved": {"virtual": virtual, "micro": pp * draw(st.integers(1, 4))},
        "looped-bfs": {"virtual": virtual},
        "zb": {"virtual": virtual, "micro": draw(st.integers(1, pp))},
        "zbv": {"virtual": draw(st.sampled_from([1, 2]))},
        "dualpipev": {"micro": 2 * pp + draw(st.integers(0, 9))},
    }
    schedule = draw(st.sampled_from([None, *schedules]))
    options = {"schedule": schedule, **schedules.get(schedule or "", {"virtual": virtual})}
    stages = pp * (2 if schedule in ("zbv", "dualpipev") else options.get("virtual", 1))
    cuts = st.lists(st.integers(1, 500), min_size=stages - 1, max_size=stages - 1, unique=True)
    if draw(st.booleans()):
        options["split"] = tuple(sorted(draw(cuts)))
    return options


@given(layouts())
def test_a_layout_survives_printing_and_parsing(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(layouts(), st.randoms())
def test_options_in_any_order_and_defaults_spelled_out_mean_the_same(layout: Layout, random: Any) -> None:
    axes = [f"{axis}{getattr(layout, axis)}" for axis in AXES if axis != "threads" or layout.threads > 1]
    options = [(name, getattr(layout, name)) for name in OPTIONS if getattr(layout, name) not in (None, ())]
    random.shuffle(options)
    spelled = ",".join(f"{name}={_text(value)}" for name, value in options)
    long = ".".join(axes) + ":" + spelled
    assert Layout.parse(long) == layout
    assert str(Layout.parse(long)) == str(layout)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


@given(st.text(st.sampled_from("lonepdfsctr0123.:=,-micrhedulgz/ "), max_size=24))
def test_any_text_parses_to_a_layout_that_prints_the_same_for_ever_or_is_a_layout_error(text: str) -> None:
    try:
        printed = str(Layout.parse(text))
    except LayoutError:
        return
    assert str(Layout.parse(printed)) == printed


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("lone", "lone"),
        ("dp1", "lone"),
        ("threads1", "lone"),
        ("dp4", "dp4"),
        ("dp1.tp2", "tp2"),
        ("lone:micro=4,workers=2", "lone:micro=4,workers=2"),
        ("dp2:workers=2,micro=4", "dp2:micro=4,workers=2"),
        ("dp2:micro=1,recompute=none,workers=0", "dp2"),
        ("pp2.tp2:recompute=block,micro=8,schedule=1f1b", "pp2.tp2:micro=8,schedule=1f1b,recompute=block"),
        ("fsdp4.ep2:reshard=false", "fsdp4.ep2:reshard=false"),
        ("pp2:schedule=zbv", "pp2:schedule=zbv"),
        ("pp2:virtual=2,schedule=zbv", "pp2:schedule=zbv"),
        ("pp3:split=4/8", "pp3:split=4/8"),
        ("tp2:workers=1,sequence=true", "tp2:sequence=true,workers=1"),
        ("tp2:sequence=false", "tp2"),
        ("threads2", "threads2"),
    ],
)  # fmt: skip
def test_a_layout_prints_in_one_canonical_way(text: str, printed: str) -> None:
    assert str(Layout.parse(text)) == printed


def test_parsing_fills_every_field() -> None:
    layout = Layout.parse(
        "pp2.dp3.fsdp4.cp5.tp6.ep12:micro=8,schedule=interleaved,virtual=2,split=1/2/3,recompute=selective,"
        "compile=block,reshard=true,zero=3,offload=cpu,sequence=true,workers=7"
    )
    assert layout == Layout(
        pp=2, dp=3, fsdp=4, cp=5, tp=6, ep=12,
        micro=8, schedule="interleaved", virtual=2, split=(1, 2, 3),
        recompute="selective", compile="block", reshard=True, zero=3, offload="cpu", sequence=True, workers=7,
    )  # fmt: skip
    unset = {field.name for field in fields(Layout) if getattr(layout, field.name) == field.default}
    assert unset == {"threads"}


@pytest.mark.parametrize(
    ("text", "ranks", "data", "stages", "parts"),
    [
        ("lone", 1, 1, 1, 1),
        ("dp4:micro=3", 4, 4, 1, 3),
        ("pp2.dp3.fsdp4.cp5.tp7.ep6", 840, 12, 2, 1),  # ep adds no ranks
        ("threads8", 1, 1, 1, 8),
        ("pp4:virtual=2", 4, 1, 8, 1),
        ("pp4:schedule=zbv", 4, 1, 8, 1),
    ],
)
def test_degrees_multiply(text: str, ranks: int, data: int, stages: int, parts: int) -> None:
    layout = Layout.parse(text)
    assert (layout.num_ranks, layout.num_data, layout.num_stages, layout.num_parts) == (ranks, data, stages, parts)


@pytest.mark.parametrize(
    ("text", "lesson"),
    [
        ("", "the layout is empty"),
        ("  ", "the layout is empty"),
        ("dp2 .tp2", "Write dp2.tp2"),
        ("dp2\n", "Write dp2"),
        ("dp٢", "outside ASCII"),
        ("dp²", "outside ASCII"),
        ("ddp2", "no axis 'ddp'. Did you mean 'dp'?"),
        ("DP2", "Did you mean 'dp'?"),
        ("fsp4", "Did you mean 'fsdp'?"),
        ("2", "there is no axis '2'"),
        (".", "empty part"),
        ("dp2.", "empty part"),
        ("dp2..tp2", "empty part"),
        (":micro=2", "empty part"),
        ("dp", "the axis dp has no degree. Write dp2"),
        ("dp0", "a whole number from 1"),
        ("dp-1", "a whole number from 1"),
        ("dp+2", "a whole number from 1"),
        ("dp2x", "a whole number from 1"),
        ("dp2.5", "there is no axis '5'"),
        ("dp02", "without sign or leading zero. Write 2."),
        ("dp1048577", "to 1048576"),
        ("dp" + "9" * 5000, "to 1048576"),
        ("dp1024.tp2048", "needs 2097152 processes"),
        ("dp2.dp2", "the axis dp comes twice"),
        ("tp2.dp4", "Write dp4.tp2"),
        ("lone.dp2", "lone is one process and stands alone"),
        ("dp2:", "ends in a colon"),
        ("dp2:,", "there is no option ''"),
        ("dp2:mirco=2", "Did you mean 'micro'?"),
        ("dp2:Micro=2", "Did you mean 'micro'?"),
        ("dp2:micro", "has no value. Write micro=2"),
        ("dp2:micro=", "has no value"),
        ("dp2:micro=0", "a whole number from 1"),
        ("dp2:micro=2.5", "a whole number from 1"),
        ("dp2:micro=2,micro=2", "comes twice"),
        ("dp2:micro=2:workers=1", "a whole number"),
        ("dp2:workers=-1", "a whole number from 0"),
        ("dp2:recompute=all", "not a value of recompute. Known: block, none, selective"),
        ("pp2:micro=2,schedule=1F1B", "Did you mean '1f1b'?"),
        ("dp2:compile=true", "not a value of compile"),
        ("fsdp2:reshard=yes", "not a value of reshard"),
        ("fsdp2:zero=4", "not a value of zero"),
        ("fsdp2:zero=True", "not a value of zero"),
        ("dp2:schedule=gpipe", "schedule belongs to a pipeline"),
        ("dp2:virtual=2", "virtual belongs to a pipeline"),
        ("dp2:split=4", "split belongs to a pipeline"),
        ("dp2:reshard=true", "Add fsdpN, or drop reshard"),
        ("dp2:sequence=true", "Add tpN, or drop sequence"),
        ("tp2:sequence=1", "not a value of sequence"),
        ("tp2:zero=1", "Add dpN or fsdpN, or drop zero"),
        ("fsdp2:zero=1,reshard=true", "contradict"),
        ("dp3.ep2", "ep must divide dp x fsdp = 3, and 2 does not"),
        ("tp4.ep4", "ep must divide dp x fsdp = 1"),
        ("dp2.threads2", "beside no other axis"),
        ("threads2.dp2", "beside no other axis"),
        ("pp2:split=4/5", "cuts: 1; split names 2"),
        ("pp3:split=5/4", "must rise"),
        ("pp3:split=4/4", "must rise"),
        ("pp2:split=0", "a whole number from 1"),
        ("pp4:micro=3,schedule=1f1b", "micro=3 is less than 4. Take micro=4"),
        ("pp2:micro=2,schedule=1f1b,virtual=2", "one stage per rank"),
        ("pp2:schedule=gpipe,virtual=2", "one stage per rank"),
        ("pp2:micro=5,schedule=interleaved", "2 rounds do not divide micro=5. Take 4 or 6."),
        ("pp4:micro=9,schedule=zb,virtual=2", "Take 8 or 12."),
        ("pp2:micro=8,schedule=zbv,virtual=3", "holds 2 stages per rank"),
        ("pp2:micro=3,schedule=dualpipev", "micro=3 is less than 4"),
        ("pp2:micro=4,schedule=zb,compile=block", "which torch cannot compile"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_lesson(text: str, lesson: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert lesson in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        "pp4:schedule=gpipe",
        "pp4:micro=4,schedule=1f1b",
        "pp4:micro=3,schedule=interleaved,virtual=2",
        "pp4:micro=10,schedule=interleaved",
        "pp4:schedule=looped-bfs,virtual=2",
        "pp4:schedule=zbv",
        "pp2:micro=4,schedule=dualpipev",
        "pp2:micro=4,schedule=interleaved,compile=block",
    ],
)
def test_what_torch_can_schedule_is_accepted(text: str) -> None:
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize(
    "values",
    [
        {"dp": 0},
        {"dp": -2},
        {"dp": True},
        {"dp": 2.0},
        {"dp": "2"},
        {"workers": -1},
        {"recompute": None},
        {"recompute": "all"},
        {"fsdp": 2, "zero": True},
        {"fsdp": 2, "reshard": 1},
        {"pp": 2, "split": [4]},
        {"pp": 2, "split": (0,)},
    ],
)
def test_a_layout_made_in_python_obeys_the_same_rules(values: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        Layout(**values)


@pytest.mark.parametrize(
    "text", ["lone", "dp8:micro=4", "lone:micro=2,workers=3", "pp2.dp3.fsdp4.tp5:micro=8,schedule=zbv", "threads2"]
)
def test_most_layouts_are_available(text: str) -> None:
    Layout.parse(text).require_available()


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("pp2.cp2", "cp"),
        ("dp4.cp2.ep2", "cp, ep"),
        ("dp2.ep2", "ep"),
    ],
)
def test_what_this_version_cannot_run_yet_is_named(text: str, missing: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text).require_available()
    assert str(caught.value) == (
        f"{text}: not available yet in this version: {missing}. Available: lone, pp, dp, fsdp, tp and their products, "
        "threads, and every option."
    )


def test_a_world_of_the_wrong_size_is_told_what_fits() -> None:
    with pytest.raises(LayoutError) as caught:
        check_world(Layout.parse("fsdp4.tp2"), 6)
    assert str(caught.value) == (
        "fsdp4.tp2 needs 8 processes, but this world has 6. "
        "The product of the degrees must equal the world.\n"
        "Nearest that fit: fsdp3.tp2, fsdp6, fsdp2.tp3. "
        "Or start 8: shoal train job.py --layout fsdp4.tp2 --nproc-per-node 8"
    )


def test_a_world_of_the_right_size_passes() -> None:
    check_world(Layout.parse("fsdp4.tp2"), 8)
    check_world(Layout.parse("threads4"), 1)
    with pytest.raises(LayoutError, match="needs 1 process, but"):
        check_world(Layout.parse("threads4"), 4)


@pytest.mark.parametrize(
    ("text", "num_ranks", "nearest"),
    [
        ("lone", 4, ["dp4"]),
        ("dp2", 7, ["dp7"]),
        ("fsdp4.tp2", 1, ["lone"]),
        ("tp2", 4, ["tp4", "dp2.tp2", "dp4"]),
        ("threads2:micro=2", 2, ["dp2:micro=2"]),
        ("pp2.dp2:micro=2,schedule=1f1b", 6, ["pp2.dp3:micro=2,schedule=1f1b", "dp6:micro=2"]),
        ("pp2.dp2:split=4", 8, ["pp2.dp4:split=4", "pp4.dp2", "dp8"]),
        ("dp4.ep4", 6, ["dp6.ep2"]),
        ("fsdp2:reshard=true", 1, ["lone"]),
        ("tp2:sequence=true", 1, ["lone"]),
    ],
)  # fmt: skip
def test_the_nearest_layouts_keep_axes_and_options_that_still_hold(
    text: str, num_ranks: int, nearest: list[str]
) -> None:
    assert [str(layout) for layout in nearest_layouts(Layout.parse(text), num_ranks)] == nearest


@given(layouts(), st.integers(1, 4096))
def test_every_layout_named_as_near_fills_the_world(layout: Layout, num_ranks: int) -> None:
    near = nearest_layouts(layout, num_ranks)
    assert [each.num_ranks for each in near] == [num_ranks] * len(near)
    assert len(set(near)) == len(near) <= 3
    if layout.num_ranks == num_ranks and layout.threads == 1:
        assert near[0] == layout


def test_layouts_are_values() -> None:
    assert {Layout.parse("dp2"): "two"}[replace(Layout(), dp=2)] == "two"


@pytest.mark.parametrize(
    ("schedule", "torch_name", "virtual"),
    [
        ("gpipe", "GPipe", 1),
        ("1f1b", "1F1B", 1),
        ("interleaved", "Interleaved1F1B", 2),
        ("looped-bfs", "LoopedBFS", 2),
        ("zb", "InterleavedZeroBubble", 2),
        ("zbv", "ZBVZeroBubble", 2),
        ("zbv", "ZBVZeroBubble", 3),
        ("dualpipev", "DualPipeV", 2),
    ],
)
def test_a_schedule_is_refused_exactly_where_torch_refuses_it(schedule: str, torch_name: str, virtual: int) -> None:
    visualizer = pytest.importorskip(
        "torch.distributed.pipelining._schedule_visualizer", reason="private in torch; it has moved"
    )

    def torch_accepts(pp: int, micro: int) -> bool:
        try:
            visualizer.get_schedule_ops(torch_name, pp, micro, num_stages_per_rank=virtual)
        except ValueError:
            return False
        return True

    def shoal_accepts(pp: int, micro: int) -> bool:
        try:
            Layout(pp=pp, micro=micro, schedule=schedule, virtual=virtual)
        except LayoutError:
            return False
        return True

    grid = [(pp, micro) for pp in (2, 3) for micro in range(1, 8)]
    assert [shoal_accepts(*point) for point in grid] == [torch_accepts(*point) for point in grid]


@pytest.mark.parametrize(
    ("slip", "hint"),
    [("pd2", "Did you mean 'dp'"), ("dp2,tp2", "Write dp2.tp2"), ("dp2xtp2", "Write dp2.tp2"), ("fdsp2", "'fsdp'")],
)
def test_slips_are_told_the_layout_that_was_meant(slip, hint):
    with pytest.raises(LayoutError, match=hint):
        Layout.parse(slip)
