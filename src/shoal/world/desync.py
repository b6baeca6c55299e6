"""Whether all ranks make the same calls; where they part, it is told with the calls and lines of both.

    in a step    the sums of `shoal.calls` travel with those of the loss; not 0: no rank makes the update
    an error     of a collective: a note, if the calls explain it
Who needs the calls of another rank reads its file on the same machine, or asks the store that all have met in: no
collective, since those are what does not work any more.
"""

import base64
import contextlib
import datetime
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.calls import Ledger, Ring, Sums, beside, find_difference, read_ring
from shoal.calls.ledger import PRIME
from shoal.errors import WorldError
from shoal.world.messages import noting

if TYPE_CHECKING:
    from shoal.world.place import Place
    from shoal.world.world import World

_ASK_S = 5.0  # in which the others must have answered
_OF_MESSAGES = ("gloo", "NCCL", "imed out", "onnection", "collective")  # in an error: it is a collective's
NO_SUMS = Sums(0, 0, 0)


@contextlib.contextmanager
def watched(world: "World") -> "Iterator[World]":
    """The world, whose calls are noted from here on."""
    if world.kind != "real" and not world.record.is_read:
        yield world
        return
    place = world.place
    ledger = Ledger(beside(place.record) if place.record else None)
    with noting(world.record, ledger, world.mesh, place.rank) as calls:
        world = replace(world, calls=calls)
        try:
            yield world
        except RuntimeError as error:
            if any(word in str(error) for word in _OF_MESSAGES):
                step = ledger.step if "imed out" in str(error) else None
                difference = find_difference(rings(world), step=step)
                if difference is not None:
                    error.add_note(f"The ranks did not make the same calls: {difference}")
            raise


def check_calls(world: "World", sums: Sequence[float], step: int) -> None:
    """Stop where the sums over all ranks say that they made different calls in this step, or before.

    Raises:
        WorldError: on every rank, with the two calls and the two places.
    """
    calls, order, places = (int(value) % PRIME for value in sums)
    # Equal calls from other places are well (two branches that both call); the same places in another order are not.
    if not calls and not (order and not places):
        return
    difference = find_difference(rings(world), step=step)
    what = f"{difference}\n" if difference is not None else "which one, they have not kept. "
    raise WorldError(
        f"step {step}: the ranks did not make the same calls: {what}The update of step {step} was not made."
    )


def rings(world: "World") -> dict[int, Ring]:
    """The calls of all ranks that can be had, also of those that wait in a collective."""
    assert world.calls is not None, "the world is watched"
    found = {world.rank: read_ring(world.calls.ledger.data)}
    found |= {rank: read_ring(path) for rank, path in _files(world.place).items() if rank != world.rank}
    if world.opened.met is None or len(found) == world.size:
        return found
    publish(world)
    store, deadline = world.opened.met.store, time.monotonic() + _ASK_S
    for rank in range(world.size):
        left_s = deadline - time.monotonic()
        if rank in found or left_s <= 0:
            continue
        with contextlib.suppress(RuntimeError):  # it did not answer, or the store is gone
            store.wait([_key(rank)], datetime.timedelta(seconds=left_s))
            found[rank] = read_ring(zlib.decompress(base64.b64decode(store.get(_key(rank)))))
            if find_difference(found) is not None:
                break  # one example is enough; a large world has many
    return found


def publish(world: "World") -> None:
    """Lay this rank's calls where all others can read them."""
    assert world.calls is not None, "the world is watched"
    assert world.opened.met is not None, "its ranks have met"
    data = base64.b64encode(zlib.compress(world.calls.ledger.data, 1)).decode()
    with contextlib.suppress(RuntimeError):  # the store went with rank 0
        world.opened.met.store.set(_key(world.rank), data)


def _key(rank: int) -> str:
    return f"calls/{rank}"


def _files(place: "Place") -> dict[int, Path]:
    """Of the ranks of this machine, where one parent has started them."""
    if not place.record:
        return {}
    own = Path(place.record)
    first = place.rank - place.local_rank
    folder = {first + number: beside(own.with_name(f"rank_{number}.record")) for number in range(place.local_size)}
    return folder if folder[place.rank] == beside(own) else {place.rank: beside(own)}
