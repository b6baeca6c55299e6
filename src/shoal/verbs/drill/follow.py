"""What must follow a harm, so that nothing is lost.

    goes_on         the group starts again by itself
    waits           who stands still is named; when it may go on, it does
    is_told         who stands still is named with its line; a person ends the run, and starts it again
    stops           the run ends with the reason and the rank; a person starts it again
    leaves_nothing  the command is gone, and with it all that it had started; a person starts it again
    saves           the step is finished and saved, and the run ends; a person starts it again

After each of them the run ends as if nothing had happened: the same bits in every weight and moment, and every sample
once in each epoch.
"""

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from shoal.verbs.drill.trial import Trial, TrialError

_STANDS_S = 10.0  # within which one that stands still must be named
_POLL_S = 0.01


@dataclass
class Measured:
    """What one trial showed, in seconds after the harm and in steps; None where there is nothing to measure."""

    told_s: float | None = None
    again_s: float | None = None
    lost: int | None = None
    harmed_at_s: float = field(default=0.0, repr=False)


class SilentError(TrialError):
    """The run ended with 0, and is not the training that it should be."""


def goes_on(trial: Trial, rank: int, words: str, found: Measured, reference: Path) -> None:
    """Started again by itself; the right rank is named; the end is that of the run without harm."""
    before, at = trial.step, trial.generation
    again = trial.until(lambda: trial.generation > at, "training again")
    found.again_s = again - found.harmed_at_s
    _ends_well(trial, reference)
    restarts = trial.incidents("restart")
    told = restarts[0] if restarts else {}
    _check(len(restarts) == 1, f"{len(restarts)} restarts are told, not 1")
    _check(told.get("rank") == rank, f"rank {told.get('rank')} is named, not {rank}: {told.get('text')}")
    _check(words in str(told.get("text")), f"{words!r} is not said: {told.get('text')}")
    found.told_s = found.again_s - float(told["took_s"])  # which counts from when it was seen
    found.lost = int(told["lost"])
    _check(before - found.lost <= int(told["step"]) + 1, "more steps are lost than it says")


def waits(trial: Trial, rank: int, words: str, found: Measured, reference: Path) -> None:
    """Named while it stands; then it may go on."""
    _is_named(trial, rank, words, found)
    os.kill(trial.pid(rank), signal.SIGCONT)
    _ends_well(trial, reference)


def is_told(trial: Trial, rank: int, words: str, found: Measured, reference: Path) -> None:
    """Named; then a person ends it, and starts it again."""
    _is_named(trial, rank, words, found)
    trial.process.send_signal(signal.SIGINT)
    _check(trial.end() == 130, f"Ctrl-C ended it with {trial.process.returncode}, not 130")
    _resumes(trial, found, reference)


def stops(trial: Trial, rank: int, words: str, found: Measured, reference: Path) -> None:
    """It ends with the reason and the rank; then a person starts it again."""
    code = trial.end()
    found.told_s = time.monotonic() - found.harmed_at_s
    _check(code not in (0, 130, 143), f"it ended with {code}")
    _check(words in trial.text(), f"{words!r} is not said: {trial.tail()}")
    _check(f"rank {rank}" in trial.text(), f"rank {rank} is not named: {trial.tail()}")
    _resumes(trial, found, reference)


def leaves_nothing(trial: Trial, rank: int, words: str, found: Measured, reference: Path) -> None:
    """The command is gone: within a second so is every process of it; then a person starts it again."""
    trial.process.wait(5)
    while left := [pid for pid in map(int, words.split()) if _runs(pid)]:
        _check(time.monotonic() - found.harmed_at_s < 1, f"{len(left)} processes are left after a second")
        time.sleep(_POLL_S)
    found.told_s = time.monotonic() - found.harmed_at_s
    _resumes(trial, found, reference)


def saves(trial: Trial, rank: int, words: str, found: Measured, reference: Path) -> None:
    """The step is finished and saved within the grace time, and nothing is lost."""
    code = trial.end(10)
    found.told_s = time.monotonic() - found.harmed_at_s
    _check(code == int(words), f"it ended with {code}, not {words}")
    _resumes(trial, found, reference)
    _check(found.lost == 0, f"{found.lost} steps are lost")


def _runs(pid: int) -> bool:
    """Whether it is there, and not only waits for somebody to take note of its end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_named(trial: Trial, rank: int, words: str, found: Measured) -> None:
    def is_there() -> bool:
        return any(row["rank"] == rank for event in trial.incidents() for row in event.get("ranks", ()))

    found.told_s = trial.until(is_there, f"named rank {rank}", limit_s=60) - found.harmed_at_s
    event = next(event for event in trial.incidents() if event.get("ranks"))
    named = [row["rank"] for row in event["ranks"]]
    _check(named == [rank], f"ranks {named} are named, not {rank}")
    _check(words in str(event["ranks"][0]), f"{words!r} is not said: {event['ranks'][0]}")
    _check(found.told_s <= _STANDS_S, f"named after {found.told_s:.1f} s")


def _resumes(trial: Trial, found: Measured, reference: Path) -> None:
    before, began = trial.step, time.monotonic()
    trial.start("--resume", "auto")
    at = trial.generation
    found.again_s = trial.until(lambda: trial.generation > at, "training again") - began
    _ends_well(trial, reference)
    found.lost = before - int(trial.begins()[-1])


def _ends_well(trial: Trial, reference: Path) -> None:
    code = trial.end()
    _check(code == 0, f"it ended with {code}: {trial.tail()}")
    if wrong := trial.wrong(reference):
        raise SilentError(wrong)


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise TrialError(text)
