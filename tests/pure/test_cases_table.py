"""docs/cases.md: every row is whole, and what it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATES = ("cannot happen", "handled", "refused", "open", "later")


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its two head lines."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def named_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_there(name: str) -> bool:
    """Whether `room/file.py::test` is a test."""
    file, _, test = name.partition("::")
    path = ROOT / "tests" / file
    functions = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
    return test.startswith("test_") and any(isinstance(f, ast.FunctionDef) and f.name == test for f in functions)


CASES = rows((ROOT / "docs" / "cases.md").read_text())


def test_every_case_says_what_shoal_does():
    assert len(CASES) > 90
    for identifier, failure, state, _ in CASES:
        assert re.fullmatch(r"D\d{3}", identifier)
        assert failure
        assert state.startswith(STATES), f"{identifier}: {state}"


def test_what_is_not_open_is_shown_by_a_test():
    without = [(row[0], row[1]) for row in CASES if not named_in(row[3]) and not row[2].startswith(("open", "later"))]
    assert without == []


def test_every_test_that_a_case_names_exists():
    missing = [(row[0], name) for row in CASES for name in named_in(row[3]) if not is_there(name)]
    assert missing == []


@pytest.mark.parametrize(
    "name",
    [
        "pure/test_cases_table.py::test_of_no_such_name",
        "pure/test_nothing.py::test_x",
        "pure/test_cases_table.py::rows",
    ],
)
def test_a_test_that_is_not_there_is_missed(name):
    assert not is_there(name)


def test_no_case_is_told_twice():
    assert len({tuple(row[:2]) for row in CASES}) == len(CASES)
