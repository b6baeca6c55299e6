"""Where the wall time of the steps goes: waiting for data, and the rest."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The steps since the last logged one: `seconds` of wall time, `data_wait_s` of them waiting for data."""

    steps: int
    seconds: float
    data_wait_s: float
    samples: int
    tokens: int

    @property
    def step_time_s(self) -> float:
        return self.seconds / self.steps if self.steps else float("nan")

    @property
    def data_wait(self) -> float:
        """Share of the wall time spent waiting for data."""
        return self.data_wait_s / self.seconds if self.seconds else 0.0

    def per_second(self, count: float) -> float:
        return count / self.seconds if self.seconds else float("nan")


class StepClock:
    """Adds up steps between two logged ones; what happens while `paused` (saving, evaluating) is left out.

    The host runs ahead of a GPU; a read of a result, as on every logged step, is what makes the sum true.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._restart()

    def _restart(self) -> None:
        self._since = self._now()
        self._steps = self._samples = self._tokens = 0
        self._data_wait_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the call that fetches the next batch."""
        began = self._now()
        try:
            yield
        finally:
            self._data_wait_s += self._now() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around work that belongs to no step."""
        began = self._now()
        try:
            yield
        finally:
            self._since += self._now() - began

    def end_step(self, samples: int = 0, tokens: int = 0) -> None:
        """Counts one step, and what this process (or the world, if the caller says so) learned from in it."""
        self._steps += 1
        self._samples += samples
        self._tokens += tokens

    def take(self) -> Interval:
        """What happened since the last `take`."""
        interval = Interval(
            steps=self._steps,
            seconds=self._now() - self._since,
            data_wait_s=self._data_wait_s,
            samples=self._samples,
            tokens=self._tokens,
        )
        self._restart()
        return interval
