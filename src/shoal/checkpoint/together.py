"""Ranks that write one checkpoint talk through its temporary folder, from threads in which no collective may run.

step_000500.tmp-3f9a1c/
    rank_00000.safetensors      what each rank holds and no other writes
    rank_00001.safetensors
    rank_00001.json             what is in it, told to rank 0 when it is on the disk; or
    rank_00002.failed           why rank 2 gave up
    manifest.json               by rank 0 when all have told; then their words go, and the folder gets its name

That the name has come, or that the folder has gone, is what the others hear from rank 0.
"""

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.shelf import name_of, temporary_of, write_file

_PATIENCE_S = 600.0  # from when the own file is written
_POLL_S = 0.02
_SIGHT_TRIES = 6
GIVEN_UP = "rank 0 has given it up, and says why"


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint is being written, and the name that it will get."""

    temporary: Path
    final: Path

    def path_of(self, rank: int, suffix: str) -> Path:
        """`rank_00003.safetensors`"""
        return self.temporary / f"rank_{rank:05d}{suffix}"


@dataclass
class Patience:
    """How long others are waited for; who waits already heeds a change.

    Attributes:
        begun: this rank has done its own part, and waits for others.
    """

    limit_s: float = _PATIENCE_S
    begun: threading.Event = field(default_factory=threading.Event)

    def pause(self, since: float) -> bool:
        """Wait a little; False when the time since `since` (of time.monotonic) is over."""
        if time.monotonic() - since > self.limit_s:
            return False
        time.sleep(_POLL_S)
        return True

    def until_begun(self, thread: threading.Thread | None) -> None:
        """Until that thread only waits, or has ended."""
        while thread is not None and thread.is_alive() and not self.begun.wait(_POLL_S):
            pass


def open_slot(folder: Path, step: int) -> Slot:
    """Make the temporary folder of a save.

    Raises:
        OSError: it cannot be made.
    """
    final = folder / name_of(step)
    slot = Slot(temporary_of(final), final)
    os.mkdir(slot.temporary)
    return slot


def inode_of(slot: Slot) -> int:
    """What stays the same when the folder gets its name.

    Raises:
        OSError: this host does not see the folder.
    """
    for attempt in range(_SIGHT_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return os.stat(slot.temporary).st_ino
        time.sleep(0.01 * 2**attempt)  # a network file system may be late
    raise FileNotFoundError(
        errno.ENOENT, f"does not see {slot.temporary.parent}: a run folder must lie where every host sees it"
    )


def tell(slot: Slot, rank: int, manifest: Manifest) -> None:
    """To rank 0: what this rank has written. Appears whole.

    Raises:
        OSError: rank 0 has given up, or whatever the disk says.
    """
    _write_whole(slot.path_of(rank, ".json"), manifest.to_bytes())


def tell_failure(slot: Slot, rank: int, why: str) -> None:
    """To rank 0: why this rank has given up, as far as that can still be written."""
    with contextlib.suppress(OSError):
        slot.path_of(rank, ".safetensors").unlink(missing_ok=True)  # so that there is room for the reason
        _write_whole(slot.path_of(rank, ".failed"), why.encode())


def _write_whole(path: Path, text: bytes) -> None:
    partial = path.with_suffix(f"{path.suffix}.part")
    write_file(partial, [memoryview(text)])
    os.rename(partial, path)


def hear(slot: Slot, ranks: Sequence[int], patience: Patience) -> list[Manifest]:
    """On rank 0: what the other ranks have written, once all have told; their words are gone then.

    Raises:
        OSError: one of them failed, or has not told in time.
    """
    patience.begun.set()
    since = time.monotonic()
    while late := _late(slot, ranks):
        if not patience.pause(since):
            raise OSError(errno.ETIMEDOUT, f"rank {late[0]} has not told within {patience.limit_s:g} s that it wrote")
    words = [slot.path_of(rank, ".json") for rank in ranks]
    heard = [Manifest.from_bytes(path.read_bytes(), whole=False) for path in words]
    for path in words:
        path.unlink()
    return heard


def _late(slot: Slot, ranks: Sequence[int]) -> list[int]:
    # A listing asks the server of a network file system; a single name it may remember as missing.
    names = set(os.listdir(slot.temporary)) if ranks else set()
    for rank in ranks:
        if slot.path_of(rank, ".failed").name in names:
            raise OSError(errno.EIO, f"rank {rank}: {slot.path_of(rank, '.failed').read_text()}")
    return [rank for rank in ranks if slot.path_of(rank, ".json").name not in names]


def wait_for_name(slot: Slot, inode: int, patience: Patience) -> None:
    """On the other ranks: wait until rank 0 has given the folder its name.

    Raises:
        OSError: it has given up, or does not come to an end.
    """
    since = time.monotonic()
    while slot.temporary.name in os.listdir(slot.final.parent):
        if not patience.pause(since):
            raise OSError(errno.ETIMEDOUT, f"rank 0 has not joined the files within {patience.limit_s:g} s")
    if not slot.final.exists() or os.stat(slot.final).st_ino != inode:
        raise OSError(errno.EIO, GIVEN_UP)


def discard(slot: Slot) -> None:
    """Remove a save that is given up. Renamed first, so that no rank that still writes adds to it meanwhile."""
    doomed = temporary_of(slot.final)
    try:
        os.rename(slot.temporary, doomed)
    except OSError:
        doomed = slot.temporary
    shutil.rmtree(doomed, ignore_errors=True)
