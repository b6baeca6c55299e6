"""A page as data: sections of words, tables and figures. How they look is the template's business alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeGuard

from shoal.units import show_share

_HUGE = 1e100
_LONG = 1e12  # a figure of so many digits is written with an exponent
_MOST_LETTERS = 400


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What lies inside an <svg>, in units that are pixels at full size.

    Attributes:
        least: pixels of width below which it scrolls rather than shrinks.
    """

    width: float
    height: float
    body: str
    least: int = 0


@dataclass(frozen=True, kw_only=True)
class Words:
    """A paragraph; `loud` where nobody may miss it."""

    kind: ClassVar[str] = "words"
    text: str
    loud: bool = False


@dataclass(frozen=True, kw_only=True)
class Points:
    """A list of sentences."""

    kind: ClassVar[str] = "points"
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text; the first column names the row. `folded` until somebody asks; `prose` where cells are words.

    Attributes:
        legend: what each head and term means, for who has not met it.
    """

    kind: ClassVar[str] = "table"
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    prose: bool = False
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing, its finding in words, and its numbers."""

    kind: ClassVar[str] = "figure"
    title: str
    drawing: Drawing
    finding: str
    table: Table | None = None
    wide: bool = False


Part = Words | Points | Table | Figure


@dataclass(frozen=True, kw_only=True)
class Section:
    """Shown only where it has parts."""

    title: str
    parts: Sequence[Part] = field(default_factory=list)


def is_finite(value: object) -> TypeGuard[float]:
    """A figure that can be drawn: also its square, and its sum with others, must be one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HUGE


def shown(value: object, form: str = ".4g") -> str:
    """A figure, or what is there instead of one."""
    if is_finite(value):
        if form == ".1%" and abs(value) < 0.01:
            return show_share(value)
        return format(value, form if abs(value) < _LONG else ".4g")
    return "n/a" if value is None else f"{value}"[:_MOST_LETTERS]


def rows_of(told: Mapping[str, Any], names: Sequence[str], form: str) -> list[str]:
    """Cells of some figures, empty where there is none."""
    return [shown(told[name], form) if name in told else "" for name in names]


def several(number: int, what: str) -> str:
    """`2 steps`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
