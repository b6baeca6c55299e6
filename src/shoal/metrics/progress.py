"""What the person who watches sees: a bar with ETA on a terminal, one plain line per logged step elsewhere.

Rank 0 alone owns one. No thread refreshes the bar: data workers may be forked from this process at any time.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol

from shoal.units import show_seconds, show_share

Values = Mapping[str, float | None]

_REFRESH_S = 0.1


class Progress:
    """Shows steps; `update` on every step or on logged ones, with the figures where there are any."""

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        stream: IO[str] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        stream = stream or sys.stdout or open(os.devnull, "w")  # noqa: SIM115  (stdout may be closed; the sink stays)
        kind = _Bar if _is_terminal(stream) else _Lines
        self._view: _View = kind(stream, start_step, total_steps, now)

    def update(self, step: int, values: Values | None = None) -> None:
        """`step` steps are done; `values` as in metrics.jsonl."""
        self._view.update(step, values or {})

    def note(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._view.note(text)

    def close(self) -> None:
        """Leaves the last state on the screen."""
        self._view.close()


def describe(values: Values) -> str:
    """`loss 2.31  1234 samples/s  12.3 ms/step  data 1%`: what a person follows, in a fixed order."""
    evaluated = {key: _show_evaluated(key) for key in values if key.startswith("eval/")}
    shown = ((show, values.get(key)) for key, show in {**_SHOWN, **evaluated}.items())
    return "  ".join(show(value) for show, value in shown if value is not None)


def _show_evaluated(key: str) -> Callable[[float], str]:
    return lambda value: f"{key.replace('/', ' ')} {value:.4g}"


_SHOWN: Mapping[str, Callable[[float], str]] = {
    "train/loss": lambda loss: f"loss {loss:.4g}",
    "perf/samples_per_s": lambda rate: f"{_count(rate)} samples/s",
    "perf/tokens_per_s": lambda rate: f"{_count(rate)} tokens/s",
    "perf/step_time_s": lambda seconds: f"{show_seconds(seconds)}/step",
    "perf/data_wait": lambda share: f"data {share:.0%}",
    "perf/mfu": lambda share: f"MFU {show_share(share)}",
}


def _count(rate: float) -> str:
    return f"{rate:.3g}" if abs(rate) < 1000 else f"{rate:,.0f}"


class _View(Protocol):
    def update(self, step: int, values: Values) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class _Lines:
    """For files, pipes and notebooks: whole lines, no control characters."""

    def __init__(self, stream: IO[str], start_step: int, total_steps: int, now: Callable[[], float]) -> None:
        self._stream, self._start, self._total, self._now = stream, start_step, total_steps, now
        self._began = now()

    def update(self, step: int, values: Values) -> None:
        text = describe(values)
        if text:
            self.note(f"step {step:{len(str(self._total))}d}/{self._total}  {text}{self._eta(step)}")

    def _eta(self, step: int) -> str:
        done, left = step - self._start, self._total - step
        return f"  {show_seconds((self._now() - self._began) / done * left)} left" if done > 0 < left else ""

    def note(self, text: str) -> None:
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except OSError:
            # Whoever read has gone (`| head`), or a disk is full; the training goes on, and Python's own flush at the
            # end finds a sink.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def close(self) -> None:
        pass


class _Bar:
    """For terminals, by rich."""

    def __init__(self, stream: IO[str], start_step: int, total_steps: int, now: Callable[[], float]) -> None:
        from rich import progress
        from rich.console import Console

        # A narrow terminal cuts the figures, never the bar.
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}", markup=False),
            console=Console(file=stream, highlight=False),
            auto_refresh=False,
            get_time=now,
        )
        self._now, self._shown = now, -_REFRESH_S
        self._task = self._bar.add_task("", total=total_steps, completed=start_step)
        self._bar.start()

    def update(self, step: int, values: Values) -> None:
        due = bool(values) or self._now() - self._shown >= _REFRESH_S
        changed: dict[str, Any] = {"description": text} if (text := describe(values)) else {}
        self._bar.update(self._task, completed=step, refresh=due, **changed)
        if due:
            self._shown = self._now()

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def _is_terminal(stream: IO[str]) -> bool:
    """Whether a bar can be redrawn in place; a closed or a stand-in stream says no."""
    try:
        if not stream.isatty():
            return False
    except ValueError:
        return False
    from rich.console import Console

    return not Console(file=stream).is_dumb_terminal
