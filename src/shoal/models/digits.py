"""A small convolutional network on real handwritten digits, trained in seconds."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data import digits
from shoal.job import Job, Params, Scheduler, Sum, mean_loss

NUM_CLASSES = 10


def _conv(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    """(B, inputs, S, S) -> (B, outputs, S / stride, S / stride)."""
    conv = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


@dataclass(frozen=True, kw_only=True)
class Digits(Job):
    """Tells apart the digits 0 to 9, in images of 8 x 8."""

    width: int = 32
    lr: float = 0.1
    batch_size: int = 64
    steps: int = 300

    def model(self) -> nn.Module:
        """(B, 1, 8, 8) -> (B, 10)."""
        return nn.Sequential(
            _conv(1, self.width, stride=1),
            _conv(self.width, 2 * self.width, stride=2),
            _conv(2 * self.width, 4 * self.width, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * self.width, NUM_CLASSES),
        )

    def data(self) -> Any:
        return digits(train=True)

    def evaluation(self) -> Any:
        return digits(train=False)

    def loss(self, output: Tensor, batch: Any) -> Sum:
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Sum]:
        hits = output.argmax(-1) == batch[1]
        return {"accuracy": Sum(hits.sum(), float(hits.numel()))}

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Scheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
