"""From what the parent saw to an outcome: who failed first, and what became of the others."""

import re
from collections.abc import Sequence
from pathlib import Path

from shoal.launch.outcome import FAILED, ON_REQUEST, Failure, Outcome, exit_in_words
from shoal.launch.supervise import TAIL_BYTES, Rank
from shoal.launch.trace import crash_frames
from shoal.record import look
from shoal.units import show_seconds

TAIL_LINES = 50
_LEFT = "left with exit code 0 in the middle of a step: sys.exit() or os._exit(), in a module or beneath it"
CRASH = "Fatal Python error:"  # faulthandler's first words
# Of the stack that a rank was asked for while it stood still.
_STACK_LINE = re.compile(r'(Current thread|Thread) 0x\w+ (\[.*\] )?\(most recent|  File ".+", line \d+ in ')


def judge(
    ranks: Sequence[Rank], *, began: float, now: float, asked: Sequence[int], num_memory_kills: int, keep_logs: bool
) -> Outcome:
    """The outcome of ranks that have all ended.

    Args:
        began: when they were started, on the monotonic clock, as all times.
        asked: the signals that asked the parent to end.
        num_memory_kills: by the kernel, meanwhile.
        keep_logs: whether the logs stay, so that they may be named.
    """
    failed = [rank for rank in ranks if _counts(rank, ranks, asked)]
    # An echo may be heard before its cause, which was closing its connections first.
    failed.sort(key=lambda rank: (rank.is_echo, _failed_at(rank)))
    failures = tuple(_failure(rank, began, num_memory_kills, keep_logs=keep_logs) for rank in failed)
    first = failures[0] if failures else None
    others = tuple(
        f"rank {rank.rank}: {_fate(rank, first, began, num_memory_kills)}"
        for rank in ranks
        if first and rank is not failed[0]
    )
    return Outcome(exit_code=_exit_code(first, ranks, asked), failures=failures, others=others, seconds=now - began)


def _exit_code(first: Failure | None, ranks: Sequence[Rank], asked: Sequence[int]) -> int:
    if asked:
        return 128 + asked[0]
    if first is not None:
        return first.exit_code
    return max(((rank.exit or 0) for rank in ranks), default=0)


def _counts(rank: Rank, ranks: Sequence[Rank], asked: Sequence[int]) -> bool:
    if asked:
        # Ranks that are told to end break each other's connections; an error of its own is worth showing.
        return bool(rank.failure) and not rank.is_echo
    if rank.has_failed:
        return True
    alone = any(other.has_failed for other in ranks)
    return alone and rank.exit in ON_REQUEST and not rank.ended_by_us


def _failed_at(rank: Rank) -> float:
    return float(rank.failure.get("at", rank.done.get("at", rank.ended_at or 0.0)))


def _failure(rank: Rank, began: float, num_memory_kills: int, *, keep_logs: bool) -> Failure:
    told = rank.failure
    exit_code = int(told.get("exit", rank.exit or 0))
    end = told.get("log_end")
    text = read_log(rank.log, rank.log_start, end)
    before, crash, dump = text.partition(CRASH)
    excerpt, frame, line = crash_frames(dump) if crash and not told else ("", "", "")
    return Failure(
        rank=rank.rank,
        exit_code=128 - exit_code if exit_code < 0 else exit_code or FAILED,
        type=told.get("type", ""),
        message=told.get(
            "message", _LEFT if rank.left_early else exit_in_words(exit_code, num_memory_kills=num_memory_kills)
        ),
        traceback=told.get("traceback", dump),
        excerpt=told.get("excerpt", excerpt),
        user_frame=told.get("user_frame", frame),
        source_line=told.get("source_line", line),
        log_tail=_last_lines(before if crash and not told else text),
        log=rank.log if keep_logs else None,
        doing=_doing(rank),
        step=look(rank.record).step,
        at_s=_failed_at(rank) - began,
        is_lesson=bool(told.get("lesson")),
        is_echo=rank.is_echo,
    )


def _fate(rank: Rank, first: Failure, began: float, num_memory_kills: int) -> str:
    if rank.is_echo:
        at = f", at {rank.failure['user_frame']}" if rank.failure["user_frame"] else ""
        doing = _doing(rank)
        return f"ended because rank {first.rank} closed its connection" + (f", in {doing}" if doing else "") + at
    if rank.failure:
        told = rank.failure
        message = told["message"].strip().partition("\n")[0]
        if told.get("lesson") and told["message"] == first.message:
            return "the same"
        return f"{told['type']}: {message[:200]}" + (f", at {told['user_frame']}" if told["user_frame"] else "")
    if rank.ended_by_us:
        doing = _doing(rank)
        return "was still running" + (f", in {doing}" if doing else "") + _where(rank) + "; it was ended"
    if rank.exit == 0:
        return f"had ended well, after {show_seconds((rank.ended_at or began) - began)}"
    return exit_in_words(rank.exit or 0, num_memory_kills=num_memory_kills)


def _doing(rank: Rank) -> str:
    """What it noted itself, whatever ended it; nothing of work that is no training."""
    seen = look(rank.record)
    return seen.doing if seen.is_used else ""


def _where(rank: Rank) -> str:
    if rank.stacks_from is None:
        return ""
    _, frame, _ = crash_frames(read_log(rank.log, rank.stacks_from))
    return f", at {frame}" if frame else ""


def read_log(log: Path, start: int = 0, end: int | None = None) -> str:
    """The last part of a log, between two positions."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        end = log.stat().st_size if end is None else end
        file.seek(max(start, end - TAIL_BYTES))
        return file.read(max(0, end - file.tell())).decode("utf-8", "replace")


def _last_lines(text: str) -> tuple[str, ...]:
    # A progress bar rewrites its line; what stands last is what was seen.
    lines = [line.rstrip().rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return tuple([line for line in lines if line and not _STACK_LINE.match(line)][-TAIL_LINES:])
