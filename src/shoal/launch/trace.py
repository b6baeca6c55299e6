"""What an error says about the user's own code: the frame, the line, and a traceback that fits on a screen."""

import itertools
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.frames import is_users, short_path

MAX_FRAMES = 10
MAX_TEXT = 60_000
_RANK_FILE = str(Path(__file__).with_name("rank.py"))

# What gloo, NCCL and the stores say on a rank whose peer is gone; the cause is elsewhere.
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "connectFullMesh failed",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "NCCL communicator was aborted",
)


# How torch raises an error of a loader worker again: the worker's traceback, as text, in the message.
_CARRIED = re.compile(r"Caught \S+ in [^\n]+\.\nOriginal (Traceback \(most recent call last\):\n.*)", re.DOTALL)
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)\n(?:  (?!File ).*\n)*', re.MULTILINE)
_WORDS = re.compile(r"(?:[\w.<>]+\.)?(\w+)(?:: |\n|$)(.*)", re.DOTALL)


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: type, message, whole and trimmed traceback, the user's innermost frame."""
    whole = "".join(traceback.format_exception(error))
    place, line = _syntax_place(error) or _place(_user_frames(error))
    name, message = _name_and_message(error)
    return {
        "type": name,
        "message": message[:MAX_TEXT],
        "traceback": whole[-MAX_TEXT:],
        "excerpt": _excerpt(error),
        "user_frame": place,
        "source_line": line,
    }


def is_echo(type_name: str, message: str) -> bool:
    """Whether an error only says that another rank went away."""
    return type_name in ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError") and any(
        words in message for words in _ECHOES
    )


def crash_frames(dump: str) -> tuple[str, str, str]:
    """(excerpt, user frame, its source line) of faulthandler's dump; empty where there is none."""
    blocks = [_dumped(block) for block in _thread_blocks(dump)]
    frames = next((b for b in blocks if any(is_users(f.filename) for f in b)), blocks[0] if blocks else [])
    place, line = _place([f for f in frames if is_users(f.filename)] or frames)
    return "".join(traceback.StackSummary.from_list(_trim(frames)).format()), place, line


def innermost(dump: str) -> str:
    """Where the thread that wrote faulthandler's dump stands: its first line."""
    lines = next(iter(_thread_blocks(dump)), "").splitlines()
    return next((line for line in lines if line.startswith('  File "')), "")


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    try:
        return str(error)
    except Exception as second:  # the message is the user's code too
        return f"<its message cannot be shown: {type(second).__name__}>"


def _name_and_message(error: BaseException) -> tuple[str, str]:
    carried = _WORDS.fullmatch(_last_words(error).strip()) if _carried(error) else None
    return (carried[1], carried[2]) if carried else (type(error).__name__, _message(error))


def _syntax_place(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}", (error.text or "").strip()
    return None


def _place(frames: list[traceback.FrameSummary]) -> tuple[str, str]:
    if not frames:
        return "", ""
    frame = frames[-1]
    return f"{short_path(frame.filename)}:{frame.lineno} in {frame.name}", frame.line or ""


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The user's frames of an error; the innermost frame where there is none."""
    stack = _stack(error)
    return [frame for frame in stack if is_users(frame.filename)] or stack[-1:]


def _excerpt(error: BaseException) -> str:
    parts = []
    for link in reversed(list(_chain(error))):
        frames = _trim(_stack(link))
        parts.append("".join(traceback.StackSummary.from_list(frames).format()) + _last_words(link)[:2000])
    return "  which led to\n".join(parts[-3:])


def _carried(error: BaseException) -> str:
    """The worker's traceback of an error that torch has carried over from there; of a chain, the last link."""
    found = _CARRIED.fullmatch(_message(error))
    return found[1].rpartition("Traceback (most recent call last):\n")[2] if found else ""


def _stack(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error, from here into the worker where it arose."""
    inside = [_frame(*found) for found in _FRAME.findall(_carried(error))]
    return [*traceback.extract_tb(error.__traceback__), *inside]


def _last_words(error: BaseException) -> str:
    """What Python writes below the frames: type, message, notes."""
    carried = _carried(error)
    return _FRAME.split(carried)[-1] if carried else "".join(traceback.format_exception_only(error))


def _frame(file: str, line: str, name: str) -> traceback.FrameSummary:
    return traceback.FrameSummary(file, int(line), name, line=linecache.getline(file, int(line)).strip())


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _trim(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The user's frames and the last one."""
    kept = [frame for frame in stack[:-1] if is_users(frame.filename)] + stack[-1:]
    for frame in kept:
        frame.filename = short_path(frame.filename)
    return kept if len(kept) <= MAX_FRAMES else kept[:3] + kept[3 - MAX_FRAMES :]


def _thread_blocks(dump: str) -> list[str]:
    """The dump's threads; the one that crashed first."""
    parts = re.split(r"^(?=.*\(most recent call first\):)", dump, flags=re.MULTILINE)
    threads = [part for part in parts if "(most recent call first):" in part.partition("\n")[0]]
    return sorted(threads, key=lambda part: part.startswith("Thread "))


def _dumped(block: str) -> list[traceback.FrameSummary]:
    found = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', block, flags=re.MULTILINE)
    # Below the work lie the launcher and, in a forked rank, the parent's own stack.
    found = list(itertools.takewhile(lambda frame: frame[0] != _RANK_FILE, found))
    return [_frame(*frame) for frame in reversed(found)]


def print_whole(error: BaseException) -> None:
    """The traceback as Python prints it, on this rank's own stderr."""
    sys.stderr.write("".join(traceback.format_exception(error)))
