"""The command line in processes forked from this one, which has torch already: a start costs no import."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import run_processes  # noqa: F401  (sets this process up to be forked)

import shoal.cli
from shoal.launch import warm_up

warm_up(also=("shoal.run",))


@dataclass(frozen=True)
class Done:
    code: int | None
    out: str
    err: str


@dataclass(frozen=True)
class Started:
    """A process that was forked from this one."""

    process: Any
    folder: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return int(self.process.pid)

    def wait(self, limit_s: float = 60.0) -> Done:
        self.process.join(limit_s)
        assert self.process.exitcode is not None, f"still running after {limit_s} s"
        return Done(self.process.exitcode, (self.folder / "out").read_text(), (self.folder / "err").read_text())


def fork(work: Callable[[], object], folder: Path, **environment: object) -> Started:
    """Do something in a process of its own, in a folder, with a shell's stdout, stderr and signals."""
    output = folder / f"output_{time.monotonic_ns()}"
    output.mkdir()

    def main() -> None:
        os.chdir(folder)
        os.environ.update({name: str(value) for name, value in environment.items()})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), fd)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        work()

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return Started(process, output)


def start(words: str, folder: Path, **environment: object) -> Started:
    """`shoal WORDS`, running."""

    def main() -> None:
        sys.argv = ["shoal", *words.split()]
        shoal.cli.main()

    return fork(main, folder, **environment)


def run(words: str, folder: Path, **environment: object) -> Done:
    """`shoal WORDS`, done."""
    return start(words, folder, **environment).wait()


def well(done: Done) -> Done:
    assert done.code == 0, done.err
    return done


class Parent:
    """`shoal WORDS` in a folder, running, with what it says in a file; the face of `subprocess.Popen`."""

    def __init__(self, words: list[str], folder: Path, said: Path) -> None:
        def main() -> None:
            os.chdir(folder)
            os.environ["OMP_NUM_THREADS"] = "1"
            signal.signal(signal.SIGINT, signal.default_int_handler)
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for fd in (1, 2):
                os.dup2(out, fd)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
            sys.argv = ["shoal", *words]
            shoal.cli.main()

        said.touch()
        self._process = multiprocessing.get_context("fork").Process(target=main)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, limit_s: float | None = None) -> int:
        self._process.join(limit_s)
        code = self._process.exitcode
        assert code is not None, f"still running after {limit_s} s"
        return code

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
