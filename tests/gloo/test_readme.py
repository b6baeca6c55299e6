"""What the documents show works: commands and code run, files exist, flags are real, tables are true."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from forked import well

from shoal.errors import LayoutError
from shoal.job import Job
from shoal.layout import Layout

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMAND_LINE = ROOT / "docs" / "command-line.md"

Block = tuple[str, str]  # language, text


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The lines of a shell block, without remarks."""
    lines = (re.sub(r"(^|\s+)#.*", "", line) for line in text.splitlines())
    return [line for line in lines if line]


def smaller(line: str) -> str:
    """The same line with a model that needs a third of the time: the command is what must work."""
    return line.replace("--set width=64 --set depth=2", "--set width=16 --set depth=1")


def table(document: Path, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its own two head lines."""
    section = re.split(r"^#+ ", document.read_text().partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder that looks like a clone with its environment switched on."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(command: list[str], folder: Path, *, text: str | None = None) -> str:
    """Run to exit code 0; what was said."""
    foreign = ("SHOAL_", "PYTEST_", "SLURM_", "OMPI_", "PMI_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=text or "",
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout


def is_of_the_shell(line: str) -> bool:
    """What is no more than `shoal ...` needs no new interpreter; that a shell finds it, one line shows."""
    return not line.startswith("shoal ") or line == "shoal test"


def forked_run(line: str, folder: Path) -> str:
    done = well(forked.start(" ".join(shlex.split(smaller(line))[1:]), folder, OMP_NUM_THREADS=1).wait(280))
    return done.out + done.err


@pytest.mark.timeout(300)
def test_everything_that_the_readme_shows_runs_in_order(folder: Path) -> None:
    said: dict[str, str] = {}
    for language, text in blocks(README):
        if language == "python":
            run([sys.executable, "-"], folder, text=text)
            continue
        assert language == "bash", f"a block of {language or 'no language'} would not be run"
        for line in commands(text):
            if not line.startswith("make "):
                said[line] = run(["bash", "-c", line], folder) if is_of_the_shell(line) else forked_run(line, folder)
    assert len(said) >= 6

    def said_by(words: str) -> str:
        return next(output for line, output in said.items() if words in line)

    assert "done at step 100" in said_by("my_job.py --layout dp2")
    assert "resumed from" in said_by("--resume auto")
    assert "done at step 150" in said_by("--resume auto")
    assert "x 2 data ranks" in said_by("torchrun")
    assert "FAIL" not in said_by("shoal test")
    assert "epoch 0" in said_by("shoal launch")
    assert (folder / "runs" / "own" / "checkpoints" / "step_000020").is_dir()


def test_the_pieces_of_the_job_page_run(folder: Path) -> None:
    (text,) = [text for language, text in blocks(ROOT / "docs" / "jobs.md") if language == "python"]
    check = "\nassert F.cross_entropy(model(points), dataset.tensors[1]) < 0.6, 'it has not learned'\n"
    run([sys.executable, "-"], folder, text=text + check)


def test_the_config_file_of_the_command_line_page_is_accepted(tmp_path: Path) -> None:
    from shoal.settings import TrainSettings, resolve

    (text,) = [text for language, text in blocks(COMMAND_LINE) if language == "toml"]
    path = tmp_path / "run.toml"
    path.write_text(text)
    values = resolve(TrainSettings, config=path).values
    assert (values.layout, values.save_every, values.set) == ("dp2", 100, {"lr": "0.0003"})


def test_the_job_of_the_readme_is_the_example() -> None:
    shown = [text for language, text in blocks(README) if language == "python"]
    assert (ROOT / "examples" / "my_job.py").read_text() in shown


def test_every_make_target_that_is_shown_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {name for path in DOCUMENTS for name in re.findall(r"(?:^|`)make (\w+)", path.read_text(), re.MULTILINE)}
    assert {"demo", "test"} <= shown <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_and_link_that_is_named_exists(document: Path) -> None:
    missing = [target for target in named_targets(document) if not is_there(document, target)]
    assert missing == []


def named_targets(document: Path) -> Iterator[str]:
    """Links, and paths in `code` that start with one of the repository's folders."""
    text = document.read_text()
    yield from re.findall(r"\]\(([^)\s]+)\)", text)
    yield from re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+(?:::\w+)?)`", text)


def is_there(document: Path, target: str) -> bool:
    if target.startswith("https://"):
        return True
    place, _, test = target.partition("::")
    place, _, anchor = place.partition("#")
    in_code = place.startswith(("src/", "tests/")) or (ROOT / place).exists()
    path = ROOT / place if place and in_code else document.parent / place if place else document
    if not path.exists():
        return False
    if anchor and anchor not in anchors(path):
        return False
    return not test or f"def {test}(" in path.read_text()


def anchors(document: Path) -> set[str]:
    """The headings of a document, as GitHub makes links of them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "verb",
    [
        "train",
        "bench",
        "launch",
        "doctor",
        "test",
        "checkpoint export",
        "checkpoint ls",
        "checkpoint verify",
        "checkpoint diff",
        "checkpoint gc",
    ],
)
def test_the_flags_of_the_table_are_those_of_the_verb(verb: str) -> None:
    shown = {row[0].strip("`") for row in table(COMMAND_LINE, f"shoal {verb}")}
    helped = subprocess.run(
        [sys.executable, "-m", "shoal", *verb.split(), "--help"],
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert shown == set(re.findall(r"^\W*(--[a-z-]+)", helped, re.MULTILINE))


def test_layouts_run_or_are_refused_as_the_readme_says() -> None:
    rows = table(README, "Layouts")
    assert {now for _, _, now in rows} == {"runs", "refused"}
    for layout, _, now in rows:
        parsed = Layout.parse(layout.strip("`"))
        if now == "runs":
            parsed.require_available()
        else:
            with pytest.raises(LayoutError, match="not available yet"):
                parsed.require_available()


def test_the_job_page_names_all_that_a_job_has() -> None:
    page = ROOT / "docs" / "jobs.md"
    fields = {field.name: field.default for field in dataclasses.fields(Job)}
    told = {name.strip("`"): default for name, default, _ in table(page, "Values")}
    assert told.keys() == fields.keys()
    for name, default in fields.items():
        expected = "yours to state" if default is dataclasses.MISSING else str(default)
        assert told[name].strip("`") == expected, name
    methods = {name for name, member in vars(Job).items() if callable(member) and not name.startswith("_")}
    assert methods == set(re.findall(r"^\| `(\w+)\(", page.read_text(), re.MULTILINE))
