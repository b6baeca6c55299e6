"""Files that something has damaged: each is named with its field in one line, or the page is whole without it."""

import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from report_samples import bench_folder, collectives_folder, run_folder
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import ShoalError
from shoal.verbs.report import write_page

NUM_DAMAGES = int(os.environ.get("SHOAL_DAMAGES", "10"))
ODD = [None, True, "", "nan", "<b>", -1, 0, 7, 2.5, 1e308, -1e308, math.nan, math.inf, 10**40, [], {}, [[]], {"a": [1]}]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    bench_folder(folder / "bench", layouts=("lone", "threads2", "dp2", "pp2:micro=2"))
    run_folder(folder / "run", "pp2:micro=2", num_steps=4)
    facts = json.loads((folder / "run" / "run.json").read_text())
    facts["world"]["hosts"] = [{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}]
    (folder / "run" / "run.json").write_text(json.dumps(facts))
    collectives_folder(folder / "links")
    return folder


def damage(folder: Path, chance: random.Random) -> tuple[Path, str]:
    """One file, by one change; and the name of the last key on the way to it."""
    file = chance.choice(sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".html"))
    text = file.read_text("utf-8")
    if chance.random() < 0.15 or file.suffix == ".svg":
        at = chance.randrange(len(text))
        file.write_text(
            text[:at] + chance.choice(["", "\x00", '"', "}", "\n", "9" * 400]) + text[at + chance.choice([0, 1]) :]
        )
        return file, ""
    if chance.random() < 0.1:
        file.write_text(text[: chance.randrange(len(text))])
        return file, ""
    if file.suffix == ".jsonl":
        lines = text.splitlines()
        at = chance.randrange(len(lines))
        told = json.loads(lines[at])
        key = change(told, chance)
        lines[at] = json.dumps(told)
        file.write_text("\n".join(lines) + "\n")
    else:
        told = json.loads(text)
        key = change(told, chance)
        file.write_text(json.dumps(told))
    return file, key


def change(told: Any, chance: random.Random) -> str:
    """A value somewhere inside is another one, or not there; returns the nearest name."""
    name = ""
    while True:
        key = chance.choice(sorted(told) if isinstance(told, dict) else range(len(told)))
        name = key if isinstance(key, str) else name
        inner = told[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.85:
            told = inner
        elif chance.random() < 0.15:
            del told[key]
            return name
        else:
            told[key] = chance.choice(ODD)
            return name


@pytest.mark.parametrize("kind", ["bench", "run", "links"])
def test_whatever_is_damaged_is_named_with_its_field_or_left_out(kind: str, samples: Path, tmp_path: Path) -> None:
    refused = 0
    for seed in range(NUM_DAMAGES):
        folder = tmp_path / str(seed)
        shutil.copytree(samples / kind, folder)
        file, key = damage(folder, random.Random(seed))
        try:
            page = write_page([folder]).read_text("utf-8")
        except ShoalError as error:
            told = str(error)
            assert str(file) in told, (seed, told)
            assert "\n" not in told
            assert key in told or "is damaged" in told, (seed, key, told)
            refused += 1
        else:
            assert page.count("<svg") == page.count("</svg>")
            assert "<b>" not in page
            assert "nan%" not in page
        shutil.rmtree(folder)
    assert 0 < refused < NUM_DAMAGES, "some damage matters, and some does not"


@pytest.mark.parametrize(
    ("file", "where", "value", "told"),
    [
        (
            "bench.json",
            ("measured", 1, "ranks", 0, "peak_bytes", "parameters"),
            "9",
            "measured.1.ranks.0.peak_bytes.param",
        ),
        ("bench.json", ("table", 0, "step_ms"), None, "table.0.step_ms: input should be a valid number"),
        ("bench.json", ("table", 0, "layout"), "dp3", "table and measured do not name the same layouts"),
        ("run.json", ("world", "hosts", 0, "ranks"), 3, "world.hosts.0.ranks: input should be a valid array"),
        ("run.json", ("layout",), ["dp2"], "layout: input should be a valid string"),
        ("metrics.jsonl", ("train/loss",), "low", "metrics.jsonl, line 1 is no event, as train/loss is no number"),
    ],
)
def test_the_command_says_file_and_field_in_one_line(
    file: str, where: tuple[str | int, ...], value: object, told: str, samples: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(samples / ("bench" if file == "bench.json" else "run"), folder)
    first, *rest = (
        (folder / file).read_text().split("\n", 1) if file.endswith("jsonl") else [(folder / file).read_text()]
    )
    facts = json.loads(first)
    inner = facts
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    (folder / file).write_text("\n".join([json.dumps(facts), *rest]))
    found = CliRunner().invoke(app, ["report", str(folder)])
    assert isinstance(found.exception, ShoalError)  # `shoal` shows it in one line, and ends with 2
    assert told in str(found.exception)
    assert str(folder / file) in str(found.exception)


def test_a_figure_that_no_chart_can_hold_is_left_out_of_it(samples: Path, tmp_path: Path) -> None:
    folder = tmp_path / "huge"
    shutil.copytree(samples / "bench", folder)
    facts = json.loads((folder / "bench.json").read_text())
    facts["measured"][1]["losses"][2] = 1e308
    facts["table"][1]["shares"]["compute"] = 1e308
    (folder / "bench.json").write_text(json.dumps(facts))
    assert "threads2 is not finite at 1 step (3)" in write_page([folder]).read_text("utf-8")
