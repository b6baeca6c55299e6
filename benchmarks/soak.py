"""Whether a healthy run is left in peace: minutes of training in which all that takes long is well, and alarms counted.

    python benchmarks/soak.py [MINUTES] [LAYOUT ...]      by default 10 minutes of dp2

What happens, at random, the same in each run: a slow first step, steps of up to 2.5 s on one rank, evaluations of up to
20 s, saves of 64 MB, pauses of the garbage collector with a million objects, and other processes that take all cores.
"""

import gc
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal import Job, World, assemble
from shoal.job import Params, Sum, mean_loss
from shoal.launch import start, warm_up
from shoal.launch.incident import read
from shoal.layout import Layout
from shoal.run import Run
from shoal.world import Place

_FIRST_S, _SLOW_S, _EVALUATION_S, _SPIKE_S = 8.0, 2.5, 20.0, 10.0
_SAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class Restless(Job):
    """Steps of some tens of milliseconds; 64 MB of weights and state, so that saves take their time."""

    batch_size: int = 8
    steps: int = 1_000_000
    width: int = 1024

    def model(self) -> nn.Module:
        return _Net(self.width)

    def data(self) -> TensorDataset:
        return TensorDataset(torch.randn(_SAMPLES, self.width), torch.randint(0, 8, (_SAMPLES,)))

    def evaluation(self) -> TensorDataset:
        return self.data()

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Sum:
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)


class _Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 8))
        self.num_calls, self.pause_s = 0, 0.0  # of this rank, in evaluations

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            time.sleep(self.pause_s)
            return self.inner(inputs)  # type: ignore[no-any-return]
        self.num_calls += 1
        draw = random.Random(f"{torch.initial_seed()} {self.num_calls}")  # another one on each rank
        if self.num_calls == 1:
            time.sleep(draw.uniform(0, _FIRST_S))
        elif draw.random() < 0.01:
            time.sleep(draw.uniform(0, _SLOW_S))
        elif draw.random() < 0.01:
            kept = [[] for _ in range(1_000_000)]  # type: ignore[var-annotated]
            gc.collect()
            del kept
        time.sleep(draw.uniform(0.005, 0.03))
        return self.inner(inputs)  # type: ignore[no-any-return]


def restless(run: Run, until: float, count: Callable[[str], None]) -> None:
    """Train until then, with evaluations and saves."""
    net = run.model
    assert isinstance(net, _Net), "the user's module stays the user's module"
    for step in run.steps():
        run.log(step())
        count("steps")
        draw = random.Random(run.step)
        if draw.random() < 0.005:
            net.pause_s = draw.uniform(0, _EVALUATION_S) * 8 / _SAMPLES * (1 + run.world.rank)
            run.evaluate()
            count("evaluations")
        if draw.random() < 0.01:
            run.save()
            count("saves")
        if float(run.world.broadcast_text(str(time.monotonic()))) > until:
            return


def soak(minutes: float, layout: str) -> tuple[int, Counter[str], list[str]]:
    """Exit code, what happened, and the alarms."""
    until, counts, shown = time.monotonic() + 60 * minutes, Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder, is_over = Path(name), threading.Event()

        def work(place: Place) -> None:
            own = Counter[str]()
            with World.open(layout, place=place) as world:
                run = assemble(Restless(), world, folder=folder / "run", quiet=True, keep=1)
                restless(run, until, lambda what: own.update([what]))
                run.close()
            (folder / f"counts_{place.rank}").write_text(" ".join(own.elements()))

        spikes = threading.Thread(target=_spike, args=(is_over, counts))
        spikes.start()
        num_ranks = Layout.parse(layout).num_ranks
        incidents = folder / "incidents.jsonl"
        outcome = start(work, num_ranks, screen=shown.append, show="none", threads=1, incidents=incidents)
        is_over.set()
        spikes.join()
        if not outcome.exit_code:
            counts.update((folder / "counts_0").read_text().split())
        alarms = [f"{row['kind']}: {row}" for row in read(incidents)]
    return outcome.exit_code, counts, [*alarms, *(shown if outcome.exit_code else [])]


def _spike(is_over: threading.Event, counts: Counter[str]) -> None:
    """Now and then, other processes take all cores."""
    while not is_over.wait(3 * _SPIKE_S):
        busy = [multiprocessing.get_context("spawn").Process(target=_burn) for _ in range(2 * torch.get_num_threads())]
        for process in busy:
            process.start()
        for process in busy:
            process.join()
        counts["load spikes"] += 1


def _burn() -> None:
    until = time.monotonic() + _SPIKE_S
    while time.monotonic() < until:
        sum(range(10_000))


def main() -> None:
    """Show what happened, and each alarm."""
    warm_up(also=("shoal.run", "psutil"))
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    for layout in sys.argv[2:] or ["dp2"]:
        code, counts, alarms = soak(minutes, layout)
        what = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
        print(f"{layout}, {minutes:g} min: {what}; exit code {code}; {len(alarms)} alarms")
        for alarm in alarms:
            print(f"  {alarm}")


if __name__ == "__main__":
    main()
