"""What a process is doing, in a small file that its parent reads: it outlives whatever ends the process.

The file is mapped into memory, so that noting costs about a microsecond and what was noted stays when the process
is killed. Its form is fixed (see `_PLACE` and the others); times are of CLOCK_MONOTONIC, which all processes of a
machine share.
"""

import contextlib
import enum
import mmap
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path


class Phase(enum.IntEnum):
    """A part of a run; the numbers are those of the file."""

    SETUP = 0
    DATA = 1  # the next batch is fetched
    COMPUTE = 2  # forward and backward
    UPDATE = 3  # norm, clipping, optimizer
    SAVE = 4
    EVALUATE = 5
    LOOP = 6  # what the loop does besides

    @property
    def label(self) -> str:
        """In words."""
        return {Phase.SETUP: "set-up", Phase.LOOP: "between its phases"}.get(self, self.name.lower())


_NEVER, _INSIDE, _LEFT, _ON_ITS_WAY = range(4)  # states of a message

_PLACE = struct.Struct("<8sq")  # _FORM, stage of the pipeline + 1; 0: no world has been opened
_DOING = struct.Struct("<4q")  # step, phase, micro-batch, since
_MESSAGE = struct.Struct("<2q24s24s24sq")  # state, since, operation, axis, group, number
_STATE = struct.Struct("<2q")  # the first two
_SPENT = struct.Struct("<5q")  # of each phase: how often, usual, total, waited, usual work
_FORM = b"shoal 1\0"

_DOING_AT = _PLACE.size
_MESSAGE_AT = _DOING_AT + _DOING.size
_SPENT_AT = _MESSAGE_AT + _MESSAGE.size
SIZE = _SPENT_AT + len(Phase) * _SPENT.size
_PAUSE = "pause"  # a file beside the records of a group
_REMEMBERED = 9  # durations of a phase, of which the usual one is the median
_LOOKS = 5


@dataclass(frozen=True, slots=True)
class Message:
    """A collective, or a message to one rank, as noted.

    `number` counts those of its group; it is 0 for a message from one rank to one, which others do not see.
    """

    operation: str
    axis: str
    group: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.operation} {self.axis}".strip()


@dataclass(frozen=True, slots=True)
class Spent:
    """On one phase so far, seconds; what is usual is the median of the last ones, `waited_s` for messages, `work_s` the
    rest."""

    count: int = 0
    usual_s: float = 0.0
    total_s: float = 0.0
    waited_s: float = 0.0
    work_s: float = 0.0  # usual


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A record as read."""

    is_used: bool = False  # a world was opened
    stage: int = 0  # coordinate on the axis pp
    step: int = 0  # in which it is, from 1; 0 before the first
    phase: Phase = Phase.SETUP
    micro: int = 0
    since_s: float = 0.0  # on the monotonic clock, when this phase began
    message: Message | None = None  # the last one
    is_inside: bool = False  # of the message
    message_since_s: float = 0.0  # when it entered, or left it
    spent: Mapping[Phase, Spent] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """`step 17, compute`."""
        part = f", micro-batch {self.micro + 1}" if self.micro and self.phase is Phase.COMPUTE else ""
        return f"step {self.step}, {self.phase.label}{part}" if self.step else self.phase.label

    @property
    def doing(self) -> str:
        """`step 17, compute, after all_reduce dp`."""
        if self.message is None:
            return self.where
        return f"{self.where}, {'inside' if self.is_inside else 'after'} {self.message}"

    @property
    def steps_here(self) -> int:
        """Steps that this process has done."""
        return self.spent.get(Phase.UPDATE, Spent()).count

    @property
    def done(self) -> int:
        """The last step that is done, also by an earlier process."""
        has_begun = self.phase is Phase.DATA or self.spent.get(Phase.DATA, Spent()).count > self.steps_here
        return max(0, self.step - has_begun)

    def shifted(self, offset_s: float) -> "Seen":
        """On a clock that is so far ahead."""
        return replace(self, since_s=self.since_s + offset_s, message_since_s=self.message_since_s + offset_s)

    @property
    def changed_s(self) -> float:
        """When anything was noted last."""
        return max(self.since_s, self.message_since_s)


def prepare(path: Path) -> None:
    """Make the file for a process that is about to start: in the set-up, since now."""
    buffer = bytearray(SIZE)
    _DOING.pack_into(buffer, _DOING_AT, 0, Phase.SETUP, 0, time.monotonic_ns())
    path.write_bytes(buffer)


def note_pause(path: Path) -> None:
    """Beside the record of any process of a group: it is asked to end, and the group starts again at once."""
    with contextlib.suppress(OSError):  # then the run says that it was stopped, and goes on all the same
        path.with_name(_PAUSE).touch()


def is_pause(path: Path) -> bool:
    """Whether that was noted."""
    return path.with_name(_PAUSE).exists()


def look(path: Path) -> Seen:
    """What stands in a file, also while it is written; nothing of use where there is none."""
    data = b""
    for _ in range(_LOOKS):  # what is read twice alike was not caught between two fields
        before, data = data, path.read_bytes() if path.exists() else b""
        if data == before:
            break
    return parse(data)


def parse(data: bytes) -> Seen:
    """The same of what has been read already, perhaps on another machine."""
    if len(data) != SIZE:
        return Seen()
    form, stage = _PLACE.unpack_from(data)
    step, phase, micro, since = _DOING.unpack_from(data, _DOING_AT)
    state, message_since, *names, number = _MESSAGE.unpack_from(data, _MESSAGE_AT)
    operation, axis, group = (name.rstrip(b"\0").decode("ascii", "replace") for name in names)
    spent = {}
    for each in Phase:
        count, *times = _SPENT.unpack_from(data, _SPENT_AT + each * _SPENT.size)
        spent[each] = Spent(count, *(time_ns / 1e9 for time_ns in times))
    return Seen(
        is_used=form == _FORM and stage > 0,
        stage=max(0, stage - 1),
        step=step,
        phase=Phase(phase),
        micro=micro,
        since_s=since / 1e9,
        message=None if state == _NEVER else Message(operation, axis, group, number),
        is_inside=state == _INSIDE,
        message_since_s=message_since / 1e9,
        spent=spent,
    )


class Record:
    """The writing side, one for each process; without a path nobody reads it, and all else is the same.

    After an error nothing is noted until the next phase: what the process was doing then is what is worth knowing.
    """

    def __init__(self, path: str = "") -> None:
        self.is_read = bool(path)
        self._buffer: bytearray | mmap.mmap = _mapped(path) if path else bytearray(SIZE)
        self._step, self._phase = 0, Phase.SETUP
        self._since = self._message_since = time.monotonic_ns()
        self._waited = 0
        self._has_failed = False
        self._spent = {phase: [0, 0, 0, 0, 0] for phase in Phase}
        self._last = {phase: deque[int](maxlen=_REMEMBERED) for phase in Phase}
        self._last_work = {phase: deque[int](maxlen=_REMEMBERED) for phase in Phase}
        self._begin(Phase.SETUP)

    def seen(self) -> Seen:
        """What a reader would see."""
        return parse(bytes(self._buffer))

    def stand(self, stage: int) -> None:
        """A world is open, and this process is in that stage of its pipeline."""
        _PLACE.pack_into(self._buffer, 0, _FORM, stage + 1)

    def loop(self, step: int) -> None:
        """The set-up is over: from here on, what is in no phase is the loop's own; `step` are done."""
        self._step = step
        if self._phase is Phase.SETUP:
            self._begin(Phase.LOOP)

    @contextlib.contextmanager
    def phase(self, phase: Phase, *, step: int | None = None) -> Iterator[None]:
        """Around a phase, of the step that is given or of the one before."""
        before, waited = self._phase, self._waited
        self._has_failed = False  # whatever it was, somebody has caught it
        if step is not None:
            self._step = step
        self._begin(phase)
        began = self._since
        try:
            yield
        except BaseException:
            self._has_failed, self._phase = True, before
            raise
        self._begin(before)
        self._count(phase, self._since - began, self._waited - waited)

    def micro(self, number: int) -> None:
        """The micro-batch that begins, from 0."""
        if not self._has_failed:
            _DOING.pack_into(self._buffer, _DOING_AT, self._step, self._phase, number, self._since)

    def enter(self, message: tuple[bytes, bytes, bytes, int]) -> None:
        """Operation, axis, group and number of what is asked for, or waited for."""
        if not self._has_failed:
            self._message_since = time.monotonic_ns()
            _MESSAGE.pack_into(self._buffer, _MESSAGE_AT, _INSIDE, self._message_since, *message)

    def asked(self) -> None:
        """It is on its way, and this process does something else."""
        self._turn(_ON_ITS_WAY)

    def leave(self) -> None:
        """It has arrived, and was waited for."""
        self._waited += time.monotonic_ns() - self._message_since
        self._turn(_LEFT)

    def broke(self) -> None:
        """It ended with an error: this process stays inside."""
        self._has_failed = True

    def _turn(self, state: int) -> None:
        if not self._has_failed:
            self._message_since = time.monotonic_ns()
            _STATE.pack_into(self._buffer, _MESSAGE_AT, state, self._message_since)

    def _begin(self, phase: Phase) -> None:
        if not self._has_failed:
            self._phase, self._since = phase, time.monotonic_ns()
            _DOING.pack_into(self._buffer, _DOING_AT, self._step, phase, 0, self._since)

    def _count(self, phase: Phase, took: int, waited: int) -> None:
        last, work, spent = self._last[phase], self._last_work[phase], self._spent[phase]
        last.append(took)
        work.append(took - waited)
        spent[0] += 1
        spent[1] = sorted(last)[len(last) // 2]
        spent[2] += took
        spent[3] += waited
        spent[4] = sorted(work)[len(work) // 2]
        _SPENT.pack_into(self._buffer, _SPENT_AT + phase * _SPENT.size, *spent)


def _mapped(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), SIZE)
