"""The folder of the run: is it one folder on all hosts, is a rename whole, how long does a byte take to be safe."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SEEN_S = 3.0  # a network file system may tell of new files only after a while
_FSYNCS = 5
_WRITE_BYTES, _BLOCK_BYTES, _WRITE_S = 64 * 2**20, 4 * 2**20, 1.0
_RENAMES = 50


def nearest(folder: str) -> Path:
    """The folder itself, or the part of its path that exists."""
    path = Path(folder).absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def leave(*, folder: str, token: str) -> dict[str, Any]:
    """On the first host: leave a token there, written whole and then renamed.

    Raises:
        OSError: nothing can be written there.
    """
    own = _own(folder, token)
    own.mkdir()
    partial = own / "token.tmp"
    with partial.open("w") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(own / "token")
    return {"torn": _torn(own)}


def find(*, folder: str, token: str) -> dict[str, Any]:
    """On the others: whether it is there; what is there instead."""
    path, until = _own(folder, token) / "token", time.monotonic() + _SEEN_S
    said = ""
    while time.monotonic() < until:
        try:
            if path.read_text() == token:
                return {"unseen": ""}
            said = "another text is there"
        except OSError as error:
            said = error.strerror or str(error)
        time.sleep(0.1)
    return {"unseen": said}


def _torn(own: Path) -> int:
    """Reads of a file, while it is replaced again and again, that find neither the old one nor the new one."""
    path, texts = own / "renamed", {"a" * 4096, "b" * 8192}
    path.write_text("a" * 4096)
    torn, is_over = 0, threading.Event()

    def read() -> None:
        nonlocal torn
        while not is_over.is_set():
            try:
                torn += path.read_text() not in texts
            except OSError:
                torn += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(_RENAMES):
            (own / "next").write_text("a" * 4096 if number % 2 else "b" * 8192)
            (own / "next").replace(path)
    finally:
        is_over.set()
        reader.join()
    return torn


def speed(*, folder: str, token: str) -> dict[str, Any]:
    """How long fsync takes, what is free, and the speed at which a checkpoint is written.

    Raises:
        OSError: nothing can be written there.
    """
    found = os.statvfs(nearest(folder))
    with _scratch(folder, token) as path:
        return {
            "fsync_s": _fsync_s(path),
            "free_bytes": found.f_bavail * found.f_frsize,
            "bytes_per_s": _bytes_per_s(path, found.f_bavail * found.f_frsize),
        }


@contextlib.contextmanager
def _scratch(folder: str, token: str) -> Iterator[Path]:
    path = nearest(folder) / f".shoal-doctor-{token}-{os.uname().nodename}-{os.getpid()}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _fsync_s(path: Path) -> float:
    """The median, of a small file that grows."""
    times = []
    with path.open("wb") as file:
        for _ in range(_FSYNCS):
            file.write(b"." * 4096)
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return sorted(times)[_FSYNCS // 2]


def _bytes_per_s(path: Path, free_bytes: int) -> float:
    """Of blocks that are safe at the end; random, since some file systems store zeros in no time."""
    block, written = os.urandom(_BLOCK_BYTES), 0
    began = time.perf_counter()
    with path.open("wb") as file:
        while written < min(_WRITE_BYTES, free_bytes // 2) and time.perf_counter() - began < _WRITE_S:
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return written / (time.perf_counter() - began)


def clean(*, folder: str, token: str) -> dict[str, Any]:
    """Take all away again."""
    shutil.rmtree(_own(folder, token), ignore_errors=True)
    return {}


def _own(folder: str, token: str) -> Path:
    return nearest(folder) / f".shoal-doctor-{token}"
