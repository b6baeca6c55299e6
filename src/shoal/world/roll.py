"""The roll call: rank 0 finds every rank there, each once, all of one mind about the size; or all learn why not.

    key                            by
    roll                           rank 0        a new token, and who calls; the newest roll counts
    <token>/arrival/1, 2, ...      every rank    who answers, in the order of arrival
    <token>/verdict                rank 0        the tokens of those who are in, or the reason to refuse
    <token>/told                   every rank    how many have read the verdict
    <token>/left/<rank>            every rank    on leaving the world

A store may outlive the processes that wrote to it: a rendezvous file after a kill, the store of an elastic agent over
a restart. So nobody trusts a verdict that does not name them: they wait for a new roll.
"""

import contextlib
import json
import math
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.errors import WorldError
from shoal.world.network import is_here_and_alive, network_id, whoami
from shoal.world.place import Place
from shoal.world.rendezvous import Meeting, PortTakenError, first_line, join_store, open_store

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # exported from C++

_PAUSE_S = (0.001, 0.02)  # between two looks into the store: first, and at most
NOTICE_S = 10.0  # after so long, rank 0 says whom it waits for
READ_S = 2.0  # how long a refused world is kept for those who have yet to read why


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One process at the roll call."""

    rank: int
    size: int
    name: str = field(default_factory=whoami)
    network: str = field(default_factory=network_id)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, kw_only=True)
class Met:
    """A complete world: the store that belongs to it alone, and who is who."""

    store: "Store"
    names: list[str]  # host:pid by rank
    one_host: bool
    host: str  # of the meeting; empty for a file


def meet(place: Place, *, limit_s: float, notice_s: float = NOTICE_S) -> Met:
    """Find the other processes of this world; after `notice_s` seconds rank 0 says once, on stderr, who is missing.

    Raises:
        WorldError: within `limit_s` seconds: who is absent, twice there, of another mind, or why nobody can be reached.
    """
    meeting = Meeting.of(place)
    deadline = time.monotonic() + limit_s
    while True:
        store = _open(meeting, place, deadline)
        call = _Call(store, meeting, Answer(rank=place.rank, size=place.size), deadline, limit_s)
        try:
            return call.lead(notice_s) if place.rank == 0 else call.follow()
        except RuntimeError as error:
            # The store of an earlier world of these processes, on its way out.
            if place.rank == 0 or meeting.lasting or time.monotonic() > deadline:
                raise WorldError(f"lost the others at {meeting.text}: {first_line(error)}.") from None
            time.sleep(_PAUSE_S[1])


def _open(meeting: Meeting, place: Place, deadline: float) -> "Store":
    try:
        return open_store(meeting, place, deadline)
    except PortTakenError as taken:
        raise WorldError(_other_rank_0(meeting, place, deadline) or str(taken)) from None


def _other_rank_0(meeting: Meeting, place: Place, deadline: float) -> str | None:
    """Another rank 0 at our post, who is told so too; None where a stranger holds the port."""
    me = Answer(rank=place.rank, size=place.size)
    try:
        store = join_store(meeting, place, min(deadline, time.monotonic() + 2))
        roll = _read(store, "roll")
        if roll is None:
            return None
        _arrive(_scope(store, roll["token"]), me)
    except (WorldError, RuntimeError):
        return None
    return _twice(0, roll["name"], me.name)


class _Call:
    def __init__(self, store: "Store", meeting: Meeting, me: Answer, deadline: float, limit_s: float) -> None:
        self._store = store
        self._meeting = meeting
        self._me = me
        self._deadline = deadline
        self._limit_s = limit_s
        self._pause_s = _PAUSE_S[0]

    def lead(self, notice_s: float) -> Met:
        """Rank 0: read the answers in the order of their arrival, and judge."""
        me, notice_at = self._me, time.monotonic() + notice_s
        scope = _scope(self._store, me.token)
        self._store.set("roll", json.dumps(asdict(me)))
        answers, trouble = [asdict(me)], None
        while trouble is None and len(_by_rank(answers)) < me.size:
            if (answer := _read(scope, f"arrival/{len(answers)}")) is not None:
                trouble = _judge(answer, _by_rank(answers), me)
                answers.append(answer)
            else:
                trouble = self._usurped() or self._late(answers)
                if time.monotonic() > notice_at and trouble is None:
                    self._say_who_is_missing(answers)
                    notice_at = math.inf
                self._wait()
        scope.set("verdict", json.dumps({"trouble": trouble, "answers": answers}))
        if trouble is not None:
            self._let_them_read(scope, sum(answer["rank"] != 0 for answer in answers))
            raise WorldError(trouble)
        return self._met(scope, answers)

    def _let_them_read(self, scope: "Store", num_others: int) -> None:
        """The store ends with this process; whoever has answered shall learn the reason first."""
        until = time.monotonic() + READ_S
        while not self._meeting.lasting and scope.add("told", 0) < num_others and time.monotonic() < until:
            self._wait()

    def _usurped(self) -> str | None:
        """Another rank 0 has called a roll meanwhile, in a file that both share; it is told so too."""
        roll = _read(self._store, "roll")
        if roll is None or roll["token"] == self._me.token:
            return None
        _arrive(_scope(self._store, roll["token"]), self._me)
        return _twice(0, self._me.name, roll["name"])

    def _say_who_is_missing(self, answers: list[dict[str, Any]]) -> None:
        size, there = self._me.size, _by_rank(answers)
        missing = [rank for rank in range(size) if rank not in there]
        ranks = f"rank{'s' if len(missing) > 1 else ''} {span(missing)}"
        with contextlib.suppress(OSError):  # a terminal that has gone
            sys.stderr.write(f"waiting for {ranks} ({len(there)} of {size} are here)\n")

    def _late(self, answers: list[dict[str, Any]]) -> str | None:
        return self._absent(answers) if time.monotonic() > self._deadline else None

    def follow(self) -> Met:
        """Another rank: answer to the newest roll, until a verdict names this process."""
        token, scope, verdict = "", self._store, None
        while True:
            roll = _read(self._store, "roll")
            if roll is not None and roll["token"] != token:
                token, scope = roll["token"], _scope(self._store, roll["token"])
                _arrive(scope, self._me)
            verdict = _read(scope, "verdict") if token else None
            if verdict is not None and self._is_for_me(scope, verdict):
                scope.add("told", 1)
                if verdict["trouble"] is not None:
                    raise WorldError(verdict["trouble"])
                return self._met(scope, verdict["answers"])
            if time.monotonic() > self._deadline:
                raise WorldError(self._why_not(scope, roll, verdict))
            self._wait()

    def _is_for_me(self, scope: "Store", verdict: dict[str, Any]) -> bool:
        """Whether a verdict settles this process's case; one that stands over from another world does not."""
        me, holder = self._me, _by_rank(verdict["answers"]).get(self._me.rank)
        if any(answer["token"] == me.token for answer in verdict["answers"]):
            return True
        if holder is not None and (holder["name"] == me.name or scope.check([f"left/{me.rank}"])):
            return False  # this process's own last world, or one that is over
        if verdict["trouble"] is not None:
            return not self._meeting.lasting  # where it lasts, those who failed may try again
        if holder is not None and _lives(holder["name"], self._meeting):
            raise WorldError(_twice(me.rank, holder["name"], me.name))
        return False

    def _why_not(self, scope: "Store", roll: dict[str, Any] | None, verdict: dict[str, Any] | None) -> str:
        me = self._me
        if roll is None:
            return (
                f"rank 0 did not come to {self._meeting.text} within {self._limit_s:g} s, and rank {me.rank} of "
                f"{me.size} ({me.name}) waits for it. Was it started, and with the same address?"
            )
        if verdict is not None:
            return verdict["trouble"] or (
                f"at {self._meeting.text} {roll['name']} opened a world of {roll['size']} without this process, rank "
                f"{me.rank} of {me.size} ({me.name}). Either more processes were started than that, or it is left "
                "over from another run: choose another port or file."
            )
        answers = [roll]
        while (answer := _read(scope, f"arrival/{len(answers)}")) is not None:
            answers.append(answer)
        return self._absent(answers)

    def _absent(self, answers: list[dict[str, Any]]) -> str:
        size, there = self._me.size, _by_rank(answers)
        missing = [rank for rank in range(size) if rank not in there]
        present = [f"{rank} ({there[rank]['name']})" for rank in sorted(there)]
        return (
            f"{len(missing)} of {size} ranks did not come to {self._meeting.text} within {self._limit_s:g} s. Missing: "
            f"{span(missing)}. Present: {span(present)}. Start as many processes as the world has ranks; the reason "
            "why one did not come is in its own output."
        )

    def _met(self, scope: "Store", answers: list[dict[str, Any]]) -> Met:
        there = _by_rank(answers)
        return Met(
            store=scope,
            names=[there[rank]["name"] for rank in range(self._me.size)],
            one_host=len({answer["network"] for answer in answers}) == 1,
            host=self._meeting.host,
        )

    def _wait(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])


def _by_rank(answers: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The first answer of each rank."""
    return {answer["rank"]: answer for answer in reversed(answers)}


def _judge(answer: dict[str, Any], there: dict[int, dict[str, Any]], caller: Answer) -> str | None:
    rank, name = answer["rank"], answer["name"]
    if answer["size"] != caller.size:
        return (
            f"rank {rank} ({name}) was told that the world has {answer['size']} ranks, rank 0 ({caller.name}) that it "
            f"has {caller.size}. Start all with one number."
        )
    return _twice(rank, there[rank]["name"], name) if rank in there else None


def _twice(rank: int, one: str, other: str) -> str:
    return (
        f"rank {rank} is there twice: {one} and {other}. Either two processes were started with the same rank, or two "
        "jobs meet at the same address: give each its own port or file."
    )


def _lives(name: str, meeting: Meeting) -> bool:
    return not meeting.lasting or is_here_and_alive(name)


def _arrive(scope: "Store", me: Answer) -> None:
    scope.set(f"arrival/{scope.add('arrivals', 1)}", json.dumps(asdict(me)))


def _read(store: "Store", key: str) -> dict[str, Any] | None:
    """A record of the store; None where there is none (a plain get would wait for it)."""
    return json.loads(store.get(key)) if store.check([key]) else None


def _scope(store: "Store", token: str) -> "Store":
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported from C++

    return PrefixStore(token, store)


def span(items: "list[int] | list[str]") -> str:
    """The first few of a list, in words."""
    return ", ".join(map(str, items[:8])) + (f", ... ({len(items)} in all)" if len(items) > 8 else "")
