"""What a check says: how bad, what was found, what to do; and how several hosts are told in one line."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]
_SHOWN = 3  # hosts or links of one line


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one check.

    Attributes:
        found: the measured value.
        fix: what to do, where something is wrong.
    """

    level: Level
    found: str
    fix: str = ""


def ok(found: str) -> Verdict:
    """All is well."""
    return Verdict(level="ok", found=found)


def warn(found: str, fix: str) -> Verdict:
    """A run will work, but not as well as it could."""
    return Verdict(level="warn", found=found, fix=fix)


def fail(found: str, fix: str) -> Verdict:
    """A run will break."""
    return Verdict(level="fail", found=found, fix=fix)


def listed(told: Iterable[str]) -> str:
    """The first few, and how many more there are."""
    lines = list(told)
    more = f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more


def counted(values: Sequence[str]) -> str:
    """`8`, where all hosts have the same, else `8 to 16`: the least and the most."""
    return values[0] if len(set(values)) == 1 else f"{values[0]} to {values[-1]}"
