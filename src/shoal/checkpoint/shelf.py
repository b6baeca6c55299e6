"""The folder that holds the checkpoints of a run: names, the one writer, leftovers, retention.

checkpoints/
    .lock                       held by the one process that writes here
    step_000400/                committed
    step_000500/                committed
    step_000600.tmp-3f9a1c/     being written, or left by a writer that was killed
    step_000200.tmp-77d012/     being deleted, or left by a deleter that was killed
    step_000500.old             an older save of a step that is just being replaced
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.fence import Fence
from shoal.errors import CheckpointError

_COMMITTED = re.compile(r"step_(\d{6,})(\.old)?")
_LEFTOVER = re.compile(r"step_\d{6,}\.tmp-[0-9a-f]+")
_LOCK_NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_MKDIR_TRIES = 6
_WRITE_BYTES = 16 << 20


@dataclass(frozen=True)
class Found:
    """A folder under the name of a committed checkpoint; whether it is good, only reading tells."""

    step: int
    path: Path

    @property
    def is_replaced(self) -> bool:
        """Moved aside by a save of the same step."""
        return self.path.name.endswith(".old")


def name_of(step: int) -> str:
    """`500` -> `step_000500`."""
    return f"step_{step:06d}"


def temporary_of(path: Path) -> Path:
    """A fresh name that no reader takes for a checkpoint and that the next writer may delete."""
    return path.with_name(f"{path.name.removesuffix('.old')}.tmp-{secrets.token_hex(6)}")


def step_in(name: str) -> int | None:
    """`step_000500` -> `500`; any other name -> None."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[Found]:
    """Committed checkpoints, newest step first, not yet read or verified."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        step = step_in(path.name)
        if step is not None:
            found.append(Found(step, path))
    return sorted(found, key=lambda item: (-item.step, item.is_replaced))


def make_folder(folder: Path) -> None:
    """Create a folder although others may create it too, on a file system whose answers may be late.

    On network file systems mkdir may say "exists" while stat still says "does not": only opening it decides.
    """
    for attempt in range(_MKDIR_TRIES):
        with contextlib.suppress(FileExistsError):
            os.makedirs(folder, exist_ok=True)
        try:
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            return
        except FileNotFoundError:
            time.sleep(0.01 * 2**attempt)
        except NotADirectoryError as error:
            raise CheckpointError(f"{folder} is a file, not a folder: choose another place with --run.") from error
    raise CheckpointError(f"{folder} cannot be created: the file system says both that it exists and that it does not.")


def sync_folder(folder: Path) -> None:
    """Names are data of the folder: a rename lasts only once the folder itself is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, parts: Iterable[memoryview]) -> None:
    """All bytes on the disk. os.write lets go of the GIL; it may write less than it was given."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            while part:
                part = part[os.write(descriptor, part[:_WRITE_BYTES]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """`No space left on device`, without number and path."""
    return error.strerror or str(error)


class FolderLock:
    """The right to write in a folder, held by one process at most, gone with it however it dies.

    A POSIX record lock: children made by fork (loader workers) do not inherit it, so an orphan of theirs
    cannot keep a restarted run out, and it works over NFS. Its known trap: closing any descriptor of the lock
    file in this process drops the lock, so one process opens one lock per folder.
    """

    def __init__(self, folder: Path, *, is_wanted: bool = True) -> None:
        self._descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.is_held = True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            if not is_wanted:
                self.is_held = False
                return
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            self.close()
            raise CheckpointError(
                f"{folder} is being written by another process ({holder or 'unknown'}). "
                "One run writes into one folder: wait for it, or choose another with --run."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.close()
                raise
            self.is_held = False  # a file system without locks: we write, but delete no leftovers
        else:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Let the next writer in. The file stays: deleting it would let two writers lock two files."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def leftovers(folder: Path) -> list[Path]:
    """Half-written and half-deleted checkpoints of writers that were killed."""
    found = (path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def remove_leftovers(folder: Path) -> None:
    """Delete what dead writers left; only for the holder of the lock, since then nobody else is writing."""
    for path in leftovers(folder):
        shutil.rmtree(path, ignore_errors=True)
    for found in list_checkpoints(folder):
        if found.is_replaced and found.path.is_dir() and not found.path.is_symlink():
            _settle(found.path)


def _settle(aside: Path) -> None:
    """A save that was to be replaced: superfluous if that came about, else the only one of its step."""
    if aside.with_suffix("").exists():
        remove_checkpoint(aside)
    else:
        os.rename(aside, aside.with_suffix(""))


def remove_checkpoint(path: Path) -> None:
    """Take the good name away first, so that a kill in the middle leaves no half checkpoint under it."""
    doomed = temporary_of(path)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def publish(temporary: Path, final: Path, fence: Fence | None = None) -> None:
    """Give a complete folder its name, if `fence` allows. An older save of this step moves aside, back on failure."""
    if fence is not None:
        fence.check()
    aside = final.with_name(final.name + ".old")
    replaces = final.is_dir()
    if replaces:
        if aside.exists():
            remove_checkpoint(aside)
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaces:
            os.rename(aside, final)
        raise
    sync_folder(final.parent)
    if replaces:
        with contextlib.suppress(OSError):  # the new one stands; the next writer deletes this
            remove_checkpoint(aside)
