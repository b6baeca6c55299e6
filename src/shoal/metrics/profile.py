"""What torch's profiler saw of one rank, sorted into the lanes of a trace. Pure: it reads what the profiler exports.

Whoever records puts marks around what only the run knows, as annotations on the same clock:

    shoal:data            waiting for the batch            shoal:call dp   asks for a message on this axis
    shoal:step 3          the step                         shoal:wait dp   stands still for one
    shoal:compute, shoal:update                            its two phases

gloo runs messages on threads of its own and tells operation and shapes, but no group. Each of those threads serves one
group, and torch's flight recorder knows what each group was asked for, by whom ever (DDP asks in C++): a thread whose
work only groups of one axis were asked for is of that axis. What is not told so has no axis. NCCL's kernels tell their
group.
"""

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.metrics.trace import COMMUNICATION, Event

MARK = "shoal:"
_DEPTH = 2  # of operations: those that code asks for, and what they are made of
_WRAPPER = "autograd::engine::evaluate_function: "  # around each node of a backward, which comes by its own name
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BYTES = {
    "bool": 1, "unsigned char": 1, "signed char": 1, "short": 2, "short int": 2, "c10::Half": 2, "c10::BFloat16": 2,
    "int": 4, "float": 4, "long": 8, "long int": 8, "double": 8, "c10::complex<float>": 8, "c10::complex<double>": 16,
    "Byte": 1, "Bool": 1, "Char": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8,
}  # fmt: skip  # of an element: gloo's events tell the C++ type, NCCL's the scalar type


@dataclass(frozen=True, slots=True)
class _Row:
    """A complete event of the profiler."""

    name: str
    kind: str
    thread: int  # on a device: the stream
    begin_ns: int
    end_ns: int
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """What groups were asked for.

    Attributes:
        axes: of each group, by its name.
        calls: of each group, how often by operation and shapes (`call_key`).
    """

    axes: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, Counter[str]] = field(default_factory=dict)


def call_key(operation: str, shapes: Sequence[Any]) -> str:
    """What is told of a call by both the profiler and the flight recorder: `gloo:all_reduce [[28]]`."""
    return f"{operation} {list(shapes)}"


def events_of(profile: Mapping[str, Any], asked: Asked) -> list[Event]:
    """The events of the steps in a profile, each in its lane; what lies between steps is left out."""
    rows = sorted(_rows(profile), key=lambda row: (row.begin_ns, -row.end_ns))
    marks = [row for row in rows if row.kind == "user_annotation" and row.name.startswith(MARK)]
    events = list(_steps(marks))
    inside = _Spans([(event.begin_ns, event.end_ns, event.name) for event in events])
    found = [row for row in rows if inside.at(row.begin_ns) and not row.name.startswith(MARK)]
    events += _of_marks(mark for mark in marks if inside.at(mark.begin_ns))
    events += _messages([row for row in found if _is_message(row)], marks, asked)
    events += _operations([row for row in found if row.kind in ("cpu_op", "user_annotation")], marks)
    for row in found:
        if row.kind in _ON_DEVICE and not _is_message(row):
            events.append(_event(f"cuda stream {row.thread}", row.name, row))
    return events


def axes_of_threads(done: Mapping[int, Counter[str]], asked: Asked) -> dict[int, str]:
    """The axis of each thread that runs messages, where what it did leaves only one.

    Args:
        done: by thread, how often it did what (`call_key`).
    """
    known = {key for calls in asked.calls.values() for key in calls}
    work = {thread: Counter({key: n for key, n in did.items() if key in known}) for thread, did in done.items()}
    left = {group: Counter(calls) for group, calls in asked.calls.items()}
    told: dict[int, str] = {}

    def candidates(thread: int) -> list[str]:
        return [group for group, calls in left.items() if work[thread] and work[thread] <= calls]

    while found := next((t for t in work if t not in told and len(candidates(t)) == 1), None):
        (group,) = candidates(found)
        left[group] -= work[found]  # what it did, no other thread has done
        told[found] = asked.axes[group]
    for thread in work:
        axes = {asked.axes[group] for group in candidates(thread)}
        if thread not in told and len(axes) == 1:
            told[thread] = axes.pop()
    return told


class _Spans:
    """Stretches of time that do not overlap, by name."""

    def __init__(self, spans: Iterable[tuple[int, int, str]]) -> None:
        self._spans = sorted(spans)

    def at(self, when_ns: int) -> str:
        """The name of the stretch around it; empty where there is none."""
        index = bisect.bisect_right(self._spans, (when_ns, math.inf, "")) - 1
        return self._spans[index][2] if index >= 0 and when_ns <= self._spans[index][1] else ""


def _rows(profile: Mapping[str, Any]) -> Iterator[_Row]:
    base_ns = int(profile["baseTimeNanoseconds"])
    for row in profile["traceEvents"]:
        if row["ph"] == "X" and isinstance(row["tid"], int):
            begin_ns = base_ns + round(row["ts"] * 1e3)
            end_ns = begin_ns + round(row["dur"] * 1e3)
            yield _Row(row["name"], row.get("cat", ""), row["tid"], begin_ns, end_ns, row.get("args", {}))


def _event(lane: str, name: str, row: _Row, **args: Any) -> Event:
    return Event(lane=lane, name=name, begin_ns=row.begin_ns, end_ns=row.end_ns, args=args)


def _steps(marks: Iterable[_Row]) -> Iterator[Event]:
    """From the wait for its batch to its end."""
    asked_ns: int | None = None
    for mark in marks:
        name = mark.name.removeprefix(MARK)
        if name == "data":
            asked_ns = mark.begin_ns
        elif name.startswith("step "):
            begin_ns = mark.begin_ns if asked_ns is None else asked_ns
            yield Event(lane="steps", name=name, begin_ns=begin_ns, end_ns=mark.end_ns)
            asked_ns = None


def _of_marks(marks: Iterable[_Row]) -> Iterator[Event]:
    for mark in marks:
        word, _, axis = mark.name.removeprefix(MARK).partition(" ")
        if word == "wait":
            yield _event("waits", f"wait for {axis}", mark, axis=axis)
        elif word == "compute":
            yield _event("compute", "forward and backward", mark)
        elif word in ("data", "update"):
            yield _event(word, word, mark)


# -- messages ----------------------------------------------------------------------------------------------


def _is_message(row: _Row) -> bool:
    return row.name.startswith("gloo:") or (row.kind == "kernel" and row.name.startswith("nccl"))


def _messages(rows: Sequence[_Row], marks: Sequence[_Row], asked: Asked) -> Iterator[Event]:
    calls: dict[int, list[tuple[int, int, str]]] = {}
    for mark in marks:
        if mark.name.startswith(f"{MARK}call "):
            calls.setdefault(mark.thread, []).append((mark.begin_ns, mark.end_ns, mark.name.split()[1]))
    here = {thread: _Spans(spans) for thread, spans in calls.items()}
    done: dict[int, Counter[str]] = {}
    for row in rows:
        if row.kind != "kernel" and row.thread not in here:  # a thread of gloo's own
            done.setdefault(row.thread, Counter())[call_key(row.name, row.args.get("Input Dims", ()))] += 1
    axes = axes_of_threads(done, asked)
    for row in rows:
        if row.kind == "kernel":
            operation, num_bytes = row.args.get("Collective name", row.name), _bytes_of_kernel(row)
            axis = asked.axes.get(row.args.get("Process Group Name", ""), "")
        else:
            operation, num_bytes = row.name.removeprefix("gloo:"), _bytes_of_inputs(row)
            axis = here[row.thread].at(row.begin_ns) if row.thread in here else axes.get(row.thread, "")
        told = {"operation": operation, **({"axis": axis} if axis else {}), "bytes": num_bytes}
        yield _event(f"{COMMUNICATION} {axis}".rstrip(), operation, row, **told)


def _bytes_of_inputs(row: _Row) -> int | None:
    """What this rank gives to it, or has room for; None where the profiler does not tell."""
    shapes, types = row.args.get("Input Dims", ()), row.args.get("Input type", ())
    if not shapes or len(shapes) != len(types) or any(kind not in _BYTES for kind in types):
        return None
    return sum(int(math.prod(shape)) * _BYTES[kind] for shape, kind in zip(shapes, types, strict=True))


def _bytes_of_kernel(row: _Row) -> int | None:
    size, count = _BYTES.get(row.args.get("dtype", "")), row.args.get("In msg nelems")
    return None if size is None or count is None else int(count) * size


# -- operations --------------------------------------------------------------------------------------------


def _operations(rows: Sequence[_Row], marks: Sequence[_Row]) -> Iterator[Event]:
    """Those of the threads that compute, to a depth; a thread besides the one that steps has a lane of its own."""
    phases = ("data", "compute", "update")
    spans = [(mark.begin_ns, mark.end_ns, mark.name.removeprefix(MARK)) for mark in marks]
    phase_at = _Spans([span for span in spans if span[2] in phases])
    main = next((mark.thread for mark in marks), 0)
    running: dict[int, list[int]] = {}
    for row in rows:
        if row.name.startswith((_WRAPPER, "gloo:", "nccl:")):
            continue
        ends = running.setdefault(row.thread, [])
        while ends and ends[-1] <= row.begin_ns:
            ends.pop()
        ends.append(row.end_ns)
        phase = phase_at.at(row.begin_ns)
        if len(ends) > _DEPTH or phase == "data":
            continue
        if row.thread != main:
            yield _event(f"compute (thread {row.thread})", row.name, row)
        else:
            yield _event("update" if phase == "update" else "compute", row.name, row)
