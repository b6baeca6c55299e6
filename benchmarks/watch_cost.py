"""What noting its progress costs a run: the same ranks with and without a record, in blocks that take turns.

    python benchmarks/watch_cost.py

Both arms are the same training of the same ranks; in one, nobody reads the record, so that no message is noted. The
ratio of two steps of milliseconds is lost in the noise of a shared machine, so the price of each note is measured by
itself too, and multiplied by how many there are in a step.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import turns
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal import Job, World, assemble
from shoal.job import Params, Sum, mean_loss
from shoal.record import Phase, Record, prepare
from shoal.world import Place

_STEP_S = 0.010  # of which a share is told
_NOTED_MESSAGES = 4  # of a step in dp2: gradients, totals, the norm, the log's
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


def training(*, is_noted: bool) -> turns.Arm:
    """Two ranks; `start` gives each a record, which one arm leaves aside."""

    @contextlib.contextmanager
    def opened(place: Place) -> Iterator[turns.Step]:
        place = place if is_noted else replace(place, record="")
        with World.open("dp2", place=place) as world, tempfile.TemporaryDirectory() as folder:
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
        return _per_call(lambda: dist.all_reduce(tensor))


def _per_call(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter() - began) / _CALLS


def main() -> None:
    """Show both."""
    phases_s, message_s = price_s()
    whole_s = phases_s + _NOTED_MESSAGES * message_s
    print(
        f"the notes of one step: {phases_s * 1e6:.1f} us for its phases, {message_s * 1e6:.1f} us for each of "
        f"{_NOTED_MESSAGES} messages: {100 * whole_s / _STEP_S:.2f} % of a step of {_STEP_S * 1e3:.0f} ms"
    )
    arms = {"noted": training(is_noted=True), "not noted": training(is_noted=False)}
    times = turns.compare(arms, rounds=60, warm_up=20, block=5)
    print("| ms per step | noted | not noted | throughput ratio (median of rounds) | quartiles |")
    print("|---|---|---|---|---|")
    turns.show_arm("dp2", times, "noted", against="not noted")


if __name__ == "__main__":
    main()
