"""The faults: how each is done to a run, and what has to follow."""

import functools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.verbs.drill import damage
from shoal.verbs.drill.follow import Measured, goes_on, is_told, leaves_nothing, saves, stops, waits
from shoal.verbs.drill.trial import Trial

_EVERY = 20  # steps from checkpoint to checkpoint

Does = Callable[[Trial, int], str]  # the harm, to a trial and a rank; gives words that must be said of it
Then = Callable[[Trial, int, str, Measured, Path], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One of them.

    Attributes:
        name: for a person.
        run: does it once: (a new folder, the run without harm, a seed for when and whom).
        repeats: in the whole drill.
        is_quick: part of the short one.
    """

    name: str
    run: Callable[[Path, Path, int], Measured]
    repeats: int = 3
    is_quick: bool = True


def _harm(
    does: Does, then: Then, layout: str, words: tuple[str, ...], folder: Path, reference: Path, seed: int
) -> Measured:
    """Raises TrialError where what should follow did not."""
    chance = random.Random(seed)
    trial = Trial(folder, "--layout", layout, "--save-every", str(_EVERY), *words)
    try:
        begin = chance.randint(_EVERY + 1, 4 * _EVERY)
        trial.until(lambda: trial.step >= begin, f"at step {begin}")
        time.sleep(chance.random() * 0.02)
        found = Measured(harmed_at_s=time.monotonic())
        rank = chance.randrange(2)
        then(trial, rank, does(trial, rank), found, reference)
        return found
    finally:
        trial.close()


def _run(does: Does, then: Then, *words: str, layout: str = "dp2") -> Callable[[Path, Path, int], Measured]:
    return functools.partial(_harm, does, then, layout, words)


def _kill(trial: Trial, rank: int) -> str:
    os.kill(trial.pid(rank), signal.SIGKILL)
    return "SIGKILL"


def _stop(trial: Trial, rank: int) -> str:
    os.kill(trial.pid(rank), signal.SIGSTOP)
    return "stopped"


def _kill_the_command(trial: Trial, rank: int) -> str:
    pids = [process.pid for process in trial.processes()]
    os.kill(trial.process.pid, signal.SIGKILL)
    return " ".join(map(str, pids))


def _ask(number: signal.Signals, code: int) -> Callable[[Trial, int], str]:
    def ask(trial: Trial, rank: int) -> str:
        os.kill(trial.process.pid, number)
        return str(code)

    return ask


def _sign(place: str, kind: str, words: str) -> Callable[[Trial, int], str]:
    def put_up(trial: Trial, rank: int) -> str:
        trial.sign(place, rank, kind)
        return words

    return put_up


_RESTARTS = ("--max-restarts", "3")
_WORKERS = "dp2:workers=2"

FAULTS = (
    Fault(name="kill -9 of a rank", run=_run(_kill, goes_on, *_RESTARTS), repeats=20),
    Fault(name="an exception", run=_run(_sign("forward", "raise", "ArithmeticError"), goes_on, *_RESTARTS)),
    Fault(name="out of memory", run=_run(_sign("forward", "memory", "memory"), goes_on, *_RESTARTS), is_quick=False),
    Fault(name="a segfault", run=_run(_sign("forward", "segfault", "SIGSEGV"), goes_on, *_RESTARTS)),
    Fault(name="an abort", run=_run(_sign("forward", "abort", "SIGABRT"), goes_on, *_RESTARTS), is_quick=False),
    Fault(name="a rank that leaves with 0", run=_run(_sign("forward", "leave", "exit code 0"), goes_on, *_RESTARTS)),
    Fault(name="kill -9 of the command", run=_run(_kill_the_command, leaves_nothing), repeats=20),
    Fault(name="SIGTERM", run=_run(_ask(signal.SIGTERM, 143), saves), repeats=15),
    Fault(
        name="SIGTERM, with loader workers",
        run=_run(_ask(signal.SIGTERM, 143), saves, layout=_WORKERS),
        repeats=15,
        is_quick=False,
    ),
    Fault(name="SIGUSR1", run=_run(_ask(signal.SIGUSR1, 143), saves), is_quick=False),
    Fault(name="SIGSTOP of a rank", run=_run(_stop, waits)),
    Fault(name="an endless loop", run=_run(_sign("forward", "loop", "_loop"), is_told)),
    Fault(
        name="native code that keeps the GIL",
        run=_run(_sign("forward", "hold", "_hold_the_gil"), is_told),
        is_quick=False,
    ),
    Fault(
        name="native code that waits for ever",
        run=_run(_sign("forward", "native", "_wait_in_native_code"), is_told),
        is_quick=False,
    ),
    Fault(
        name="a loader worker that never delivers",
        run=_run(_sign("sample", "sleep", "_sleep"), is_told, layout=_WORKERS),
    ),
    Fault(name="a gradient that is not finite", run=_run(_sign("forward", "nan", "not finite"), stops)),
    Fault(name="a collective too many", run=_run(_sign("forward", "collective", "_ask_once_more"), stops)),
    *(
        Fault(name=f"a checkpoint: {name}", run=functools.partial(damage.run, name), repeats=30)
        for name in damage.DAMAGES
    ),
)
