"""Worlds that are all alive and take turns, so that a busy moment of the machine hits all of them.

A turn is a byte in a pipe: who waits for one sleeps, and costs nothing.

    round 0   lone dp2 fsdp2      warm-up
    round 1   dp2 fsdp2 lone      another one first in each round
    round 2   fsdp2 lone dp2
"""

import mmap
import os
from collections.abc import Iterator


class Turns:
    """Made before the processes are forked; `taken` is walked by the first rank of each world.

    Args:
        num_arms: worlds.
        num_rounds: turns of each.
    """

    def __init__(self, num_arms: int, num_rounds: int) -> None:
        self._order = [(turn, (place + turn) % num_arms) for turn in range(num_rounds) for place in range(num_arms)]
        self._pipes = [os.pipe() for _ in range(num_arms)]
        self._whose = mmap.mmap(-1, 8)  # the place of the turn that goes on now, known to all processes
        self._give(0)

    def taken(self, arm: int) -> Iterator[tuple[int, float]]:
        """The number of each round, when this world's turn has come, and the share of all turns that are over.

        The turn passes on when the next one is asked for.
        """
        for place, (turn, whose) in enumerate(self._order):
            if whose == arm:
                os.read(self._pipes[arm][0], 1)
                yield turn, place / len(self._order)
                self._give(place + 1)

    def pass_on(self, arm: int) -> None:
        """Every turn that a world has left, for one whose processes are gone; it may have ended in its turn."""
        for place, (_, whose) in enumerate(self._order):
            if whose != arm or place < self._now:
                continue
            has_begun = place == self._now
            os.set_blocking(self._pipes[arm][0], not has_begun)
            try:
                os.read(self._pipes[arm][0], 1)
            except BlockingIOError:  # it had taken the byte
                assert has_begun
            self._give(place + 1)

    def close(self) -> None:
        """In the process that made it."""
        for pipe in self._pipes:
            for end in pipe:
                os.close(end)
        self._whose.close()

    @property
    def _now(self) -> int:
        return int.from_bytes(self._whose[:], "little")

    def _give(self, place: int) -> None:
        self._whose[:] = place.to_bytes(8, "little")
        if place < len(self._order):
            os.write(self._pipes[self._order[place][1]][1], b".")
