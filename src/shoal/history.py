"""history.jsonl: which samples each step of a run has trained on, over all starts of it.

    {"generation": 1, "begins": 0, "samples": 1797}
    {"step": 1, "epoch": 0, "first": 0, "count": 64, "generation": 1}
    {"generation": 2, "begins": 1, "samples": 1797}      what generation 1 did after step 1 is void, and comes again

Positions are those in the order of the epoch. The history that counts is what is left when void steps are gone.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "history.jsonl"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step: `count` samples from position `first` of an epoch of `samples` (None: a stream)."""

    step: int
    epoch: int
    first: int
    count: int
    generation: int
    samples: int | None = None


class HistoryWriter:
    """Appends to the file of a run; one process does, rank 0.

    Args:
        step: that is done; later ones are void. A run that begins at 0 begins the file anew.
        samples: of an epoch; None for a stream.
    """

    def __init__(self, path: Path, *, step: int, generation: int, samples: int | None, is_first: bool) -> None:
        self._generation = generation
        # One write for each line: whole, and with the system, when it returns.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_first and step == 0 else 0)
        self._file = os.open(path, flags | os.O_CLOEXEC, 0o666)
        self._write({"generation": generation, "begins": step, "samples": samples})

    def add(self, *, step: int, epoch: int, first: int, count: int) -> None:
        """A step that is done."""
        self._write({"step": step, "epoch": epoch, "first": first, "count": count, "generation": self._generation})

    def _write(self, row: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk costs the line, which `problems` will miss
            os.write(self._file, (json.dumps(row) + "\n").encode())

    def close(self) -> None:
        """Closing twice does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def committed(path: Path) -> list[Row]:
    """The steps that count, in their order; a line that was cut short is left out."""
    rows: list[Row] = []
    samples = None
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            told = json.loads(line)
        except ValueError:
            continue  # a kill came in the middle of it
        if "begins" in told:
            samples = told["samples"]
            rows = [row for row in rows if row.step <= told["begins"]]
        else:
            rows.append(Row(**told, samples=samples))
    return rows


def problems(rows: Iterable[Row]) -> list[str]:
    """Where the history leaves a step or a sample out, or has it twice; nothing when each position is there once."""
    found = []
    before: Row | None = None
    for row in rows:
        if before is not None and row.step != before.step + 1:
            found.append(f"step {row.step} follows step {before.step}")
        elif before is not None and (row.epoch, row.first) != _next(before, row):
            found.append(
                f"step {row.step} begins at sample {row.first} of epoch {row.epoch}, and step {before.step} ended "
                f"before sample {before.first + before.count} of epoch {before.epoch}"
            )
        before = row
    return found


def _next(before: Row, row: Row) -> tuple[int, int]:
    """Where the step after `before` must begin. How long an epoch of a stream is, only its end tells."""
    end = before.first + before.count
    is_over = end == before.samples if before.samples is not None else row.epoch > before.epoch
    return (before.epoch + 1, 0) if is_over else (before.epoch, end)


def in_words(rows: list[Row]) -> str:
    """One line: that each sample was there once, or what is wrong."""
    wrong = problems(rows)
    if not rows:
        return ""
    if wrong:
        return f"history is broken: {wrong[0]}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
    starts = len({row.generation for row in rows})
    over = f" over {starts} starts" if starts > 1 else ""
    return f"samples once each in every epoch, steps {rows[0].step} to {rows[-1].step}{over}"
