"""What ranks of this machine have called, compared by their parent: as they call it, and once they have ended."""

import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from shoal.calls import Difference, Ring, beside, find_difference, read_ring
from shoal.calls.ring import NUM_ENTRIES
from shoal.launch.outcome import MISTAKE, Failure, Outcome
from shoal.launch.supervise import Rank
from shoal.record import look

LESSON = "the ranks did not make the same calls"
_KEPT = 4 * NUM_ENTRIES  # calls of a group, for ranks that are behind


def read_rings(ranks: Sequence[Rank]) -> dict[int, Ring]:
    """The last calls of each."""
    return {rank.rank: read_ring(beside(rank.record)) for rank in ranks}


class Comparison:
    """Of the calls of ranks, each read once."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._read: dict[int, tuple[int, int]] = {}  # world, and calls of it, by rank
        self._hashes: defaultdict[tuple[int, str], dict[int, int]] = defaultdict(dict)  # by number

    def advance(self) -> Difference | None:
        """Read on; the first call in which ranks part for sure."""
        for rank in self._ranks:
            path = beside(rank.record)
            world, index = self._read.get(rank.rank, (0, 0))
            ring = read_ring(path, after=index)
            if ring.world != world:
                ring = read_ring(path)
            self._read[rank.rank] = ring.world, ring.num_calls
            if self._parts(ring):
                return find_difference(read_rings(self._ranks))
        return None

    def _parts(self, ring: Ring) -> bool:
        for entry in ring.entries:
            if not entry.is_of_all:
                continue
            hashes = self._hashes[ring.world, entry.group]
            if hashes.setdefault(entry.number, entry.hash) != entry.hash:
                return True
            if len(hashes) > _KEPT:
                del hashes[next(iter(hashes))]
        return False


def explained(outcome: Outcome, ranks: Sequence[Rank], parted: Difference | None) -> Outcome:
    """The outcome with what the calls say of it: where ranks parted, nothing that they computed is right.

    Args:
        parted: what was seen while they ran.
    """
    first = outcome.failures[0] if outcome.failures else None
    if first is not None and (first.is_lesson or LESSON in first.excerpt):
        return outcome  # a rank has said so itself, or made another mistake before
    # gloo ends a process whose message has another size than the one that it expects.
    is_cut = first is not None and (first.exit_code == 128 + signal.SIGABRT or "imed out" in first.message)
    step = min((look(rank.record).step for rank in ranks), default=0) if is_cut else None
    difference = parted or find_difference(read_rings(ranks), step=step)
    if difference is None or (first is None and outcome.exit_code and parted is None):
        return outcome  # Ctrl-C
    text = f"{LESSON}: {difference}"
    if first is None:
        failure = Failure(rank=min(difference.odd), exit_code=MISTAKE, type="WorldError", message=text, is_lesson=True)
        return replace(outcome, exit_code=MISTAKE, failures=(failure,), others=())
    return replace(outcome, failures=(replace(first, message=f"{first.message}\n{text}"), *outcome.failures[1:]))
