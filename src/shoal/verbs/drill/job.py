"""The training that is hurt: small, in float64, with a ragged batch at the end of every epoch."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoal.job import Job, Sum, mean_loss
from shoal.job.job import Precision
from shoal.verbs.drill.harm import note_pid, obey

_SAMPLES, _FEATURES = 100, 8


def _rank() -> int:
    """Also in a loader's worker, which is a copy of the rank."""
    return dist.get_rank() if dist.is_initialized() else 0


class Hurt(nn.Sequential):
    """Takes its time, and obeys the signs of the drill."""

    def __init__(self, pace_ms: float, signs: str) -> None:
        super().__init__(nn.Linear(_FEATURES, 32), nn.Tanh(), nn.Linear(32, 2))
        self.pace_s, self.signs = pace_ms / 1000, signs

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pace_s)
        out: Tensor = super().forward(x)  # type: ignore[no-untyped-call]  # torch's own has no types
        return obey(self.signs, "forward", _rank(), out)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Points, and whether they lie outside of a sphere."""

    def __init__(self, signs: str) -> None:
        self.signs = signs
        self.points = torch.randn(_SAMPLES, _FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = obey(self.signs, "sample", _rank(), self.points[index])
        return point, (point.norm() > _FEATURES**0.5).long()


@dataclass(frozen=True, kw_only=True)
class Drill(Job):
    """See above; `pace_ms` is what a forward takes at least, `signs` the folder of the signs."""

    batch_size: int = 12
    steps: int = 120
    precision: Precision = "fp64"
    pace_ms: float = 10.0
    signs: str = ""

    def model(self) -> nn.Module:
        note_pid(self.signs, _rank())
        return Hurt(self.pace_ms, self.signs)

    def data(self) -> Samples:
        return Samples(self.signs)

    def loss(self, output: Tensor, batch: list[Tensor]) -> Sum:
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01)
