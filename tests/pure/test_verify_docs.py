"""docs/verify.md shows what is: its code runs, its flags exist, and its table holds the mistakes that are planted."""

import re
from pathlib import Path

import typer

import shoal.cli
from shoal.verbs.verify import compare_runs
from shoal.verbs.verify.compare import GATE
from shoal.verbs.verify.mutants import MUTANTS
from shoal.verbs.verify.report import NOISE_LIMIT
from shoal.verbs.verify.runs import GATES

PAGE = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()


def rows(section: str) -> list[list[str]]:
    text = PAGE.partition(section)[2].partition("\n## ")[0]
    table = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return table[2:]


def test_the_loop_of_the_page_records_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(code, "docs/verify.md", "exec"), {})
    exec(compile(code.replace("runs/a", "runs/b"), "docs/verify.md", "exec"), {})
    assert compare_runs(tmp_path / "runs/a", tmp_path / "runs/b").verdict == "same"


def test_the_table_of_mistakes_is_that_of_the_self_test():
    assert rows("## The self-test") == [[mutant.name, mutant.layout] for mutant in MUTANTS]
    assert len(MUTANTS) >= 18
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_flags_of_the_page_are_those_of_the_verb():
    command = typer.main.get_command(shoal.cli.app).commands["verify"]
    flags = {name for param in command.params for name in param.opts if name.startswith("--")}
    assert {row[0] for row in rows("# shoal verify")} == flags | {"--help"}


def test_the_gates_of_the_page_are_those_of_the_code():
    told = " ".join(PAGE.split())
    gates = ", ".join(
        f"{gate:.0e} in {str(dtype).removeprefix('torch.')}".replace("e-0", "e-") for dtype, gate in GATES.items()
    )
    assert gates in told
    assert f"is at most {GATE:g}" in told
    assert f"up to {NOISE_LIMIT:g} x that floor" in told
