"""A job into which seconds are planted: for each sample that is read, for each that is computed, on one rank.

With a folder to `watch` it notes, by a clock of its own, how long each sample took to read and when each forward began.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from shoal.job import Job, Sum, mean_loss

sleep = time.sleep  # tests put a clock of their own in its place


def note(watch: str, what: str, seconds: float) -> None:
    """One file for each size of a world."""
    if watch:
        size = dist.get_world_size() if dist.is_initialized() else 1
        with Path(watch, f"{what}_{size}").open("a") as file:
            file.write(f"{seconds}\n")


class Points(Dataset):
    """Reading one takes a while."""

    def __init__(self, read_s: float, watch: str) -> None:
        self.read_s, self.watch = read_s, watch

    def __len__(self):
        return 64

    def __getitem__(self, index):
        began = time.monotonic()
        sleep(self.read_s)
        note(self.watch, "read", time.monotonic() - began)
        x = torch.full((4,), 1.0 + index / 64)
        return x, x


class Sleeping(nn.Linear):
    """Takes as long as it has samples, and longer on one rank."""

    def __init__(self, sample_s: float, slow_rank_s: float, watch: str) -> None:
        super().__init__(4, 4)
        self.sample_s, self.slow_rank_s, self.watch = sample_s, slow_rank_s, watch

    def forward(self, x):
        is_slow = dist.is_initialized() and dist.get_rank() == 1
        if self.training and torch.is_grad_enabled():
            if not dist.is_initialized() or dist.get_rank() == 0:
                note(self.watch, "forward", time.monotonic())
            sleep(self.sample_s * len(x) + self.slow_rank_s * is_slow)
        return super().forward(x)


@dataclass(frozen=True, kw_only=True)
class Slow(Job):
    read_s: float = 0.0
    sample_s: float = 0.0
    slow_rank_s: float = 0.0
    wrong: bool = False
    watch: str = ""
    batch_size: int = 4
    steps: int = 100

    def model(self):
        return Sleeping(self.sample_s, self.slow_rank_s, self.watch)

    def data(self):
        return Points(self.read_s, self.watch)

    def loss(self, output, batch):
        found = mean_loss((output - batch[1]).square().mean(1))
        size = dist.get_world_size() if self.wrong and dist.is_initialized() else 1
        return Sum(found.value * size, found.count)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.01)
