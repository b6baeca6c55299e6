"""Errors are lessons, and figures are for people."""

import inspect

import pytest

from shoal import errors
from shoal.errors import ShoalError, nearest
from shoal.units import show_bytes, show_count, show_seconds


def test_every_error_is_a_value_error_of_shoal_with_a_purpose() -> None:
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)]
    assert len(classes) >= 8
    assert issubclass(ShoalError, ValueError)
    assert all(issubclass(cls, ShoalError) and cls.__doc__ for cls in classes)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("stpes", ["steps", "keep"], " Did you mean 'steps'?"),
        ("zzz", ["steps", "keep"], " Known: keep, steps."),
        ("zzz", iter(("b", "a")), " Known: a, b."),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_or_with_all(name: str, known, hint: str) -> None:  # type: ignore[no-untyped-def]
    assert nearest(name, known) == hint


@pytest.mark.parametrize(
    ("show", "figure", "shown"),
    [
        (show_bytes, 0, "0 B"),
        (show_bytes, 1023, "1023 B"),
        (show_bytes, 1536, "1.5 KiB"),
        (show_bytes, 3 * 2**30, "3.0 GiB"),
        (show_bytes, 5 * 2**50, "5120.0 TiB"),
        (show_bytes, -2048, "-2.0 KiB"),
        (show_count, 0, "0"),
        (show_count, 999, "999"),
        (show_count, 1000, "1 k"),
        (show_count, 3_450_000, "3.45 M"),
        (show_count, 2e18, "2000 P"),
        (show_seconds, 0.0123, "12.3 ms"),
        (show_seconds, 1.5, "1.5 s"),
        (show_seconds, 75, "1 min 15 s"),
        (show_seconds, 3 * 3600 + 120, "3 h 2 min"),
        (show_seconds, 86_400, "24 h 0 min"),
    ],
)
def test_figures_are_shown_in_the_unit_a_person_reads(show, figure: float, shown: str) -> None:  # type: ignore[no-untyped-def]
    assert show(figure) == shown
