"""The picture of a pipeline holds every action, in its place and colour, and is a file that programs read."""

import itertools
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from shoal.layout import Layout
from shoal.metrics.timeline import KINDS, as_data, as_table, draw
from shoal.parallel.pipeline.timetable import Span, timetable

UNITS = {"F": 0.01, "B": 0.02, "I": 0.01, "W": 0.01}
SVG = "{http://www.w3.org/2000/svg}"
LEFT, RIGHT = 60.0, 1170.0  # where time lies
WORLDS = ["pp2:micro=4", "pp4:micro=8,schedule=zbv", "pp3:micro=6,schedule=interleaved,virtual=3", "pp64:micro=64"]


def spans_of(layout, factor=1.0):
    return timetable(Layout.parse(layout), lambda kind, stage: UNITS[kind] * factor)


def read(picture):
    """The root of the drawing, its boxes as (colour, x, y, width, height), its texts as (x, y, text)."""
    root = ElementTree.fromstring(picture)
    box = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)H\1z")
    paths = [(path.get("fill"), path.get("d")) for path in root.iter(f"{SVG}path") if path.get("fill")]
    assert all(box.sub("", d) == "" for _, d in paths)
    boxes = [(fill, *map(float, found)) for fill, d in paths for found in box.findall(d)]
    texts = [(float(t.get("x")), float(t.get("y")), t.text) for t in root.iter(f"{SVG}text")]
    return root, boxes, texts


@pytest.mark.parametrize("layout", WORLDS)
def test_every_action_is_a_box_where_and_as_long_as_it_ran(layout):
    spans = spans_of(layout)
    _, boxes, _ = read(draw({layout: spans}))
    per_s = (RIGHT - LEFT) / max(span.end_s for span in spans)
    expected = sorted((s.rank, LEFT + s.start_s * per_s, LEFT + s.end_s * per_s) for s in spans)
    rows = sorted({y for _, _, y, _, _ in boxes})
    found = sorted((rows.index(y), x, x + width) for _, x, y, width, _ in boxes)
    assert np.allclose(found, expected, atol=0.6)  # half a pixel is left white between two
    heights = {height for *_, height in boxes}
    assert len(heights) == 1
    assert min(b - a for a, b in itertools.pairwise(rows)) > heights.pop(), "rows do not overlap"


@pytest.mark.parametrize("layout", WORLDS)
def test_all_is_inside_of_the_picture_and_ranks_are_named(layout):
    spans = spans_of(layout)
    root, boxes, texts = read(draw({layout: spans}))
    width, height = float(root.get("width")), float(root.get("height"))
    assert height < 1000
    assert all(x >= LEFT and x + w <= RIGHT + 0.1 and y >= 0 and y + h <= height for _, x, y, w, h in boxes)
    assert all(0 < x < width and 0 < y < height for x, y, _ in texts)
    for rank in {span.rank for span in spans}:
        assert sum(text == f"rank {rank}" for *_, text in texts) == 1


def test_a_box_holds_the_number_of_its_micro_batch_where_there_is_room():
    def numbers(spans):
        _, boxes, texts = read(draw({"": spans}))
        inside = [t for t in texts if any(x < t[0] < x + w and y < t[1] < y + h for _, x, y, w, h in boxes)]
        return sorted(int(text) for *_, text in inside)

    spans = spans_of("pp2:micro=12")
    assert numbers(spans) == sorted(span.micro for span in spans)
    assert numbers(spans_of("pp16:micro=512")) == [], "a smear is no number"


def test_predicted_and_measured_share_one_scale_and_tell_their_bubbles():
    measured = [
        Span(s.rank, s.stage, s.kind, s.micro, 100 + s.start_s, 100 + s.end_s) for s in spans_of("pp2:micro=4", 2.0)
    ]
    _, boxes, texts = read(draw({"predicted": spans_of("pp2:micro=4"), "measured": measured}))
    half = len(boxes) // 2
    first, second = boxes[:half], boxes[half:]
    for (colour, x, _, width, _), (other, twice_x, _, twice_width, _) in zip(first, second, strict=True):
        assert colour == other
        assert twice_width == pytest.approx(2 * width, abs=1.5)
        assert twice_x - LEFT == pytest.approx(2 * (x - LEFT), abs=1.5)
    titles = [text for *_, text in texts if "bubble" in text]
    assert titles == ["predicted: bubble 20.0%", "measured: bubble 20.0%"]
    ticks = [text for *_, text in texts if text == "0" or text.endswith(" ms")]
    assert ticks == ticks[: len(ticks) // 2] * 2
    assert ticks[-1] == "300 ms"
    assert max(y for _, _, y, _, _ in first) < min(y for _, _, y, _, _ in second)


def test_stages_of_a_rank_differ_in_shade_and_the_legend_shows_what_is_drawn():
    root, boxes, texts = read(draw({"": spans_of("pp2:micro=4,schedule=dualpipev")}))
    colours = {colour for colour, *_ in boxes}
    assert len(colours) == 2 * 4
    assert {rect.get("fill") for rect in root.iter(f"{SVG}rect")} == colours | {"#ffffff"}
    assert {name for name, _ in KINDS.values()} <= {text for *_, text in texts}
    _, _, texts = read(draw({"": spans_of("pp2:micro=4")}))
    assert {name for name, _ in KINDS.values()} & {text for *_, text in texts} == {"forward", "backward"}


def test_a_title_may_hold_any_sign():
    title = """<b>&amp; 'x' "y" 漢 ]]>"""
    _, _, texts = read(draw({title: [Span(0, 0, "F", 0, 0.0, 1.0)]}))
    assert texts[0][2] == f"{title}: bubble 0.0%"


def test_actions_that_take_no_time_can_be_drawn():
    read(draw({"": [Span(0, 0, "F", 0, 1.0, 1.0)]}))


# Machado, Oliveira and Fernandes 2009: what is seen, in linear RGB, without one of the three kinds of cones.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("vision", VISION)
def test_the_kinds_are_told_apart_by_every_kind_of_colour_vision(vision):
    shades = {kind: set() for kind in KINDS}
    for schedule in ("dualpipev", "zb,virtual=3", "interleaved,virtual=3"):
        spans = spans_of(f"pp2:micro=4,schedule={schedule}")
        for kind in KINDS:
            alone = [span for span in spans if span.kind == kind]
            if alone:
                shades[kind] |= {colour for colour, *_ in read(draw({"": alone}))[1]}
    for one, other in itertools.combinations(KINDS, 2):
        for a, b in itertools.product(shades[one], shades[other]):
            assert np.linalg.norm(lab(a, vision) - lab(b, vision)) > 15, (one, other, a, b)


def lab(colour, vision):
    """CIELAB of a colour as it is seen."""
    channels = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ seen / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_a_table_for_a_terminal():
    expected = """
step  rank 0  rank 1  rank 2
   0  F0      .       .
   1  F1      F0      .
   2  F2      F1      F0
   3  .       .       B0
   4  .       B0      F1
   5  B0      F2      B1
   6  F3      B1      F2
   7  B1      F3      B2
   8  .       B2      F3
   9  B2      .       B3
  10  .       B3      .
  11  B3      .       .
"""
    assert as_table(spans_of("pp3:micro=4")) == expected.strip("\n")


def test_the_table_is_one_of_order_and_not_of_times():
    slow = timetable(Layout.parse("pp3:micro=4"), lambda kind, stage: 1.0 + 0.3 * stage, message_s=0.2)
    assert as_table(slow) == as_table(spans_of("pp3:micro=4"))


def test_where_ranks_have_several_stages_the_table_says_which():
    table = as_table(spans_of("pp2:micro=2,schedule=zbv"))
    assert table.splitlines()[1:5] == [
        "   0  0F0     .",
        "   1  0F1     1F0",
        "   2  .       2F0",
        "   3  3F0     1F1",
    ]


def test_the_data_can_be_written_as_json_and_read_back():
    spans = spans_of("pp2:micro=4")
    data = json.loads(json.dumps(as_data(spans)))
    assert [Span(**span) for span in data.pop("spans")] == spans
    assert data == {"num_ranks": 2, "length_s": pytest.approx(0.15), "bubble": pytest.approx(0.2)}
