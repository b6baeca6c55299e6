"""A small thread of a rank that speaks for it while it waits in a collective, where no parent of ours looks on.

another rank asks, in the store    ──►  what this one does, where, and its last calls, into the store
SIGTERM, and no end in a moment    ──►  the same in words, on stderr
"""

import base64
import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.frames import is_users, short_path

if TYPE_CHECKING:
    from types import FrameType

    from shoal.world.world import World

ASK = "calls/ask"
_LOOK_S = 1.0
_LEAVE_S = 2.0  # after SIGTERM, for a rank that only finishes its step


def answer_key(rank: int) -> str:
    """Where a rank's answer lies."""
    return f"calls/{rank}"


@contextlib.contextmanager
def on_watch(world: "World") -> Iterator[None]:
    """Within: the thread runs, if nobody else can look at this rank."""
    place = world.place
    if world.opened.met is None or (place.record and place.num_nodes == 1):
        yield
        return
    is_over, main = threading.Event(), threading.get_ident()
    with _signals() as signals:
        thread = threading.Thread(target=_watch, args=(world, main, signals, is_over), name="shoal-sentry", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def speak(world: "World", thread: int) -> None:
    """Lay what this rank does, and has called, where the others can read it."""
    assert world.calls is not None, "the world is watched"
    assert world.opened.met is not None, "its ranks have met"
    told = {
        "doing": world.record.seen().doing,
        "at": where(thread),
        "calls": base64.b64encode(zlib.compress(world.calls.ledger.data, 1)).decode(),
    }
    with contextlib.suppress(RuntimeError):  # the store went with rank 0
        world.opened.met.store.set(answer_key(world.rank), json.dumps(told))


def where(thread: int) -> str:
    """The user's innermost frame of a thread."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _watch(world: "World", main: int, signals: int | None, is_over: threading.Event) -> None:
    assert world.opened.met is not None, "its ranks have met"
    store, asked_at, has_spoken = world.opened.met.store, 0.0, False
    while not is_over.wait(_LOOK_S):
        asked_at = asked_at or (time.monotonic() if _has_come(signals) else 0.0)
        if asked_at and time.monotonic() - asked_at > _LEAVE_S:
            asked_at, signals = 0.0, None
            _say(world, main)
        with contextlib.suppress(RuntimeError):  # the store is gone: so is whoever would ask
            if not has_spoken and store.check([ASK]):
                has_spoken = True
                speak(world, main)


def _say(world: "World", main: int) -> None:
    at = where(main)
    doing = f"{world.record.seen().doing}{f', at {at}' if at else ''}"
    sys.stderr.write(f"rank {world.rank}: was asked to end (SIGTERM), and is still in {doing}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _signals() -> "Iterator[int | None]":
    """A pipe that signals come out of, also while the main thread waits in native code; None where another has one."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
    try:
        yield read_end if before == -1 else None
    finally:
        if before == -1:
            signal.set_wakeup_fd(-1)
        os.close(read_end)
        os.close(write_end)


def _has_come(signals: int | None) -> bool:
    """Whether SIGTERM has."""
    if signals is None or not select.select([signals], [], [], 0.0)[0]:
        return False
    return signal.SIGTERM in os.read(signals, 64)
