"""One run that is hurt, watched from outside as a person would: its screen, its folder, its processes."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from shoal.checkpoint.difference import compare
from shoal.errors import CheckpointError
from shoal.history import NAME as HISTORY
from shoal.history import Row, committed, problems
from shoal.launch.incident import INCIDENTS
from shoal.launch.incident import read as read_incidents
from shoal.verbs.drill import harm

JOB = "shoal.verbs.drill.job:Drill"
LIMIT_S = 90.0
_POLL_S = 0.005


class TrialError(AssertionError):
    """The run did not do what it had to; the message says what."""


class Watched:
    """A run, by what lies in its folder; `signs` is where it looks for harm, and notes its processes."""

    def __init__(self, folder: Path) -> None:
        self.run, self.signs = folder / "run", folder / "signs"
        self.signs.mkdir(parents=True, exist_ok=True)

    def command(self, *words: str) -> list[str]:
        """What starts it."""
        where = ["--run", str(self.run), "--set", f"signs={self.signs}", "--threads", "1", "--log-every", "1"]
        return [sys.executable, "-m", "shoal", "train", JOB, *where, *words]

    def is_over(self) -> bool:
        """Nothing of it runs any more."""
        raise NotImplementedError

    def tail(self) -> str:
        """The last that it has said."""
        raise NotImplementedError

    @property
    def _last(self) -> Row | None:
        rows = committed(self.run / HISTORY)
        return rows[-1] if rows else None

    @property
    def step(self) -> int:
        """The last step that is done, and counts."""
        return self._last.step if self._last else 0

    @property
    def generation(self) -> int:
        """Of that step."""
        return self._last.generation if self._last else 0

    def begins(self) -> list[int]:
        """The step from which each of its starts went on."""
        told = (json.loads(line) for line in (self.run / HISTORY).read_text().splitlines())
        return [row["begins"] for row in told if "begins" in row]

    def incidents(self, kind: str = "") -> list[dict[str, Any]]:
        """What stands in its folder, of one kind or of all."""
        return [row for row in read_incidents(self.run / INCIDENTS) if not kind or row.get("kind") == kind]

    def pid(self, rank: int) -> int:
        """Of a rank, as it has noted itself."""
        return int((self.signs / f"pid-{rank}").read_text())

    def sign(self, place: str, rank: int, kind: str) -> None:
        """See harm.py."""
        harm.sign(self.signs, place, rank, kind)

    def until(self, holds: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> float:
        """Wait; when that was, on the monotonic clock.

        Raises:
            TrialError: the run has ended before, or the time is up.
        """
        end = time.monotonic() + limit_s
        while not holds():
            if self.is_over() and not holds():
                raise TrialError(f"the run ended before it was {what}: {self.tail()}")
            if time.monotonic() > end:
                raise TrialError(f"not {what} within {limit_s:.0f} s: {self.tail()}")
            time.sleep(_POLL_S)
        return time.monotonic()

    def wrong(self, reference: Path, relative: float = 0.0) -> str:
        """What of its end is not as in the run that nothing happened to; empty where all is the same.

        Args:
            relative: how far a tensor may be off; 0 is to the bit.
        """
        rows = committed(self.run / HISTORY)
        if odd := problems(rows):
            return odd[0]
        if not rows or rows[0].step != 1:
            return "its history does not begin with step 1"
        try:
            found = compare(self.run, reference)
        except CheckpointError as error:
            return str(error)
        if found.only:
            return found.only[0]
        if found.tensors and found.tensors[0].relative > relative:
            return f"{found.tensors[0].name} is off by {found.tensors[0].relative:.1e} from the run without harm"
        return next((fact for fact in found.facts if fact.startswith("step")), "")


class Trial(Watched):
    """A run on this machine, in a folder of its own; started at once.

    Args:
        words: after `shoal train JOB`.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        super().__init__(folder)
        self.lines: list[str] = []  # what it says
        self._words = words
        self.start()

    def start(self, *more: str) -> None:
        """The command, again."""
        self.process = subprocess.Popen(
            self.command(*self._words, *more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            self.lines += lines

    def is_over(self) -> bool:
        """The command has ended."""
        return self.process.poll() is not None

    def processes(self) -> list[psutil.Process]:
        """All of them: the command's and those that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            command = psutil.Process(self.process.pid)
            return [command, *command.children(recursive=True)]
        return []

    def text(self) -> str:
        """All that it has said."""
        return "".join(self.lines)

    def tail(self) -> str:
        """The last of it."""
        return " | ".join(line.strip() for line in self.lines[-4:])

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; the exit code.

        Raises:
            TrialError: it does not end.
        """
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TrialError(f"still there after {limit_s:.0f} s: {self.tail()}") from None
        self._reader.join(5)
        return self.process.returncode

    def close(self) -> None:
        """Whatever happened, nothing of it stays."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()
