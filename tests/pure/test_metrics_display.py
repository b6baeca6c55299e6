import io
import math

import pytest

from shoal.metrics.curve import can_draw_braille, draw_curve
from shoal.metrics.progress import Progress, describe

FIGURES = {"train/loss": 2.3026, "perf/samples_per_s": 12345.6, "perf/step_time_s": 0.0123, "perf/mfu": None}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FakeTime:
    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


def test_a_line_shows_what_is_known_in_a_fixed_order():
    assert describe(FIGURES) == "loss 2.303  12,346 samples/s  12.3 ms/step"
    assert describe({"perf/mfu": 0.123, "eval/accuracy": 0.975}) == "MFU 12.3%  eval accuracy 0.975"
    assert describe({"train/loss": math.nan}) == "loss nan"


def test_a_pipe_gets_plain_lines_on_logged_steps_only():
    stream, time = io.StringIO(), FakeTime()
    progress = Progress(100, start_step=50, stream=stream, now=time)
    progress.update(51)
    time.s = 20.0
    progress.update(60, FIGURES)
    progress.note("saved step 60")
    progress.update(100, {"train/loss": 1.0})
    progress.close()
    assert stream.getvalue().splitlines() == [
        # 10 of the 50 steps that are left took 20 s: 40 more take 80 s.
        "step  60/100  loss 2.303  12,346 samples/s  12.3 ms/step  1 min 20 s left",
        "saved step 60",
        "step 100/100  loss 1",
    ]


def test_a_terminal_gets_a_bar_and_notes_above_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = Progress(100, start_step=50, stream=stream)
    progress.update(60, FIGURES)
    progress.note("saved [step] 60")
    progress.close()
    shown = stream.getvalue()
    assert "60/100" in shown.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert "loss 2.303" in shown
    assert "saved [step] 60\n" in shown
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_redraw_gets_plain_lines(monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    stream = Terminal()
    progress = Progress(10, stream=stream)
    progress.update(10, FIGURES)
    progress.close()
    assert not {"\x1b", "\r"} & set(stream.getvalue())


def test_a_falling_loss_falls_on_the_screen():
    assert draw_curve([1, 8], [8.0, 1.0], width=4, height=2).splitlines() == [
        "8 ┤⠑⢄",
        "1 ┤  ⠑⢄",
        "  └────",
        "   1  8",
    ]


def test_a_gap_is_left_where_the_loss_was_nan():
    picture = draw_curve(range(5), [1.0, 1.0, math.nan, 1.0, 1.0], width=5, height=1, plain=True)
    assert picture.splitlines()[0] == "1 +** **"


def test_a_single_point_and_a_constant_lie_in_the_middle():
    assert draw_curve([7], [2.5], width=5, height=3, plain=True).splitlines() == [
        "    |",
        "2.5 +*",
        "    |",
        "    +-----",
        "     7",
    ]
    assert draw_curve([0, 4], [2.5, 2.5], width=5, height=3, plain=True).splitlines()[1] == "2.5 +*****"


def test_many_steps_share_a_column_by_their_mean_and_a_jump_has_no_hole():
    values = [0.0, 2.0] * 50 + [9.0] * 100
    assert draw_curve(range(200), values, width=2, height=10, plain=True, title="loss").splitlines() == [
        "loss",
        "9 + *",
        *["  | *"] * 7,
        "  |*",
        "0 +",
        "  +--",
        "   0199",
    ]


def test_nothing_to_draw_is_said():
    assert draw_curve([], []) == "(no finite values to draw)"
    assert draw_curve([1], [math.inf], title="loss") == "loss\n(no finite values to draw)"


def test_a_terminal_without_unicode_is_known_by_its_encoding():
    assert can_draw_braille("utf-8")
    assert not can_draw_braille("ascii")
    assert not can_draw_braille(None)
    assert draw_curve(range(9), range(9), plain=True).isascii()
