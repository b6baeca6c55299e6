"""shoal doctor --drill: every fault, done to a small run on this machine, and a card of what became of it."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError
from shoal.units import show_seconds
from shoal.verbs.drill.faults import FAULTS, Fault
from shoal.verbs.drill.follow import Measured, SilentError
from shoal.verbs.drill.trial import Trial, TrialError


@dataclass
class Row:
    """One fault on the card.

    Attributes:
        wrong: of each trial that did not do what it had to, why.
        num_silent: of these, how many ended with 0 all the same.
    """

    name: str
    trials: list[Measured]
    wrong: list[str]
    num_silent: int = 0

    @property
    def count(self) -> int:
        return len(self.trials) + len(self.wrong)


@dataclass
class Card:
    """What became of all trials."""

    rows: list[Row]

    @property
    def exit_code(self) -> int:
        """1 where any trial was not as it must be."""
        return int(any(row.wrong for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"exit_code": self.exit_code, "faults": [asdict(row) for row in self.rows], "text": str(self)}

    def table(self) -> list[tuple[str, ...]]:
        """Head and rows: median, and in brackets the worst."""
        head = ("fault", "as it must be", "named after", "training again after", "steps lost")
        return [head, *(_cells(row) for row in self.rows)]

    def __str__(self) -> str:
        table = self.table()
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in table]
        lines = ["  ".join(row).rstrip() for row in cells]
        wrong = [f"{row.name}: {text}" for row in self.rows for text in row.wrong]
        silent = sum(row.num_silent for row in self.rows)
        total = sum(row.count for row in self.rows)
        last = f"{total} trials, {len(wrong)} not as they must be, {silent} silent (ended with 0, and wrong)"
        return "\n".join([*lines, "", *wrong, last])


def _cells(row: Row) -> tuple[str, ...]:
    told = [trial.told_s for trial in row.trials if trial.told_s is not None]
    again = [trial.again_s for trial in row.trials if trial.again_s is not None]
    lost = [float(trial.lost) for trial in row.trials if trial.lost is not None]
    return (
        row.name,
        f"{len(row.trials)} of {row.count}",
        _spread(told, show_seconds),
        _spread(again, show_seconds),
        _spread(lost, "{:.0f}".format),
    )


def _spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    return f"{show(statistics.median(values))} ({show(max(values))})" if values else ""


def drill(
    *, say: Callable[[str], None], whole: bool = False, only: str = "", seed: int = 0, folder: Path | None = None
) -> Card:
    """Do every fault; once each and the quick ones only, unless `whole`.

    Args:
        say: for a line about each trial.
        only: a part of the names of those that are wanted.
        folder: where the runs are kept; by default nowhere.

    Raises:
        LaunchError: no fault has such a name, or a run does not even train without harm.
    """
    chosen = [fault for fault in FAULTS if only in fault.name and (whole or only or fault.is_quick)]
    if not chosen:
        raise LaunchError(f"no fault is named {only!r}. There are: {', '.join(fault.name for fault in FAULTS)}.")
    rows = []
    with tempfile.TemporaryDirectory(prefix="drill") as own:
        place = folder or Path(own)
        reference = undisturbed(place / "reference")
        for number, fault in enumerate(chosen):
            seeds = range(seed, seed + (fault.repeats if whole else 1))
            rows.append(_row(fault, place / str(number), reference, seeds, say))
    return Card(rows)


def undisturbed(folder: Path) -> Path:
    """The run without harm.

    Raises:
        LaunchError: not even that ends well.
    """
    trial = Trial(folder, "--layout", "dp2", "--save-every", "20")
    try:
        if trial.end() != 0:
            raise LaunchError(f"a small run without any harm ended with {trial.process.returncode}:\n{trial.text()}")
    finally:
        trial.close()
    return trial.run


def _row(fault: Fault, place: Path, reference: Path, seeds: Sequence[int], say: Callable[[str], None]) -> Row:
    row = Row(fault.name, [], [])
    for seed in seeds:
        try:
            row.trials.append(fault.run(place / str(seed), reference, seed))
        except TrialError as error:
            row.wrong.append(f"seed {seed}: {error}")
            row.num_silent += isinstance(error, SilentError)
        last = row.wrong[-1] if row.wrong else "as it must be"
        say(f"{fault.name} ({row.count} of {len(seeds)}): {last}")
    return row
