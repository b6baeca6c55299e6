"""One line for each generation after the first: what failed, from which step it goes on, what that cost."""

import time
from dataclasses import dataclass
from typing import Any

from shoal.launch.group import Group, Plan
from shoal.launch.incident import append
from shoal.launch.outcome import Outcome
from shoal.record import Seen, look
from shoal.units import show_seconds

_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a generation follows another.

    Attributes:
        failed: what failed first, in words.
        done: the last step that was done.
        at_s: when it failed, on the monotonic clock.
        is_failure: False where the group only grows.
    """

    failed: str
    done: int
    at_s: float
    rank: int = -1
    is_failure: bool = True


def cause_of(outcome: Outcome, began: float, done: int, *, lost_at_s: float = 0.0) -> Cause:
    """From how the generation before ended.

    Args:
        began: when its ranks were made.
        lost_at_s: when another machine was seen to be gone; of no use where none was.
    """
    if not outcome.failures:
        return Cause(failed="machines came", done=done, at_s=time.monotonic(), is_failure=False)
    first = outcome.failures[0]
    if first.type == "NodeLost":
        return Cause(failed=first.message, done=done, at_s=lost_at_s or time.monotonic())
    what = first.error.strip().partition("\n")[0]
    if not first.type:  # an exit in words; the reasons that it may have are for the screen of an end
        what = what.partition(": ")[0]
    where = f" in {first.doing}" if first.doing else ""
    at = f", at {first.user_frame}" if first.user_frame else ""
    who = f"rank {first.rank} failed first{where} ({what[:_WIDTH]}{at})"
    return Cause(failed=who, done=done, at_s=began + first.at_s, rank=first.rank)


class Restarted:
    """Called as often as one likes; tells once, when the first step of the new generation is done."""

    def __init__(self, cause: Cause, group: Group, plan: Plan) -> None:
        self._cause, self._ranks, self._post = cause, group.ranks, group.post
        self._screen, self._incidents = plan.screen, None if group.post.node else group.incidents
        self._is_told = False
        if plan.terms.counts_all:  # a plain script, of whose steps nobody knows
            self._tell(f"started again, {self._post.size} ranks", {})

    def __call__(self, now: float) -> None:
        if self._is_told:
            return
        seen = next((one for one in (look(rank.record) for rank in self._ranks) if one.steps_here), None)
        if seen is not None:
            self._goes_on(seen, now)

    def close(self) -> None:
        """At the end of the generation, which may not have come to a step."""
        if not self._is_told:
            self._tell(f"started again, {self._post.size} ranks; no step was done", {})

    def _goes_on(self, seen: Seen, now: float) -> None:
        step, took_s = seen.done - seen.steps_here, now - self._cause.at_s
        lost = max(0, self._cause.done - step)
        many = "no step" if not lost else f"{lost} step{'s' if lost > 1 else ''}"
        facts = {"step": step, "lost": lost, "took_s": round(took_s, 3)}
        self._tell(f"{self._post.size} ranks go on from step {step}, {many} lost, {show_seconds(took_s)}", facts)

    def _tell(self, text: str, facts: dict[str, Any]) -> None:
        self._is_told = True
        line = f"restart {self._post.generation}: {self._cause.failed}; {text}"
        self._screen(line)
        if self._incidents is not None:
            told = {"kind": "restart" if self._cause.is_failure else "grows", "generation": self._post.generation}
            more = {"rank": self._cause.rank, "size": self._post.size, "text": line, **facts}
            append(self._incidents, {"time": time.time(), **told, **more})
