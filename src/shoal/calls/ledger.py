"""The writing side: a rolling hash of the calls of each group, and the ring of the last ones.

That all ranks of all groups agree is one number: each rank adds, for each group, its hash times a weight, and the
weights of a group's ranks add up to 0. So does the whole sum, modulo a prime, if the hashes of each group are equal,
and else by chance alone (1 in 7e10). The sum travels with one that the step makes anyway.

    group of ranks 0, 1, 2 with hashes a, b, c:    2a - b - c = 0    (mod p)
"""

import mmap
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from shoal.calls.ring import COUNT, COUNT_AT, ENTRY_SIZE, FORM, HEAD, HEADER, NUM_ENTRIES, SIZE, TEXTS
from shoal.frames import OWN, is_users, short_path

PRIME = 2**36 - 5  # a world of 2 ** 17 ranks still adds such numbers up exactly, in float64
_FACTOR = 0x9E3779B97
_MOST_KNOWN = 4096  # kinds of calls, each with its texts
_MOST_FRAMES = 64
_USERS, _OWN, _ELSE, _END = range(4)
# What calls pass through, and none comes from.
_SEAMS = (f"{OWN}calls/", f"{OWN}world/messages.py", f"{OWN}metrics/watch.py", f"{OWN}precision.py")
_START = (f"{OWN}launch/rank.py", f"{OWN}launch/fork.py")  # below them lie the frames of the parent, in a fork


class Sums(NamedTuple):
    """What one rank adds to the sums over all: each of the world's is 0 modulo `PRIME` where the ranks agree.

    `order` and `places` are of the calls since the last sums and their places in the code: where they differ in order
    alone, two equal calls were swapped.
    """

    calls: int
    order: int
    places: int


@dataclass(slots=True)
class Channel:
    """The calls of one group.

    Attributes:
        weight: of this rank; 0: it is compared elsewhere than in the sums (messages from one rank to one).
    """

    label: bytes
    weight: int
    salt: int
    is_aside: bool = False  # called by a thread of the user's, whose time is its own
    count: int = 0
    hash: int = 0
    order: int = 0
    places: int = 0
    known: dict[object, tuple[int, int, bytes]] = field(default_factory=dict)

    @staticmethod
    def of(label: bytes, index: int, size: int) -> "Channel":
        """Of a group, in which this rank has that index; size 0: it is not compared in the sums."""
        weight = 0 if not size else (size - 1 if index == 0 else PRIME - 1)
        salt = zlib.crc32(label) + 1
        return Channel(label, weight, salt, hash=salt, order=salt)


class Ledger:
    """One for each world of a process."""

    def __init__(self, path: Path | None = None) -> None:
        self._buffer: bytearray | mmap.mmap = bytearray(SIZE) if path is None else _mapped(path)
        form, world, _ = HEADER.unpack_from(self._buffer)
        self._world = world + 1 if form == FORM else 1
        self._count = 0
        HEADER.pack_into(self._buffer, 0, FORM, self._world, 0)
        self._channels: list[Channel] = []
        self._kinds: dict[CodeType, int] = {}
        self._thread = threading.get_ident()
        self._native: set[int] = set()  # threads of torch's own, which never end
        self.step = 0

    @property
    def data(self) -> bytes:
        """The ring, as `read_ring` takes it."""
        return bytes(self._buffer)

    @property
    def num_calls(self) -> int:
        """That were noted."""
        return self._count

    def channel(self, label: bytes, index: int, size: int) -> Channel:
        """That of a group: see `Channel.of`."""
        channel = Channel.of(label, index, size)
        self._channels.append(channel)
        return channel

    def note(self, channel: Channel, call: object, describe: Callable[[Any], str] = str) -> None:
        """A call, which is about to be made by the code that is on the stack.

        Args:
            call: hashable; equal for what are equal calls of this process.
            describe: it in words, which are equal for equal calls of all processes.
        """
        if threading.get_ident() != self._thread and not channel.is_aside:
            channel.is_aside = self._is_users_thread()
        code, line, is_direct = self._place(sys._getframe(1))
        key = call, code, line, is_direct
        found = channel.known.get(key)
        if found is None:
            found = channel.known[key] = self._learn(channel, describe(call), code, line, is_direct=is_direct)
        number, placed, texts = found
        channel.count = count = channel.count + 1
        channel.hash = rolling = (channel.hash * _FACTOR + number) % PRIME
        channel.order = (channel.order * _FACTOR + placed) % PRIME
        channel.places += placed
        at = HEADER.size + self._count % NUM_ENTRIES * ENTRY_SIZE
        self._count += 1
        self._buffer[at : at + ENTRY_SIZE] = HEAD.pack(self._count, count, rolling, self.step) + texts
        COUNT.pack_into(self._buffer, COUNT_AT, self._count)

    def sums(self) -> Sums:
        """What this rank adds, of all that it has called so far; from here on the next ones are counted."""
        calls = order = places = 0
        for channel in self._channels:
            if channel.count and not channel.is_aside:
                calls += channel.weight * channel.hash
            if channel.places and not channel.is_aside:
                order += channel.weight * channel.order
                places += channel.weight * channel.places * channel.salt
            channel.order, channel.places = channel.salt, 0
        return Sums(calls % PRIME, order % PRIME, places % PRIME)

    @staticmethod
    def _learn(
        channel: Channel, what: str, code: CodeType | None, line: int, *, is_direct: bool
    ) -> tuple[int, int, bytes]:
        where = "" if code is None else f":{line} in {code.co_name}"
        # By its name alone: machines may have a file in other folders. What shoal calls may rightly come from
        # elsewhere on each rank: a block that one does not run is made up for.
        name = f"{code.co_filename.rpartition('/')[2]}{where}" if code is not None and is_direct else ""
        place = "" if code is None else f"{short_path(code.co_filename)}{where}"
        if len(channel.known) >= _MOST_KNOWN:
            channel.known.clear()
        texts = TEXTS.pack(channel.label, what.encode(), _end(place))
        return zlib.crc32(what.encode()) + 1, zlib.crc32(f"{what} {name}".encode()) + 1, texts

    def _place(self, frame: FrameType | None) -> tuple[CodeType | None, int, bool]:
        """The first frame that is neither torch's nor shoal's, or else shoal's; whether none of shoal's is above it."""
        kinds, own = self._kinds, None
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = kinds[code] = _kind(code.co_filename)
            if kind == _USERS:
                return code, frame.f_lineno, own is None
            if kind == _OWN and own is None:
                own = frame
            elif kind == _END:
                break
            frame = frame.f_back
        return (None, 0, False) if own is None else (own.f_code, own.f_lineno, False)

    def _is_users_thread(self) -> bool:
        """Whether Python has started this thread: those that compute backward on a GPU are torch's own."""
        ident = threading.get_ident()
        if ident in self._native:
            return False
        if any(t.ident == ident and not isinstance(t, threading._DummyThread) for t in threading.enumerate()):
            return True
        self._native.add(ident)
        return False


def _kind(filename: str) -> int:
    if filename.startswith(_START):
        return _END
    if filename.startswith(OWN):
        return _ELSE if filename.startswith(_SEAMS) else _OWN
    return _USERS if is_users(filename) else _ELSE


def _end(place: str) -> bytes:
    """A place that fits; of a long path its end, which says more."""
    data, most = place.encode(), 80
    return data if len(data) <= most else b"..." + data[3 - most :]


def _mapped(path: Path) -> bytearray | mmap.mmap:
    """Written whole: a hole in it, on a disk that is full, would end the process when it is noted into."""
    try:
        with path.open("a+b") as file:
            file.write(bytes(SIZE - file.tell()))
            file.flush()
            return mmap.mmap(file.fileno(), SIZE)
    except OSError:  # no room: nobody can read the notes, and training goes on
        return bytearray(SIZE)
