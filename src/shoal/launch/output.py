"""Where a rank's words go: its log, and the terminal."""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import BinaryIO, Literal, cast

Show = Literal["rank0", "all", "none"]


def open_output(log: Path, rank: int, show: Show) -> int:
    """Send this process's stdout and stderr to its log, and to the terminal where it may speak; the log's fd.

    A rank that does not speak is redirected at the level of file descriptors, native code included. One that
    speaks keeps the terminal itself, so that progress bars see it; its log then holds what Python wrote.
    """
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if show == "all" or (show == "rank0" and rank == 0):
        prefix = f"[{rank}] " if show == "all" else ""
        copy = _text(fd)
        sys.stdout, sys.stderr = Tee(_text(1), copy, prefix), Tee(_text(2), copy, prefix)
    else:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout, sys.stderr = Tee(_sink(), _text(1)), Tee(_sink(), _text(2))
    return fd


def log_only() -> contextlib.AbstractContextManager[object]:
    """Within, stderr is the log alone: what the parent shows better does not go to the terminal twice."""
    if isinstance(sys.stderr, Tee):
        return contextlib.redirect_stderr(sys.stderr.log)
    return contextlib.nullcontext()


def _text(fd: int) -> io.TextIOWrapper:
    # A new object: the parent's may be a notebook's or a test's, with locks and buffers of its own.
    # A character that the terminal cannot show must not end a training.
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _sink() -> io.TextIOWrapper:
    return _text(os.open(os.devnull, os.O_WRONLY))


class Tee(io.TextIOBase):
    """A terminal whose text is also kept in a log."""

    def __init__(self, shown: io.TextIOWrapper, log: io.TextIOWrapper, prefix: str = "") -> None:
        self._shown = shown
        self.log = log
        self._prefix = prefix
        self._unfinished = ""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk costs the log, not the training
            self.log.write(text)
        shown = text
        if self._prefix:
            *lines, self._unfinished = (self._unfinished + text).split("\n")
            shown = "".join(f"{self._prefix}{line}\n" for line in lines)
        try:
            self._shown.write(shown)
        except OSError:
            self._shown = _sink()  # whoever read has gone; the training goes on
        return len(text)

    def flush(self) -> None:
        for stream in (self._shown, self.log):
            with contextlib.suppress(OSError):
                stream.flush()

    def isatty(self) -> bool:
        return self._shown.isatty()

    def fileno(self) -> int:
        return self._shown.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # io declares an attribute
        return self._shown.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # io declares an attribute
        return self._shown.errors

    @property
    def buffer(self) -> BinaryIO:
        """The terminal's bytes; they do not reach the log."""
        self._shown.flush()
        return cast(BinaryIO, self._shown.buffer)
