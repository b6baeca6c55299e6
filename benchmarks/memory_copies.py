"""What copies of the state in shared memory cost: the same training without, with one each step, and as `auto` has it.

    python benchmarks/memory_copies.py [ROUNDS]      by default 20

dp2, AdamW, blocks of steps that take turns (turns.py). The state that is copied: parameters and two moments, 12 bytes
for each parameter in float32.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import turns
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal import Job, World, assemble
from shoal.job import Params, Sum, mean_loss
from shoal.launch.memory import shared_folder
from shoal.world import Place

_BLOCK = 5


@dataclass(frozen=True, kw_only=True)
class Wide(Job):
    """3.2 M parameters, some 0.1 s for a step on one thread."""

    batch_size: int = 256
    steps: int = 1_000_000
    width: int = 1024

    def model(self) -> nn.Module:
        layers = [module for _ in range(3) for module in (nn.Linear(self.width, self.width), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4096, self.width, generator=generator)
        return TensorDataset(inputs, torch.randint(0, 10, (4096,), generator=generator))

    def loss(self, output: Tensor, batch: list[Tensor]) -> Sum:
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3)


def arm(folder: Path, name: str, every: int | None) -> turns.Arm:
    """Copies each `every` steps, 0: as auto; None: none."""

    @contextlib.contextmanager
    def opened(place: Place) -> Iterator[turns.Step]:
        memory = folder / name
        memory.mkdir(exist_ok=True)
        with World.open("dp2", place=replace(place, memory=str(memory), record="")) as world:
            run = assemble(Wide(), world, quiet=True, log_every=1_000_000, memory_copies=every)
            steps = run.steps()
            yield lambda: float(next(steps)().loss)
            if world.rank == 0:
                print(name, "|", next((note for note in run.recorder.notes if note.startswith("memory")), "no copies"))
            world.barrier()

    return turns.Arm(2, opened)


def main(rounds: int = 20) -> None:
    with shared_folder() as folder:
        if folder is None:
            sys.exit("this system has no shared memory")
        arms = {name: arm(folder, name, every) for name, every in (("none", None), ("each", 1), ("auto", 0))}
        times = turns.compare(arms, rounds=rounds, warm_up=10, block=_BLOCK)
    print("| ms per step | with copies | without | throughput ratio (median of rounds) | quartiles |")
    print("|---|---|---|---|---|")
    for name in ("each", "auto"):
        turns.show_arm(name, times, name, against="none")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
