"""The one screen that a failed start ends with, as plain text."""

import sys
from collections.abc import Sequence

from shoal.launch.outcome import Failure, Outcome
from shoal.units import show_seconds

WIDTH = 160
LOG_LINES = 8
MESSAGE_LINES = 12
RULE = "─" * 78


def to_stderr(text: str) -> None:
    """Write a block to stderr; the terminal may show half a line of a rank's there."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def failure_screen(outcome: Outcome, num_ranks: int) -> str:
    """First cause, its traceback and last log lines; the others in one line each.

    A person's mistake is shown by its message alone, once.
    """
    first = outcome.failures[0]
    if first.is_lesson:
        alone = (
            ""
            if len({f.message for f in outcome.failures}) == 1 and len(outcome.failures) == num_ranks
            else (f" (rank {first.rank})" if num_ranks > 1 else "")
        )
        return f"{first.type}{alone}: {first.message}"
    parts = [_head(first, num_ranks), _traceback(first), _tail(first), _others(outcome.others)]
    return "\n" + RULE + "\n" + "\n\n".join(part for part in parts if part) + "\n" + RULE


def _head(first: Failure, num_ranks: int) -> str:
    lines = [f"rank {first.rank} of {num_ranks} failed first, {show_seconds(first.at_s)} after the start", ""]
    lines += ["  " + line[:WIDTH] for line in first.error.strip().splitlines()[:MESSAGE_LINES]]
    if first.user_frame:
        lines.append(f"  at {first.user_frame}" + (f":  {first.source_line[:WIDTH]}" if first.source_line else ""))
    if first.doing:
        lines.append(f"  in {first.doing}")
    return "\n".join(lines)


def _traceback(first: Failure) -> str:
    if not first.excerpt:
        return ""
    frames = first.excerpt.rstrip().splitlines()
    return "\n".join(["traceback (your frames and the last):", *(line[:WIDTH] for line in frames[-30:])])


def _tail(first: Failure) -> str:
    lines = [f"  {line[:WIDTH]}" for line in first.log_tail[-LOG_LINES:]]
    where = f" ({first.log})" if first.log else ""
    return "\n".join([f"last lines of rank {first.rank}{where}:", *lines]) if lines else where and f"log:{where}"


def _others(others: Sequence[str]) -> str:
    """One line per fate: `ranks 0, 2, 3: ended because rank 1 closed its connection`."""
    fates: dict[str, list[str]] = {}
    for line in others:
        rank, _, fate = line.removeprefix("rank ").partition(": ")
        fates.setdefault(fate, []).append(rank)
    return "\n".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}: {fate[:WIDTH]}" for fate, ranks in fates.items()
    )
