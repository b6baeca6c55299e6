"""What it costs a run to be watched: the same ranks with and without, in blocks that take turns.

    python benchmarks/watch_cost.py [LAYOUT ...]      by default dp2 and fsdp2

Both arms are the same training of the same ranks; in one, no message is noted and no calls are compared. The ratio of
two steps of milliseconds is lost in the noise of a shared machine, so the price of each note is measured by itself too,
and multiplied by how many there are in a step; and so is what the parent takes to look at its ranks.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import turns
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal import Job, World, assemble
from shoal.calls import Ledger, beside
from shoal.job import Params, Sum, mean_loss
from shoal.launch.desync import Comparison
from shoal.launch.supervise import Rank
from shoal.record import Phase, Record, look, prepare
from shoal.world import Place

_STEP_S = 0.010  # of which a share is told
_NOTED_MESSAGES = 4  # of a step in dp2: gradients, totals, the norm, the log's
_DEPTH = 24  # frames between a call and the loop
_LOOKS_PER_S, _NUM_RANKS, _CALLS_PER_S = 4, 8, 400
_ROUNDS, _CALLS = 30, 300


@dataclass(frozen=True, kw_only=True)
class Small(Job):
    """A step of some milliseconds on one CPU thread."""

    batch_size: int = 64
    steps: int = 100_000
    width: int = 384

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(6)))

    def data(self) -> TensorDataset:
        return TensorDataset(torch.randn(1024, self.width), torch.randint(0, self.width, (1024,)))

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Sum:
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)


def training(layout: str, *, is_noted: bool) -> turns.Arm:
    """Two ranks; `start` gives each a record, which one arm leaves aside, as all that is noted."""

    @contextlib.contextmanager
    def opened(place: Place) -> Iterator[turns.Step]:
        place = place if is_noted else replace(place, record="")
        unwatched = contextlib.nullcontext() if is_noted else mock.patch("shoal.world.world.watched", _unwatched)
        with unwatched, World.open(layout, place=place) as world, tempfile.TemporaryDirectory() as folder:
            path = Path(world.broadcast_text(folder))
            run = assemble(Small(), world, folder=path / "run", quiet=True, log_every=turns.BLOCK)
            steps = run.steps()

            def step() -> float:
                result = next(steps)()
                run.log(result)
                return float(result.loss)

            yield step
            world.barrier()

    return turns.Arm(2, opened)


_unwatched = contextlib.nullcontext  # gives the world as it is


def price_s() -> tuple[float, float]:
    """Of the notes of the phases of one step, and of one message: medians of blocks, with and without in turn.

    In a fake world, whose messages arrive at once: what is left is the note.
    """
    phases, messages, tensor = [], [], torch.zeros(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record"
        prepare(path)
        record = Record(str(path))
        for _ in range(_ROUNDS):
            phases.append(_per_call(lambda: _walk(record)))
            noted, plain = ({"size": 2, "local_size": 2, "record": told} for told in (str(path), ""))
            took = [_all_reduce_s(Place(**place), tensor) for place in (noted, plain)]
            messages.append(took[0] - took[1])
    return statistics.median(phases), statistics.median(messages)


def _walk(record: Record) -> None:
    with record.phase(Phase.DATA):
        pass
    with record.phase(Phase.COMPUTE):
        record.micro(0)
    with record.phase(Phase.UPDATE):
        pass


def _all_reduce_s(place: Place, tensor: Tensor) -> float:
    with World.open("dp2", place=place, kind="fake"):
        return _deep(_DEPTH, lambda: _per_call(lambda: dist.all_reduce(tensor)))


def _deep(frames: int, call: Callable[[], float]) -> float:
    """As far from the loop as a call in a model is."""
    return _deep(frames - 1, call) if frames else call()


def sums_s() -> float:
    """Of the sums of one step, over as many groups as pp x dp x tp has."""
    ledger = Ledger()
    channels = [ledger.channel(f"0..1x2 {number}".encode(), 0, 2) for number in range(6)]
    for channel in channels:
        ledger.note(channel, "")
    return _per_call(ledger.sums)


def look_s() -> float:
    """Of the parent, for one look at a machine of 8 ranks that make 400 calls a second each."""
    with tempfile.TemporaryDirectory() as folder:
        ranks, ledgers = [], []
        for number in range(_NUM_RANKS):
            record = Path(folder) / f"rank_{number}.record"
            prepare(record)
            ledger = Ledger(beside(record))
            ledgers.append((ledger, ledger.channel(b"0..7x8 0", number, _NUM_RANKS)))
            ranks.append(
                Rank(rank=number, pid=os.getpid(), poll=lambda: None, reports=-1, log=Path(os.devnull), record=record)
            )
        comparison, took = Comparison(ranks), []
        for _ in range(_ROUNDS):
            for _ in range(_CALLS_PER_S // _LOOKS_PER_S):
                for ledger, channel in ledgers:
                    ledger.note(channel, "")
            began = time.process_time()
            comparison.advance()
            for rank in ranks:
                look(rank.record)
            took.append(time.process_time() - began)
    return statistics.median(took)


def _per_call(call: Callable[[], object]) -> float:
    began = time.thread_time()  # of the CPU: others may be on the same core
    for _ in range(_CALLS):
        call()
    return (time.thread_time() - began) / _CALLS


def main() -> None:
    """Show both."""
    phases_s, message_s = price_s()
    whole_s = phases_s + _NOTED_MESSAGES * message_s + sums_s()
    print(
        f"the notes of one step: {phases_s * 1e6:.1f} us for its phases, {message_s * 1e6:.1f} us for each of "
        f"{_NOTED_MESSAGES} messages, {sums_s() * 1e6:.1f} us for the sums of their calls: "
        f"{100 * whole_s / _STEP_S:.2f} % of a step of {_STEP_S * 1e3:.0f} ms"
    )
    print(
        f"the parent of {_NUM_RANKS} ranks that make {_CALLS_PER_S} calls a second each: "
        f"{100 * look_s() * _LOOKS_PER_S:.1f} % of one core"
    )
    print("| layout | ms per step, watched | not watched | throughput ratio (median of rounds) | quartiles |")
    print("|---|---|---|---|---|")
    for layout in sys.argv[1:] or ["dp2", "fsdp2"]:
        arms = {"watched": training(layout, is_noted=True), "not watched": training(layout, is_noted=False)}
        times = turns.compare(arms, rounds=60, warm_up=20, block=5)
        turns.show_arm(layout, times, "watched", against="not watched")


if __name__ == "__main__":
    main()
