"""The parent looks at what its ranks note, and says once when one of them stands still.

look ──► nobody may take that long ──► still so in the next look ──► ask for stacks ──► still so ──► one screen
                                                                                      └► got on: not a word
Nothing is ended for standing still: the time-out of the collectives decides. Ranks that have called different
collectives are ended, since nothing that they compute is right any more.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.calls import Difference, find_difference
from shoal.launch.afar import Afar
from shoal.launch.desync import Comparison
from shoal.launch.incident import Incident, Witness, append, ranks_in_words
from shoal.launch.straggler import Stragglers
from shoal.launch.supervise import Rank
from shoal.launch.suspects import Patience, Standing, standing
from shoal.launch.watched import Near, Watched
from shoal.record import Seen
from shoal.units import show_seconds

_ANSWER_S = 5.0  # in which another machine must have looked at its ranks
_STARVED_FACTOR = 4.0  # times the limit: for a rank that gets less than half a core
_SPEAK_S = 2.0  # in which a rank says itself that its calls are not those of the others
_OWN_PAUSE_S = 1.0  # a look that comes so late says that this process, or all of them, did not run


class Vigil:
    """Called as often as one likes with the time; looks as often as `Patience` says.

    Args:
        size: of the world.
        afar: the ranks of other machines.
        screen: where a screen goes.
        incidents: the file that keeps them.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        size: int,
        patience: Patience,
        screen: Callable[[str], None],
        incidents: Path,
        afar: Afar | None = None,
    ) -> None:
        self._size, self._patience, self._screen, self._path, self._afar = size, patience, screen, incidents, afar
        self._near = [Near(rank) for rank in ranks]
        self._next = 0.0
        self._suspected: Standing | None = None
        self._inquiry: _Inquiry | None = None
        self._open: Incident | None = None
        self._stragglers = Stragglers(patience)
        self._comparison = Comparison(ranks)
        self.parted: Difference | None = None  # in what ranks have called
        self._parted_at = 0.0

    def __call__(self, now: float) -> None:
        if now < self._next:
            return
        was_away = bool(self._next) and now - self._next > _OWN_PAUSE_S
        self._next = now + self._patience.look_s
        self._compare(now)
        ranks: list[Watched] = [*self._near, *(self._afar.ranks() if self._afar is not None else ())]
        alive = {rank.rank: rank for rank in ranks if rank.is_alive}
        seen = {number: rank.seen() for number, rank in alive.items()}
        is_blind = was_away or (self._afar is not None and self._afar.is_stale(now))
        if is_blind or len(seen) < self._size or not all(one.is_used for one in seen.values()):
            self._suspected = self._inquiry = None
            return
        for straggler in self._stragglers.advance(seen, now):
            self._tell(f"{straggler}.", {"kind": "straggler", "rank": straggler.rank, "text": str(straggler)})
        if self._open is not None:
            self._see_whether_it_goes_on(self._open, seen, now)
        elif self._inquiry is not None:
            self._conclude(self._inquiry, seen, now)
        else:
            self._suspect(alive, seen, now)

    def _compare(self, now: float) -> None:
        """Where shoal runs the steps ranks stop by themselves; a loop of the user's own goes on, and is ended."""
        if self.parted is None:
            self.parted, self._parted_at = self._comparison.advance(), now
        elif now - self._parted_at > _SPEAK_S:
            for rank in self._near:
                if rank.is_alive:
                    rank.process.kill()

    def _suspect(self, alive: Mapping[int, Watched], seen: Mapping[int, Seen], now: float) -> None:
        before, self._suspected = self._suspected, self._judge(alive, seen, now)
        if self._suspected.ranks and before is not None and before.ranks == self._suspected.ranks:
            self._inquiry = _Inquiry(alive, self._suspected, seen, now)
            self._next = now + self._patience.stacks_s / 2

    def _judge(self, alive: Mapping[int, Watched], seen: Mapping[int, Seen], now: float) -> Standing:
        still = [number for number, one in seen.items() if now - one.changed_s > self._patience.least_s]
        stopped = [number for number in still if alive[number].kernel().is_stopped]
        return standing(seen, stopped, now, self._patience) if still else Standing()

    def _conclude(self, inquiry: "_Inquiry", seen: Mapping[int, Seen], now: float) -> None:
        if not inquiry.has_asked_workers:
            inquiry.ask_workers()
            self._next = now + self._patience.stacks_s / 2
            return
        witnesses = inquiry.witnesses(seen, now)
        if witnesses is None:
            return  # another machine has yet to answer
        self._inquiry = self._suspected = None
        stopped = [number for number, one in witnesses.items() if one.kernel.is_stopped]
        waits = [number for number, one in witnesses.items() if one.waits]
        found = standing(seen, stopped, now, self._patience, waits)
        has_moved = any(seen[number].changed_s != inquiry.seen[number].changed_s for number in found.ranks)
        if not found.ranks or has_moved or any(self._lets_off(witnesses[number], now) for number in found.ranks):
            self._next = now + self._patience.least_s  # it takes long and is well: ask less often
            return
        pids = {number: rank.pid for number, rank in inquiry.ranks.items()}
        step = min(one.step for one in seen.values())
        rings = {number: rank.ring() for number, rank in inquiry.ranks.items()} if found.is_circle else {}
        hosts = {number: rank.host for number, rank in inquiry.ranks.items() if rank.host}
        changed = {number: seen[number].changed_s for number in found.ranks}
        self._open = Incident(
            standing=found,
            witnesses=witnesses,
            pids=pids,
            at_s=now,
            changed=changed,
            hosts=hosts,
            parted=find_difference(rings, step=step),
        )
        self._tell(self._open.screen(), self._open.as_dict())

    def _lets_off(self, witness: Witness, now: float) -> bool:
        """What takes its time, and what would not on a machine that is not so busy."""
        stood_s = now - witness.seen.since_s
        return witness.compiles or (
            witness.is_starved and stood_s < _STARVED_FACTOR * self._patience.limit_s(witness.seen)
        )

    def _see_whether_it_goes_on(self, incident: Incident, seen: Mapping[int, Seen], now: float) -> None:
        if any(seen[number].changed_s == changed for number, changed in incident.changed.items()):
            return
        self._open = None
        ranks = sorted(incident.standing.ranks)
        who = "the ranks" if incident.standing.is_circle else ranks_in_words(ranks)
        stood_s = min(seen[number].changed_s for number in ranks) - incident.since_s
        verb = "goes" if len(ranks) == 1 else "go"
        text = f"{who} {verb} on, having stood still for {show_seconds(stood_s)}."
        if not any(incident.witnesses[number].kernel.is_stopped for number in ranks):
            self._patience = self._patience.after(stood_s)
        self._tell(text, {"kind": "goes on", "ranks": ranks, "stood_s": round(stood_s, 3)})

    def _tell(self, text: str, event: dict[str, Any]) -> None:
        self._screen(text)
        append(self._path, {"time": time.time(), **event})


class _Inquiry:
    """Ranks have been asked for their stacks; then the loader workers of those that wait for data."""

    def __init__(self, ranks: Mapping[int, Watched], suspected: Standing, seen: Mapping[int, Seen], now: float) -> None:
        self.ranks, self.seen, self.has_asked_workers = ranks, seen, False
        self._suspected, self._began = suspected, now
        for rank in ranks.values():
            rank.ask()

    def ask_workers(self) -> None:
        self.has_asked_workers = True
        for number in self._suspected.ranks:
            self.ranks[number].ask_workers()

    def witnesses(self, seen: Mapping[int, Seen], now: float) -> dict[int, Witness] | None:
        """What all have answered; None: some machine has not, and there is still time."""
        found = {number: self.ranks[number].witness(one) for number, one in seen.items()}
        if None in found.values() and now - self._began < _ANSWER_S:
            return None
        return {n: Witness(seen=seen[n], kernel=self.ranks[n].kernel()) if w is None else w for n, w in found.items()}
