"""How a start ended, and what an exit code means in words."""

import contextlib
import json
import shutil
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

FAILED = 1
MISTAKE = 2  # a ShoalError: the message says what to do
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
ON_REQUEST = (INTERRUPTED, TERMINATED)  # a rank that was asked to end and did


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank that failed: what it said, where, and the last lines of its log."""

    rank: int
    exit_code: int  # of the process; 128 + number for a signal
    type: str  # of the exception; "" where the process said nothing
    message: str  # of the exception, or the exit in words
    traceback: str = ""  # whole
    excerpt: str = ""  # the user's frames and the last
    user_frame: str = ""  # `train.py:12 in step`
    source_line: str = ""
    log_tail: tuple[str, ...] = ()
    log: Path | None = None
    doing: str = ""  # `step 17, compute, after all_reduce dp`, as it noted itself
    step: int = 0  # in which it was; 0: before the first, or not known
    at_s: float = 0.0  # after the start
    is_lesson: bool = False  # a ShoalError: the message is enough
    is_echo: bool = False  # an error that a failing peer causes here

    @property
    def error(self) -> str:
        """`ValueError: no batch left`, or the exit in words."""
        return f"{self.type}: {self.message}" if self.type and self.message else self.type or self.message


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a start ended: 0 only where every rank ended well."""

    exit_code: int
    failures: tuple[Failure, ...] = ()  # the first cause first
    others: tuple[str, ...] = ()  # what became of the other ranks, one line each
    seconds: float = 0.0


FAILURE = "failure.json"  # in a run's folder: how it failed


def keep_failure(folder: Path, outcome: Outcome, began: float) -> None:
    """Write a failure where `shoal why` finds it; one that cannot be written was shown all the same.

    Args:
        began: when the processes were started, on the clock of the day.
    """
    if not outcome.failures or not folder.is_dir():
        return
    partial = folder / f"{FAILURE}.tmp"
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps({"began": began, **asdict(outcome)}, indent=2, default=str) + "\n")
        partial.replace(folder / FAILURE)


def forget_failure(folder: Path) -> None:
    """A run goes on, or anew."""
    with contextlib.suppress(OSError):
        (folder / FAILURE).unlink(missing_ok=True)


_SIGNALS = {
    "SIGSEGV": "an invalid memory access in native code (an extension, or torch itself)",
    "SIGABRT": "native code gave up; under gloo, often two ranks in different collectives. The log has its last words",
    "SIGILL": "an instruction that this CPU does not have: a library built for another CPU",
    "SIGFPE": "an integer division by zero in native code",
    "SIGTERM": "somebody, or the system that scheduled this job, asked this rank to end",
    "SIGXCPU": "the limit of CPU time (ulimit -t) is used up",
    "SIGINT": "somebody interrupted this rank alone",
}


def exit_in_words(exit_code: int, *, num_memory_kills: int = 0) -> str:
    """What an exit code says; a negative one is the signal that ended the process.

    Args:
        num_memory_kills: how often the kernel's memory killer struck during the run.
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        return f"ended by signal {-exit_code}"
    if name == "SIGKILL":
        return f"killed by SIGKILL (-9): {_why_killed(num_memory_kills)}"
    if name == "SIGBUS":
        return f"killed by SIGBUS ({exit_code}): {_shared_memory()}"
    return f"killed by {name} ({exit_code})" + (f": {_SIGNALS[name]}" if name in _SIGNALS else "")


def _why_killed(num_memory_kills: int) -> str:
    if num_memory_kills:
        times = "once" if num_memory_kills == 1 else f"{num_memory_kills} times"
        return f"the kernel's memory killer struck {times} during this run, so host memory ran out"
    return (
        "somebody's kill -9, or a memory killer (host memory is the first suspect: see dmesg, or the memory "
        "limit of the container or batch job)"
    )


def _shared_memory() -> str:
    text = "memory that is mapped but not there; in most cases /dev/shm is full"
    if Path("/dev/shm").is_dir():
        total, used, _ = shutil.disk_usage("/dev/shm")
        text += f" (now {used / 2**20:.0f} of {total / 2**20:.0f} MiB)"
    return text + ". Enlarge it (docker --shm-size), or use fewer loader workers"
