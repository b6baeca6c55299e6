"""Whether all ranks make the same calls; where they part, it is told with the calls and lines of both.

    in a step    the sums of `shoal.calls` travel with those of the loss; not 0: no rank makes the update
    an error     of a collective: a note, if the calls explain it; of a time-out, else, what the other ranks do
Who needs the calls of another rank reads its file on the same machine, or asks in the store that all have met in: no
collective, since those are what does not work any more.
"""

import base64
import contextlib
import datetime
import json
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.calls import Ledger, Ring, Sums, beside, find_difference, read_ring
from shoal.calls.ledger import PRIME
from shoal.errors import WorldError
from shoal.record import look
from shoal.world.messages import noting
from shoal.world.sentry import ASK, answer_key, on_watch, speak

if TYPE_CHECKING:
    from shoal.world.place import Place
    from shoal.world.world import World

NO_SUMS = Sums(0, 0, 0)
_ANSWER_S, _SHORT_S = 5.0, 1.0  # in which the others must have answered; where one of them is likely gone
_OF_MESSAGES = ("gloo", "NCCL", "imed out", "onnection", "collective")  # in an error: it is a collective's
_MOST_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """What another rank does, and has called."""

    doing: str
    ring: Ring


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
        with on_watch(world):
            try:
                yield world
            except RuntimeError as error:
                if any(word in str(error) for word in _OF_MESSAGES):
                    _explain(error, world, ledger)
                raise


def _explain(error: RuntimeError, world: "World", ledger: Ledger) -> None:
    """Add what the calls of the ranks say of an error of a collective."""
    is_late = "imed out" in str(error)
    answers = ask_all(world, _ANSWER_S if is_late else _SHORT_S)
    difference = find_difference(_rings(answers, ledger, world.rank), step=ledger.step if is_late else None)
    if difference is not None:
        error.add_note(f"The ranks did not make the same calls: {difference}")
    if is_late and not world.place.record:  # else the parent says it, of all of them
        silent = [rank for rank in range(world.size) if rank != world.rank and rank not in answers]
        lines = [f"rank {world.rank}: this one, {world.record.seen().doing}"]
        lines += [f"rank {rank}: {answers[rank].doing}" for rank in sorted(answers)]
        lines += [f"rank {rank}: does not answer: stopped, gone, or in one long operation" for rank in silent]
        error.add_note("\n  ".join(["What each rank does:", *lines[:_MOST_SHOWN]]))


def check_calls(world: "World", sums: Sequence[float], step: int) -> None:
    """Stop where the sums over all ranks say that they made different calls in this step, or before.

    Raises:
        WorldError: on every rank, with the two calls and the two places.
    """
    calls, order, places = (int(value) % PRIME for value in sums)
    # Equal calls from other places are well (two branches that both call); the same places in another order are not.
    if not calls and not (order and not places):
        return
    assert world.calls is not None, "the world is watched"
    difference = find_difference(_rings(ask_all(world), world.calls.ledger, world.rank), step=step)
    what = f"{difference}\n" if difference is not None else "which one, they have not kept. "
    raise WorldError(
        f"step {step}: the ranks did not make the same calls: {what}The update of step {step} was not made."
    )


def ask_all(world: "World", limit_s: float = _ANSWER_S) -> dict[int, Answer]:
    """What the other ranks do, of all that answer in time; those that wait in a collective do."""
    files = _files(world.place)
    found = {
        rank: Answer(look(path).doing, read_ring(beside(path))) for rank, path in files.items() if rank != world.rank
    }
    if world.opened.met is None or len(found) == world.size - 1:
        return found
    store, deadline = world.opened.met.store, time.monotonic() + limit_s
    speak(world, threading.get_ident())
    with contextlib.suppress(RuntimeError):  # the store is gone, or a rank does not answer
        store.set(ASK, "")
    for rank in set(range(world.size)) - {world.rank} - set(found):
        left_s = max(0.001, deadline - time.monotonic())
        with contextlib.suppress(RuntimeError):
            store.wait([answer_key(rank)], datetime.timedelta(seconds=left_s))
            told = json.loads(store.get(answer_key(rank)))
            at = f", at {told['at']}" if told["at"] else ""
            found[rank] = Answer(f"{told['doing']}{at}", read_ring(zlib.decompress(base64.b64decode(told["calls"]))))
    return found


def _rings(answers: Mapping[int, Answer], ledger: Ledger, rank: int) -> dict[int, Ring]:
    return {rank: read_ring(ledger.data), **{other: answer.ring for other, answer in answers.items()}}


def _files(place: "Place") -> dict[int, Path]:
    """The records of the ranks of this machine, where one parent has started them."""
    own = Path(place.record)
    if own.name != f"rank_{place.local_rank}.record":
        return {}
    first = place.rank - place.local_rank
    return {first + number: own.with_name(f"rank_{number}.record") for number in range(place.local_size)}
