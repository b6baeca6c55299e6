"""Again, smaller, or the end: what follows a generation. One place decides, and it is pure.

A generation is one start of the group: every rank is forked, they meet anew, and train until all have ended.

    ended  ──► asked for (Ctrl-C, SIGTERM), a lesson, no step yet, the same error in the same step twice ──► the end
           ──► fewer than N failures since the last progress ──► again, as large as before
           ──► a machine is gone, or N are used up, and --elastic allows ──► again, smaller
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a person allows.

    Attributes:
        max_restarts: 0 ends the run at the first failure.
        counts_all: torchrun's meaning, N in all, and every failure counts; else N since the last progress, and what
            no restart can mend is not tried again.
        replica: ranks of one data replica.
        least: of these replicas, with which the run still goes on; 0: the size of the group is fixed.
        most: of these replicas.
    """

    max_restarts: int = 0
    counts_all: bool = False
    replica: int = 1
    least: int = 0
    most: int = 0

    @property
    def may_restart(self) -> bool:
        return self.max_restarts > 0 or self.least > 0

    @property
    def is_elastic(self) -> bool:
        return self.least > 0

    def fitting(self, slots: int) -> int:
        """The ranks of the largest group for which there is room; 0 where it would be too small."""
        replicas = min(self.most, slots // self.replica)
        return replicas * self.replica if replicas >= self.least > 0 else 0


@dataclass(frozen=True, kw_only=True)
class History:
    """What all generations before came to.

    Attributes:
        generation: the number of the one that runs.
        failures: that count against `max_restarts`.
        reached: the last step that any generation has done.
        has_stepped: whether any of them has done one.
        error: what failed last, where, and in which step.
    """

    generation: int = 0
    failures: int = 0
    reached: int = 0
    has_stepped: bool = False
    error: tuple[str, int] = ("", 0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(told: Mapping[str, Any]) -> "History":
        return History(**{**told, "error": (str(told["error"][0]), int(told["error"][1]))})


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a generation ended.

    Attributes:
        error: of an exception its type, message and place; empty for a signal, or where a peer's end is all there is.
        step: in which that was.
        done: the last step that any rank has done.
        has_stepped: whether that was in this generation.
        lost: machines that are gone.
        grows: it was ended after a step that is saved, since machines have come.
    """

    exit_code: int
    size: int
    error: str = ""
    step: int = 0
    done: int = 0
    has_stepped: bool = False
    is_lesson: bool = False
    is_asked: bool = False
    lost: tuple[str, ...] = ()
    grows: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The ranks of the next generation, 0 for none, and what a person should know of it."""

    size: int
    history: History
    why: str = ""


def decide(terms: Terms, history: History, ended: Ended, slots: int) -> Decision:
    """What follows.

    Args:
        slots: ranks that the machines which are left can hold.
    """
    failed = ended.error, ended.step
    repeats = bool(ended.error) and ended.step > 0 and failed == history.error
    gets_on = ended.done > history.reached and not terms.counts_all
    after = replace(
        history,
        generation=history.generation + 1,
        failures=history.failures if ended.lost else (1 if gets_on else history.failures + 1),
        reached=max(history.reached, ended.done),
        has_stepped=history.has_stepped or ended.has_stepped,
        error=failed,
    )
    end = Decision(size=0, history=after)
    if ended.is_asked or not terms.may_restart:
        return end
    if ended.grows:
        return Decision(size=terms.fitting(slots) or ended.size, history=replace(after, failures=history.failures))
    if ended.exit_code == 0 or ended.is_lesson:
        return end
    if not after.has_stepped and not terms.counts_all:
        return replace(end, why="no step was done yet, so it is not tried again")
    if repeats and not terms.counts_all:
        return replace(end, why=f"the same error in the same step twice (step {ended.step}); not tried again")
    return _again(terms, after, ended, slots)


def _again(terms: Terms, after: History, ended: Ended, slots: int) -> Decision:
    is_spent = after.failures > terms.max_restarts
    if ended.lost and not terms.is_elastic:
        return Decision(size=0, history=after, why="a lost machine ends the run without --elastic MIN:MAX")
    if not ended.lost and not is_spent and ended.size <= slots:
        return Decision(size=ended.size, history=after)
    if not terms.is_elastic:
        times = "once" if terms.max_restarts == 1 else f"{terms.max_restarts} times"
        since = "" if terms.counts_all else " since the last progress"
        return Decision(
            size=0, history=after, why=f"it was started again {times}{since}; --max-restarts allows no more"
        )
    size = terms.fitting(slots if ended.lost else min(slots, ended.size - terms.replica))
    if not size:
        left = f"{slots // terms.replica if ended.lost else ended.size // terms.replica - 1} data replicas"
        return Decision(size=0, history=after, why=f"{left} are left, and --elastic wants at least {terms.least}")
    return Decision(size=size, history=replace(after, failures=0))


def elastic(text: str, replicas: int) -> tuple[int, int]:
    """`2:4` of `--elastic`.

    Args:
        replicas: with which the run begins.

    Raises:
        LaunchError: it is no such pair, or the run begins outside of it.
    """
    least, colon, most = text.partition(":")
    if not colon or not least.isdecimal() or not most.isdecimal() or not 1 <= int(least) <= int(most):
        raise LaunchError(f"--elastic is {text!r}; it must be MIN:MAX data replicas, such as 2:4.")
    if not int(least) <= replicas <= int(most):
        raise LaunchError(f"--elastic {text}, and the layout begins with dp{replicas}: it must lie between the two.")
    return int(least), int(most)
