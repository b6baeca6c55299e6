"""What a checkpoint costs a training loop: against the same save waited for, and against `torch.save` by hand.

    python benchmarks/checkpoint_cost.py                       # 30 M parameters with AdamW, 360 MB a save
    python benchmarks/checkpoint_cost.py dp2 --rounds 3

In each layout four loops of one training take turns, round by round:

    none             no saves
    torch.save       each rank writes what it alone holds, of replicas the first; no sync to the disk, no checksums
    shoal, waited    the loop stands until the checkpoint is committed: copy, checksums, write, sync, rename
    shoal            as a training does it

`stands still` is the time in the call, on rank 0, once the save before is done; `in all` is what the loop is longer by
than the one without saves: also what its steps lose to the thread that writes, and to ranks that wait. Medians over the
rounds. Each rank has one CPU thread. On a machine that has other work to do the second figure is mostly noise.
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import turns
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal import Job, World, assemble
from shoal.job import Params, Sum, mean_loss
from shoal.launch import start
from shoal.layout import Layout
from shoal.run import Run
from shoal.world import Place

Save = Callable[[Run], None]
Times = tuple[float, float, float]
Steps = Iterator[Callable[[], object]]
_SAVES = 2  # in a loop


@dataclass(frozen=True, kw_only=True)
class Wide(Job):
    """Layers of a million parameters, as in a transformer."""

    batch_size: int = 128
    steps: int = 1_000_000
    width: int = 1024
    depth: int = 30

    def model(self) -> nn.Module:
        layers = [module for _ in range(self.depth) for module in (nn.Linear(self.width, self.width), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(1024, self.width, generator=generator)
        return TensorDataset(inputs, torch.randint(0, 10, (1024,), generator=generator))

    def loss(self, output: Tensor, batch: list[Tensor]) -> Sum:
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)


class ByHand:
    """The newest two files of each rank."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder, self._world, self._count = folder, world, 0

    def __call__(self, run: Run) -> None:
        if self._world.rank and self._world.layout.fsdp == 1:
            return
        state = [*map(_local, run.model.parameters())]
        state += [_local(value) for held in run.optimizer.state.values() for value in held.values()]
        torch.save(state, self._file(self._count))
        self._file(self._count - 2).unlink(missing_ok=True)
        self._count += 1

    def settle(self) -> None:
        """Let the disk have what it is still owed, between two loops."""
        for path in self._folder.glob(f"{self._world.rank}-*.pt"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _file(self, number: int) -> Path:
        return self._folder / f"{self._world.rank}-{number}.pt"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()  # a DTensor, of fsdp


def _waited(run: Run) -> None:
    run.save()
    run._writer.wait()  # no loop wants to, so that there is no public way
    run.world.barrier()


def rank(place: Place, layout: str, folder: Path, rounds: int, every: int, depth: int) -> None:
    """Take turns, and print a table on rank 0."""
    with World.open(layout, place=place) as world:
        never = 1_000_000
        run = assemble(
            Wide(depth=depth), world, folder=folder / "run", quiet=True, log_every=never, save_every=never, keep=2
        )
        steps = run.steps()
        by_hand = ByHand(folder, world)
        saves: dict[str, Save] = {
            "none": lambda run: None,
            "torch.save": by_hand,
            "shoal, waited": _waited,
            "shoal": lambda run: run.save(),
        }
        times: dict[str, list[Times]] = {name: [] for name in saves}
        _loop(run, steps, every, saves["none"])
        first_s, *_ = _loop(run, steps, every, saves["shoal"], num_saves=1)
        for number in range(rounds + 1):
            for name, save in saves.items():
                run._writer.wait()
                by_hand.settle()
                world.barrier()
                found = _loop(run, steps, every, save)
                times[name] += [found] if number else []  # the first: files, pages, caches
        run._writer.wait()
        num_bytes = sum(row[0] for row in world.gather_floats([run._writer.saved[-1].num_bytes]))
        if world.rank == 0:
            show(layout, times, first_s, num_bytes)
        run.close()


def _loop(run: Run, steps: Steps, every: int, save: Save, num_saves: int = _SAVES) -> Times:
    """Seconds for each save: in the call, before it for the save before, and of the whole loop."""
    stands_s, waits_s, began = 0.0, 0.0, time.perf_counter()
    for _ in range(num_saves):
        for _ in range(every):
            next(steps)()
        called = time.perf_counter()
        run._writer.wait()
        ready = time.perf_counter()
        save(run)
        waits_s, stands_s = waits_s + ready - called, stands_s + time.perf_counter() - ready
    run.world.barrier()
    return stands_s / num_saves, waits_s / num_saves, (time.perf_counter() - began) / num_saves


def show(layout: str, times: dict[str, list[Times]], first_s: float, num_bytes: float) -> None:
    """A table: per save, and the share of a save that is waited for."""
    plain_s = [row[2] for row in times["none"]]
    stands, waits = (
        {name: statistics.median(row[at] for row in rows) for name, rows in times.items()} for at in (0, 1)
    )
    grows = {
        name: statistics.median(row[2] - plain for row, plain in zip(rows, plain_s, strict=True))
        for name, rows in times.items()
    }
    print(f"\n{layout}: {num_bytes / 1e6:.0f} MB a save, one every {statistics.median(plain_s):.2f} s of steps")
    print("| a save | stands still, s | of the one waited for | in all, s | of the one waited for |")
    print("|---|---|---|---|---|")
    for name in times:
        if name != "none":
            shares = stands[name] / stands["shoal, waited"], grows[name] / grows["shoal, waited"]
            print(f"| {name} | {stands[name]:.3f} | {shares[0]:.1%} | {grows[name]:.2f} | {shares[1]:.0%} |")
    print(
        f"the first save of the process stands still for {first_s:.3f} s; to the end of the save before, the loop waits"
    )
    print(f"for {waits['shoal']:.3f} s, which is in the last two columns alone", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", default=["lone", "dp2", "fsdp2"])
    parser.add_argument("--million-params", type=int, default=30)
    parser.add_argument("--every", type=int, default=6, help="steps between saves")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    turns.prepare()
    for layout in args.layouts:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            start(
                functools.partial(
                    rank,
                    layout=layout,
                    folder=Path(folder),
                    rounds=args.rounds,
                    every=args.every,
                    depth=args.million_params,
                ),
                Layout.parse(layout).num_ranks,
                threads=1,
                show="all",
            )


if __name__ == "__main__":
    main()
