"""The plainest job: four methods. Run it: shoal train examples/my_job.py --layout dp2 --set lr=0.05"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Job, Sum, mean_loss


@dataclass(frozen=True, kw_only=True)
class MyJob(Job):
    lr: float = 0.1
    batch_size: int = 32  # of the whole world, whatever the layout
    steps: int = 100

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def data(self) -> TensorDataset:
        """Points inside and outside a ring; the same on every rank, so the generator has a seed."""
        points = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
        return TensorDataset(points, (points.norm(dim=1) > 1).long())

    def loss(self, output: torch.Tensor, batch: list[torch.Tensor]) -> Sum:
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9)
