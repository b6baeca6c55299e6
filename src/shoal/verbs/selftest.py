"""shoal test: is this machine able to train in parallel, and is what it trains right? Half a minute, no data needed."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.units import show_seconds
from shoal.world import Place, World

if TYPE_CHECKING:
    from shoal.job import Job

TOLERANCE = 1e-10  # relative, in float64: rounding is 1e5 times smaller, the mildest known bug 1e3 times larger
RANKS = 2
INTERRUPTED = 130  # Ctrl-C


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    passed: bool
    found: str
    seconds: float


@dataclass(kw_only=True)
class Report:
    """All checks of a machine."""

    checks: list[Check] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 0 if self.checks and all(check.passed for check in self.checks) else 1

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.exit_code == 0, "checks": [asdict(check) for check in self.checks]}


def command(*, quiet: bool = False) -> Report:
    """Run every check, one after the other, and say each result as it comes."""
    report = Report()
    for name, check in {"start": _start, "collectives": _collectives, "dp2 is lone": _parity}.items():
        began = time.perf_counter()
        try:
            passed, found = check()
        except ShoalError as error:
            passed, found = False, str(error)
        done = Check(name=name, passed=passed, found=found, seconds=time.perf_counter() - began)
        report.checks.append(done)
        if not quiet:
            print(f"{'ok  ' if passed else 'FAIL'}  {name:<12} {found}  ({show_seconds(done.seconds)})", flush=True)
    return report


def _on_ranks(work: Callable[[World, Path], dict[str, Any]], layout: str) -> list[dict[str, Any]]:
    """What each rank of a fresh world found; an empty list when one failed (its screen was shown)."""
    from shoal.launch import start, warm_up

    warm_up()
    with tempfile.TemporaryDirectory(prefix="shoal-test") as name:

        def rank(place: Place) -> int:
            with World.open(layout, place=place, device="cpu", timeout_min=1) as world:
                found = work(world, Path(name))
                (Path(name) / f"found_{place.rank}.json").write_text(json.dumps(found))
            return 0

        size = 1 if layout == "lone" else RANKS
        exit_code = start(rank, size).exit_code
        if exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        if exit_code != 0:
            return []
        return [json.loads((Path(name) / f"found_{rank}.json").read_text()) for rank in range(size)]


def _start() -> tuple[bool, str]:
    found = _on_ranks(lambda world, _: {"rank": world.rank, "size": world.size}, f"dp{RANKS}")
    right = [row == {"rank": rank, "size": RANKS} for rank, row in enumerate(found)]
    return len(right) == RANKS and all(right), f"{len(found)} of {RANKS} processes met"


def _collectives() -> tuple[bool, str]:
    def work(world: World, _: Path) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        size, rank = world.size, world.rank
        summed = torch.full((1000,), rank + 1.0)
        dist.all_reduce(summed)
        rows = [torch.empty(3) for _ in range(size)]
        dist.all_gather(rows, torch.full((3,), float(rank)))
        sent = torch.full((3,), float(rank))
        dist.broadcast(sent, src=size - 1)
        return {
            "all_reduce": bool((summed == size * (size + 1) / 2).all()),
            "all_gather": all(bool((row == r).all()) for r, row in enumerate(rows)),
            "broadcast": bool((sent == size - 1).all()),
            "text": world.gather_text(f"rank {rank}") == [f"rank {r}" for r in range(size)],
        }

    found = _on_ranks(work, f"dp{RANKS}")
    wrong = sorted({name for row in found for name, right in row.items() if not right})
    names = ", ".join(found[0]) if found else "nothing ran"
    return bool(found) and not wrong, f"wrong: {', '.join(wrong)}" if wrong else names


def _parity() -> tuple[bool, str]:
    lone, parallel = _on_ranks(_train, "lone"), _on_ranks(_train, f"dp{RANKS}")
    if not lone or not parallel:
        return False, "a training failed"
    reference = lone[0]
    worst, where = max(
        (abs(a - b) / max(abs(a), abs(b), 1e-300), name)
        for row in parallel
        for name, values in row.items()
        for a, b in zip(values, reference[name], strict=True)
    )
    return worst < TOLERANCE, f"5 steps in float64, relative difference at most {worst:.1e} ({where})"


def _train(world: World, _: Path) -> dict[str, Any]:
    from shoal.run import assemble

    run = assemble(_probe(), world, quiet=True)
    losses = [float(step().loss) for step in run.steps()]
    run.close()
    norms = {name: [float(tensor.double().norm())] for name, tensor in run.model.state_dict().items()}
    return {"loss": losses, **norms}


def _probe() -> "Job":
    """A small model with what is hard to get right: BatchNorm, and a ragged last batch."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from shoal.job import Job, Params, Sum, mean_loss

    @dataclass(frozen=True, kw_only=True)
    class Probe(Job):
        batch_size: int = 7
        steps: int = 5
        precision: Any = "fp64"

        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

        def data(self) -> Any:
            draw = torch.Generator().manual_seed(1)
            targets = torch.randint(0, 3, (24,), generator=draw)
            return torch.utils.data.TensorDataset(torch.randn(24, 4, generator=draw), targets)

        def loss(self, output: Any, batch: Any) -> Sum:
            return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

        def optimizer(self, params: Params) -> torch.optim.Optimizer:
            return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    return Probe()
