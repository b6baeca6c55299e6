"""A folder in shared memory that outlives every rank, and goes with the process that starts them, however that ends."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SHARED = Path("/dev/shm")
_LOCK = ".lock"


@contextlib.contextmanager
def shared_folder(*, is_wanted: bool = True) -> Iterator[Path | None]:
    """A folder that is deleted at the end; None where this system has no shared memory, or none is wanted.

    A parent that was killed cannot delete its own: the next one does. Who still lives holds a lock, which all
    namespaces of processes see.
    """
    if not is_wanted or not os.access(_SHARED, os.W_OK):
        yield None
        return
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=f"shoal-memory-{os.getuid()}-", dir=_SHARED))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left() -> None:
    for folder in _SHARED.glob(f"shoal-memory-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # it is held, or gone; one without a lock is being made
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
