"""metrics.jsonl: one JSON object per line, append-only, readable while it grows and after a kill.

    {"step": 10, "time": 1767225600.0, "train/loss": 2.31, "perf/mfu": null}

JSON has no nan: figures that are not finite are the strings "NaN", "Infinity" and "-Infinity", which Python's
float() and JavaScript's Number() both read. null is a figure that could not be known ("n/a").
"""

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError

Event = dict[str, float | None]

MAX_COUNT = 2**53  # beyond, a step is no longer exact in JSON
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class MetricsError(ShoalError):
    """A metrics file, or what was asked to be written to it."""


class EventWriter:
    """Appends events to a metrics.jsonl; one process writes it, rank 0.

    On resume, `resume_step` is the step of the checkpoint: lines of later steps are cut, since they come
    again. A fresh run (None) empties the file. A step may have several lines as long as their keys differ.

    Raises:
        MetricsError: TensorBoard was asked for and is not installed.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_step: int | None = None,
        tensorboard: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._board = _open_tensorboard(path.parent, resume_step) if tensorboard else None
        self._step, self._keys = _cut(path, resume_step)
        self._restored = {(self._step, key) for key in self._keys}
        # Unbuffered: a line is with the system, whole, when write() returns.
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """One line; a full disk costs the line and a warning, not the training.

        Raises:
            MetricsError: the step, or a figure of it, was already written by this process.
        """
        # A finished run that is resumed evaluates its last step again; the file has those figures.
        values = {key: value for key, value in values.items() if (step, key) not in self._restored}
        if not values:
            return
        self._claim(step, set(values))
        shown = {key: _to_json(value) for key, value in values.items()}
        line = json.dumps({"step": step, "time": self._clock(), **shown}, allow_nan=False) + "\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            _write_all(self._file, line.encode())
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)
            warnings.warn(f"metrics of step {step} were not written: {error}", RuntimeWarning, stacklevel=2)
        if self._board is not None:
            for key, value in values.items():
                if value is not None:
                    self._board.add_scalar(key, value, step)

    def _claim(self, step: int, keys: set[str]) -> None:
        if step > self._step:
            self._step, self._keys = step, set()
        if step < self._step:
            raise MetricsError(f"step {step} was logged after step {self._step}. Log the steps in their order.")
        if again := sorted(keys & self._keys):
            raise MetricsError(f"{', '.join(again)} of step {step} was logged twice. Log each result once.")
        self._keys |= keys

    def close(self) -> None:
        """Ends the file; closing twice does nothing."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def set_aside(path: Path) -> Path | None:
    """The events of an earlier run, which saved no checkpoint to go on from, make place; returns where they went."""
    if not path.is_file() or not path.stat().st_size:
        return None
    number = 1
    while (place := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(place)


def read_events(path: Path) -> list[Event]:
    """The events by step, lines of one step merged; a half-written last line, as a kill leaves it, is dropped.

    Raises:
        MetricsError: there is no such file, or a line before the last is no event.
    """
    events: dict[float, Event] = {}
    for event in _read_lines(path):
        events.setdefault(event["step"] or 0, {}).update(event)
    return list(events.values())


def _read_lines(path: Path) -> list[Event]:
    try:
        *whole, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise MetricsError(f"there is no {path}; a run writes its metrics.jsonl at its first logged step") from None
    except OSError as error:
        raise MetricsError(f"{path} cannot be read: {error.strerror}") from None
    events = [_parse(line) for line in whole]
    if whole and isinstance(events[-1], str):
        events.pop()  # power was lost: the length reached the disk before the bytes
    for number, event in enumerate(events, start=1):
        if isinstance(event, str):
            shown = f"{whole[number - 1][:60]!r}"
            raise MetricsError(f"{path}, line {number} is no event, {event}: {shown}. Remove that line.")
    last = _parse(rest)
    return [event for event in (*events, last) if not isinstance(event, str)]


def _parse(line: bytes) -> Event | str:
    """An event, or what is wrong with it."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return "as it is no JSON"
    if not isinstance(event, dict):
        return "as it is no object"
    step = event.get("step")
    if not _is_number(step) or not isinstance(step, int) or not 0 <= step <= MAX_COUNT:
        return "as it has no step"
    odd = next((key for key, value in event.items() if not (value is None or _is_number(value))), None)
    return {key: _from_json(value) for key, value in event.items()} if odd is None else f"as {odd} is no number"


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in _NOT_FINITE
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= MAX_COUNT
    return isinstance(value, float)


def _to_json(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _from_json(value: Any) -> Any:
    return float(value) if value in _NOT_FINITE else value


def _cut(path: Path, resume_step: int | None) -> tuple[float, set[str]]:
    """Leaves the lines of steps up to `resume_step`; returns the last step that is left and its keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept: list[Event] = []
    if resume_step is not None and path.exists():
        kept = [event for event in _read_lines(path) if (event["step"] or 0) <= resume_step]
    _replace(path, kept)
    last = max((event["step"] or 0 for event in kept), default=-1)
    keys = {key for event in kept if event["step"] == last for key in event}
    return last, keys - {"step", "time"}


def _replace(path: Path, events: list[Event]) -> None:
    """The new content or the old, never a part: a kill in the middle of a resume loses no history."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as file:
        for event in events:
            shown = {key: _to_json(value) for key, value in event.items()}
            file.write(json.dumps(shown, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _write_all(file: Any, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _open_tensorboard(folder: Path, resume_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MetricsError(
            "TensorBoard is not installed. It is an extra: pip install 'shoal[tensorboard]'. "
            "metrics.jsonl holds the same figures without it."
        ) from None
    purge_step = None if resume_step is None else resume_step + 1
    return SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
