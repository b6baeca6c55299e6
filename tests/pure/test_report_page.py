"""The page of `shoal report`: what is on it, that it stands alone, and that odd input makes no odd page."""

import json
import math
import re
import shutil
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_samples import bench_folder, collectives_folder, measured, run_folder
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import ShoalError
from shoal.layout import Layout
from shoal.verbs.report import ReportError, write_page
from shoal.verbs.report.charts import Line, Ruled, lines, show_number, show_percent, size_ticks, stacked
from shoal.verbs.report.colours import of_axis, of_layout, of_runs, of_share
from shoal.verbs.report.page import sections
from shoal.verbs.report.parts import Table, shown
from shoal.verbs.report.places import draw_mesh
from shoal.verbs.report.schedule import read_picture
from shoal.verbs.report.sources import read_all

EVIL = '<script>alert("x")</script>&$x^2$'
VOID = {"meta", "link", "br", "use", "path", "rect"}


@dataclass
class Page(HTMLParser):
    """What a browser would find."""

    text: str
    titles: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    unclosed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.unclosed.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.unclosed.pop() == tag

    def handle_data(self, data: str) -> None:
        if "h2" in self.unclosed:
            self.titles.append(data)
        if {"td", "th"} & set(self.unclosed):
            self.cells.append(data)

    def values(self, *names: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags for name in names if name in attrs]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def page_of(*folders: Path) -> Page:
    return Page(write_page(folders).read_text("utf-8"))


def test_a_benchmark_has_all_its_sections_in_order(tmp_path: Path) -> None:
    assert page_of(bench_folder(tmp_path / "bench")).titles == [
        "What ran",
        "Results",
        "Loss",
        "Scaling",
        "Where the step goes",
        "Memory per rank",
        "Bytes on the wire",
        "Pipeline schedule",
        "DataParallel and DDP",
        "Mesh",
        "How the figures are meant",
    ]


def test_a_run_has_its_curves_its_schedule_and_its_mesh(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "gpt", "pp2:micro=2"))
    assert page.titles == [
        "What ran",
        "Loss",
        "Over the steps",
        "Evaluation",
        "Pipeline schedule",
        "Mesh",
        "How the figures are meant",
    ]
    for words in ("Throughput", "Step time", "MFU", "Gradient norm", "Learning rate", "accuracy"):
        assert words in page.text


def test_everything_at_once_goes_on_one_page_in_the_first_folder(tmp_path: Path) -> None:
    folders = [
        bench_folder(tmp_path / "a"),
        bench_folder(tmp_path / "b"),
        run_folder(tmp_path / "lone"),
        run_folder(tmp_path / "dp", "dp2"),
        collectives_folder(tmp_path / "links"),
    ]
    assert write_page(folders) == folders[0] / "report.html"
    page = Page((folders[0] / "report.html").read_text("utf-8"))
    assert {"Results: a", "Results: b", "Loss: runs", "Collectives"} <= set(page.titles)
    assert write_page(folders, tmp_path / "other.html") == tmp_path / "other.html"
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_command_prints_the_path(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    plain = CliRunner().invoke(app, ["report", str(folder)])
    assert (plain.exit_code, plain.output) == (0, f"{folder / 'report.html'}\n")
    told = CliRunner().invoke(app, ["report", str(folder), "--to", str(tmp_path / "page.html"), "--json"])
    assert json.loads(told.output) == {"exit_code": 0, "file": str(tmp_path / "page.html")}


def test_the_page_stands_alone_and_is_well_formed(tmp_path: Path) -> None:
    page = page_of(bench_folder(tmp_path / "a"), run_folder(tmp_path / "b", "pp2:micro=2"))
    links = page.values("src", "href", "xlink:href", "action", "poster", "data")
    assert links
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert re.findall(r"@import|url\((?!#)", page.text) == []
    assert page.count("script") == 0
    assert page.unclosed == []
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    targets = {link[1:] for link in links if link.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", page.text))
    assert targets <= set(ids)


def test_every_drawing_says_in_words_what_it_shows(tmp_path: Path) -> None:
    page = page_of(bench_folder(tmp_path / "a"), collectives_folder(tmp_path / "c"))
    drawings = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(drawings) > 8
    assert all(attrs["role"] == "img" and len(attrs["aria-label"] or "") > 20 for attrs in drawings)
    assert page.count("figcaption") == page.count("figure") == len(drawings)


def test_each_figure_of_the_table_is_on_the_page(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "bench")
    page = page_of(folder)
    row = json.loads((folder / "bench.json").read_text())["table"][2]
    assert row["layout"] == "dp2"
    for cell in (f"{row['step_ms']:.1f}", f"{row['rate']:,.0f}", f"{row['speed_up']:.2f}", f"{row['mfu']:.1%}"):
        assert cell in page.cells
    for name, share in row["shares"].items():
        assert name in page.cells
        assert f"{share:.1%}" in page.cells
    assert "same to 2e-8" in page.cells
    assert {"dp", "dp, by formula", "device busy"} <= set(page.cells)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    folders = [bench_folder(tmp_path / "a"), run_folder(tmp_path / "b", "pp2:micro=2")]
    first = write_page(folders).read_bytes()
    assert write_page(folders).read_bytes() == first
    assert b"2027-01-15 08:00 UTC" in first  # when the files were written, and no other date


def test_text_of_files_is_escaped(tmp_path: Path) -> None:
    refused = measured("cp2", error=EVIL)
    rows = [measured("lone"), measured("dp2"), refused]
    bad = bench_folder(tmp_path / "a", job=EVIL, fields={EVIL: EVIL}, rows=rows)
    run = run_folder(tmp_path / '<b> "中"', "pp2:micro=2", name=EVIL)
    page = page_of(bad, run)
    assert page.count("script") == page.count("b") == 0
    assert EVIL in page.cells
    assert page.unclosed == []


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"rows": [measured("lone")]},
        {"rows": [measured("lone", error="it does not fit")]},
        {"rows": [measured("lone", losses=[math.nan] * 3), measured("dp2", losses=[math.inf, 1.0, math.nan])]},
        {"rows": [measured("lone", losses=[2.0]), measured("dp2", losses=[2.0])]},
        {"rows": [measured("lone", losses=[]), measured("dp2", losses=[])], "mode": "weak"},
        {"rows": [measured("dp2"), measured("dp2:micro=2")]},
        {"rows": [measured("lone"), measured("dp2", peak_flops=None, model_flops=math.nan)]},
        {"rows": [measured("lone"), measured("threads2")]},
        {"rows": [measured("lone"), measured("dp32")]},
        {"mode": "weak"},
    ],
    ids=["none", "one", "refused", "nan", "one-step", "no-loss", "equal-devices", "no-peak", "threads", "many", "weak"],
)
def test_odd_benchmarks_make_a_page_without_empty_charts(tmp_path: Path, change: dict[str, Any]) -> None:
    page = page_of(bench_folder(tmp_path / "bench", **change))
    assert page.unclosed == []
    assert {"What ran", "Results"} <= set(page.titles)
    assert all(re.search(r"#[0-9a-f]{6}", body) for body in re.findall(r"<svg.*?</svg>", page.text, re.DOTALL))


def test_a_layout_that_trains_otherwise_is_told_first(tmp_path: Path) -> None:
    rows = [measured("lone"), measured("dp2", losses=[6.0] * 8)]
    text = page_of(bench_folder(tmp_path / "bench", rows=rows)).text
    assert text.index("dp2 DIFFERS") < text.index("<table", text.index("Results</h2>"))
    assert "shoal verify gpt --layout dp2" in text


@pytest.mark.parametrize(
    ("num_steps", "odd"),
    [(0, {}), (1, {}), (3, {2: math.nan}), (3, {1: math.inf, 2: math.nan, 3: math.nan}), (3000, {7: math.inf})],
)
def test_odd_runs_make_a_page(tmp_path: Path, num_steps: int, odd: dict[int, float]) -> None:
    page = page_of(run_folder(tmp_path / "run", num_steps=num_steps, odd=odd))
    assert page.unclosed == []
    assert len(page.text) < 400_000
    for step in odd if len(odd) == 1 else ():
        assert f"is not finite at 1 step ({step})" in page.text


def test_a_run_without_metrics_or_without_facts_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    assert "No figures yet" in page_of(run).text
    other = run_folder(tmp_path / "other")
    (other / "run.json").unlink()
    assert "Throughput" in page_of(other).text


def test_losses_of_runs_are_held_against_one_device_only_if_the_job_is_the_same(tmp_path: Path) -> None:
    lone, same, other = (
        run_folder(tmp_path / name, layout, seed=seed)
        for name, layout, seed in (("l", "lone", 0), ("s", "dp2", 0), ("o", "dp2", 1))
    )
    assert "The largest difference from l (lone) is 1e-8 of the loss" in page_of(same, lone).text
    page = page_of(lone, other).text
    assert "These runs train different jobs (seed)" in page
    assert "The largest difference" not in page


def test_traffic_of_the_master_grows_and_that_of_a_ring_does_not(tmp_path: Path) -> None:
    cells = page_of(bench_folder(tmp_path / "bench")).cells
    row = cells.index("16", cells.index("through each rank of a ring"))
    assert cells[row + 1 : row + 3] == ["60.0 MiB", "3.8 MiB"]  # 2 x 15 x 2 MiB, and a sixteenth of it
    assert "one process: replicas are not timed apart; all wait for the slowest" in cells
    assert [cell.partition(" (1 - ")[0] for cell in cells if "device busy:" in cell] == ["65%", "30%"]


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("bench.json", "{", "is damaged"),
        ("bench.json", "[1]", "the whole: input should be an object"),
        ("bench.json", '{"job": "gpt"}', "mode: field required"),
        ("run.json", "nonsense", "is damaged"),
        ("metrics.jsonl", "x\ny\n", "is no event"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, text: str, told: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ShoalError, match=told):
        write_page([tmp_path])
    assert not (tmp_path / "report.html").exists()


def test_nothing_to_show_says_how_to_make_something(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"has nothing to show.*shoal train"):
        write_page([tmp_path])
    with pytest.raises(ReportError, match="is not a folder"):
        write_page([tmp_path / "missing"])
    with pytest.raises(ReportError, match="cannot write"):
        write_page([run_folder(tmp_path / "run")], tmp_path / "no" / "page.html")


@pytest.mark.parametrize("name", ["matplotlib", "jinja2"])
def test_without_the_extra_the_line_that_installs_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    with pytest.raises(ReportError, match=rf"{name} is not installed.*pip install 'shoal\[report\]'"):
        write_page([run_folder(tmp_path / "run")])


def test_a_schedule_that_is_not_of_shoal_is_left_out(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "pp2:micro=2")
    good = (run / "schedule.svg").read_text()
    assert read_picture(good) is not None
    for bad in (
        good.replace("</svg>", "<script>1</script></svg>"),
        good.replace("<rect ", '<rect onclick="x()" ', 1),
        good[:300],
        "<svg/>",
        "",
    ):
        assert read_picture(bad) is None
    (run / "schedule.svg").write_text("<svg onload='x()'>")
    page = page_of(run)
    assert page.count("svg") > 0
    assert "its schedule.svg is damaged, or not of shoal" in page.text


def test_the_text_of_a_schedule_takes_the_colour_of_the_page_and_numbers_in_boxes_keep_theirs(tmp_path: Path) -> None:
    picture = read_picture((run_folder(tmp_path / "run", "pp2:micro=2") / "schedule.svg").read_text())
    assert picture is not None
    assert 'fill="currentColor">rank 0</text>' in picture.body
    assert 'fill="#ffffff">0</text>' in picture.body
    assert "<rect" not in picture.body.partition("rank 0")[0], "the white paper is left out"


def test_the_mesh_shows_each_rank_with_its_coordinates() -> None:
    texts = re.findall(r">([^<]+)</text>", draw_mesh(Layout.parse("pp2.dp2.tp2")).body)
    assert texts[0] == "8 devices"
    assert texts[1:7] == ["pp 0", "pp 1", "dp 0", "dp 1", "dp 0", "dp 1"]  # brackets, outermost first
    assert texts[-4:] == ["rank 7", "pp 1", "dp 1", "tp 1"]
    large = draw_mesh(Layout.parse("pp64.dp6.tp8")).body
    assert "3072 devices, the first 64" in large
    assert large.count(">rank ") == 64
    assert draw_mesh(Layout.parse("threads3")).body.count(">replica ") == 2


def test_each_host_is_drawn_around_its_own_devices_however_many_it_has(tmp_path: Path) -> None:
    body = draw_mesh(Layout.parse("pp2.dp3"), (("big", 4), ("small", 2))).body
    texts = re.findall(r">([^<]+)</text>", body)
    assert texts[0] == "6 devices on 2 hosts"
    assert [text for text in texts if "device" in text][1:] == ["big: 4 devices", "small: 2 devices"]
    tops = {text: float(y) for y, text in re.findall(r'y="([\d.]+)"[^>]*>(rank \d|big|small)', body)}
    frames = [
        (float(y), float(y) + float(tall))
        for y, tall in re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)" rx="10"', body)
    ]
    inside = [[rank for rank in range(6) if top < tops[f"rank {rank}"] < end] for top, end in frames]
    assert inside == [[0, 1, 2, 3], [4, 5]]
    assert frames[0][1] <= frames[1][0], "they do not overlap"
    assert texts.count("pp 1") == 1 + 3, "one bracket for the second stage, which is on both hosts, and its three ranks"


def test_a_run_that_knows_its_hosts_is_drawn_on_them_and_one_that_does_not_is_not(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "dp3")
    assert "host" not in page_of(run).text.partition("<h2")[2].partition("Mesh</h2>")[2].partition("A dashed")[0]
    facts = json.loads((run / "run.json").read_text())
    facts["world"]["hosts"] = [{"name": "big", "ranks": [0, 1]}, {"name": "small", "ranks": [2]}]
    (run / "run.json").write_text(json.dumps(facts))
    page = page_of(run)
    assert "On 2 hosts: big has 2, small has 1." in page.text
    assert "big (2 ranks), small (1 rank)" in page.cells
    facts["world"]["hosts"][1]["ranks"] = [7]
    (run / "run.json").write_text(json.dumps(facts))
    assert "On 2 hosts" not in page_of(run).text


def test_a_layout_has_one_colour_in_all_charts_of_lines(tmp_path: Path) -> None:
    assert of_layout("dp2:micro=4") == of_layout("dp4") == of_axis("dp")
    assert len({of_layout(text) for text in ("lone", "dp2", "fsdp2", "tp2", "pp2", "threads2", "pp2.tp2")}) == 7
    page = page_of(bench_folder(tmp_path / "bench", layouts=("lone", "fsdp2", "dp2"))).text
    for chart in ("Loss", "Relative difference from lone", "Speed-up", "Efficiency"):
        drawing = page.partition(f"<h3>{chart}</h3>")[2].partition("</svg>")[0]
        assert of_axis("dp") in drawing, chart
        assert of_axis("fsdp") in drawing, chart


def test_runs_of_one_layout_have_colours_of_their_own() -> None:
    found = of_runs({"a": "dp2", "b": "dp2", "c": "lone"})
    assert found["a"] == of_axis("dp")
    assert len(set(found.values())) == 3


def test_the_terms_of_each_table_are_explained_in_plain_sight(tmp_path: Path) -> None:
    """Without a pointer that hovers: on a phone there is none."""
    folders = [bench_folder(tmp_path / "a"), run_folder(tmp_path / "b"), collectives_folder(tmp_path / "c")]
    page = page_of(*folders)
    tables = [part for section in sections(read_all(folders)) for part in section.parts if isinstance(part, Table)]
    plain = [table for table in tables if not table.folded and table.title != "Last evaluation"]
    assert len(plain) > 6
    for table in plain:
        assert table.legend or table.prose, table.title
    results = next(table for table in plain if table.title.startswith("Of each layout"))
    for head in results.heads:
        term = head.removesuffix(" predicted").partition(" (")[0].partition(",")[0]
        assert term in results.legend or term in ("least", "most") or "/s" in term, head
    assert page.values("title") == []
    assert page.text.count('class="legend"') >= len(plain)


def test_small_shares_have_two_digits_and_a_lone_process_no_backend(tmp_path: Path) -> None:
    rows = [measured("lone", model_flops=2.13e5, versions={"backend": "none", "device": "cpu"}), measured("dp2")]
    page = page_of(bench_folder(tmp_path / "bench", rows=rows))
    assert "0.0012%" in page.cells
    assert "backend" not in page.cells
    assert [shown(share, ".1%") for share in (0.0, 0.255, 0.000213)] == ["0.0%", "25.5%", "0.021%"]


def test_a_layout_that_failed_is_told_with_its_log(tmp_path: Path) -> None:
    rows = [measured("lone"), measured("dp2", error="ValueError: no", log="dp2_rank_1.log")]
    text = page_of(bench_folder(tmp_path / "bench", rows=rows)).text
    assert "dp2 failed: ValueError: no (its log: logs/dp2_rank_1.log)" in text


def test_bars_of_shares_end_at_one_and_nothing_makes_no_chart() -> None:
    drawing = stacked({"lone": {"compute": 0.9, "other": 0.1}}, of_share, show=show_percent, label="share", whole=1.0)
    assert drawing is not None
    assert of_share("compute") in drawing.body
    assert ">90%<" in drawing.body
    assert stacked({"lone": {"compute": 0.0}}, of_share, show=show_percent, label="share") is None
    assert stacked({}, of_share, show=show_percent, label="share") is None


def test_a_long_line_keeps_its_spikes_and_a_short_one_makes_no_chart() -> None:
    axes = {"x": Ruled(label="step"), "y": Ruled(label="loss", is_log=True)}
    points: list[tuple[float, float | None]] = [(step, 1.0) for step in range(1, 100_001)]
    points[51_234] = (51_235, 1e6)
    drawing = lines([Line(name="a", points=points)], **axes)
    assert drawing is not None
    assert len(drawing.body) < 40_000
    assert ">1M<" in drawing.body
    assert lines([Line(name="a", points=[(1, 2.0)])], **axes) is None
    assert lines([Line(name="a", points=[(1, 0.0), (2, -1.0), (3, None)])], **axes) is None


def test_numbers_on_axes_are_short() -> None:
    assert [show_number(x) for x in (0, 0.25, 5.397, 1500, 2e6, 1e-7, 0.0005, 1e15)] == [
        "0", "0.25", "5.397", "1.5k", "2M", "1e-7", "5e-4", "1e15",
    ]  # fmt: skip
    assert size_ticks(44 * 2**20) == [8 * 2**20 * number for number in range(6)]


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, two = run_folder(tmp_path / "a" / "gpt"), run_folder(tmp_path / "b" / "gpt", "dp2")
    cells = page_of(one, two, one).cells
    assert cells[:2] == ["a/gpt", "b/gpt"]
    shutil.rmtree(two)


def test_no_file_of_a_run_is_replaced_by_a_page(tmp_path: Path) -> None:
    other = tmp_path / "run.json"
    other.write_text("{}")
    with pytest.raises(ReportError, match="exists and is not a page"):
        write_page([tmp_path], other)
    assert other.read_text() == "{}"
