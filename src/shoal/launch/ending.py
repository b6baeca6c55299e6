"""How a generation ended on all machines, from what each of them tells."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from shoal.launch.again import Ended
from shoal.launch.outcome import FAILED, Failure, Outcome


class Pull(int):
    """A signal that another machine has brought about, and nobody here."""


def own_of(asked: Sequence[int]) -> list[int]:
    """What was asked for here."""
    return [number for number in asked if not isinstance(number, Pull)]


def ending_of(outcome: Outcome, ended: Ended, *, first: int, trouble: str) -> dict[str, Any]:
    """How the ranks of this machine ended, as the others hear it.

    Args:
        first: its first rank.
        trouble: elsewhere, for which they were ended.
    """
    failure = outcome.failures[0] if outcome.failures else None
    return {
        "exit_code": outcome.exit_code,
        "is_echo": failure is None or failure.is_echo,
        "rank": failure.rank if failure else first,
        "type": failure.type if failure else "",
        "message": failure.message if failure else trouble or f"exit code {outcome.exit_code}",
        "at": failure.user_frame if failure else "",
        "at_s": failure.at_s if failure else 0.0,
        "is_lesson": bool(failure and failure.is_lesson),
        "ended": asdict(ended),
    }


def first_cause(endings: Mapping[int, dict[str, Any]], lost: Sequence[str]) -> dict[str, Any]:
    """The ending that explains the others: a failure that is no echo of another one, of the lowest node.

    Args:
        lost: machines that are gone. Ranks elsewhere then end in many ways; only one that says why is no echo.
    """
    failed = [
        (bool(told["is_echo"]) or (bool(lost) and not told["type"]), node)
        for node, told in endings.items()
        if told["exit_code"]
    ]
    is_echo, node = min(failed, default=(True, min(endings)))
    return {**endings[node], "node": node, "is_echo": is_echo, "lost": list(lost)}


def merged(
    endings: Mapping[int, dict[str, Any]],
    final: Mapping[str, Any],
    size: int,
    lost: Sequence[str],
    *,
    is_pausing: bool,
) -> Ended:
    """The end of the whole group.

    Args:
        final: the ending that explains the others.
        lost: machines that are gone.
        is_pausing: all were asked to end after a step, since machines have come.
    """
    rows = [row["ended"] for row in endings.values() if "ended" in row]
    has_failed = bool(final["exit_code"]) and not final["is_echo"]
    first = final.get("ended", {})
    return Ended(
        exit_code=int(final["exit_code"]) or (FAILED if lost else 0),
        size=size,
        error=str(first.get("error", "")),
        step=int(first.get("step", 0)),
        done=max((row["done"] for row in rows), default=0),
        has_stepped=any(row["has_stepped"] for row in rows),
        is_lesson=bool(final.get("is_lesson")) and has_failed and not lost,
        is_asked=any(row["is_asked"] for row in rows),
        lost=tuple(lost),
        grows=is_pausing and not lost and not has_failed,
    )


def concluded(
    outcome: Outcome, final: Mapping[str, Any], *, me: int, names: Mapping[int, str], trouble: str
) -> Outcome:
    """This machine's outcome, or that of the one that failed first.

    Args:
        me: the number of this machine.
        names: of the hosts, by number.
        trouble: why ranks were ended that had not failed themselves.
    """
    node = int(final.get("node", me))
    if final["exit_code"] and not final["is_echo"] and node != me:
        far = _far(final, f"node {node} ({names.get(node, '')})")
        return replace(outcome, exit_code=int(final["exit_code"]), failures=(far,), others=())
    if trouble and final["is_echo"]:
        rank = int(final["rank"])
        failure = Failure(rank=rank, exit_code=FAILED, type="NodeLost", message=trouble, is_lesson=True)
        return replace(outcome, exit_code=FAILED, failures=(failure,), others=())
    return outcome


def _far(final: Mapping[str, Any], where: str) -> Failure:
    """What failed first on another machine."""
    return Failure(
        rank=int(final["rank"]),
        exit_code=int(final["exit_code"]),
        type=str(final["type"]),
        message=f"{final['message']}\n  on {where}",
        user_frame=str(final["at"]),
        at_s=float(final["at_s"]),
        is_lesson=bool(final["is_lesson"]),
    )
