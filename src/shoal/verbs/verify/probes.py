"""Two tiny jobs that have all that is hard to get right: what mistakes are planted into."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.job import Job, Params, Scheduler, Sum, mean_loss, token_loss

VOCABULARY, TIME = 24, 6


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.head_norm = nn.LayerNorm(width // heads)  # whole on every rank, in the middle of what tp splits
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(self.head_norm(q), self.head_norm(k), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), _Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class _Language(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(TIME, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(param, std=0.1)  # a bias of zero would hide that it is added twice

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True, kw_only=True)
class Words(Job):
    """A language model: tied weights, sentences of unlike length, clipping that bites, Adam, a schedule."""

    batch_size: int = 5
    steps: int = 8
    clip_grad_norm: float | None = 0.05

    def model(self) -> nn.Module:
        return _Language(width=8, heads=4)

    def data(self) -> Any:
        draw = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(0, VOCABULARY, (13, TIME + 1), generator=draw)
        targets = ids[:, 1:].clone()
        for row in range(len(ids)):
            targets[row, 1 + row % TIME :] = -100
        return TensorDataset(ids[:, :-1], targets)

    def loss(self, output: Any, batch: Any) -> Sum:
        return token_loss(output, batch[1])

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Scheduler | None:
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=self.steps)


@dataclass(frozen=True, kw_only=True)
class Pixels(Job):
    """A convolutional network with BatchNorm, and batches that do not divide."""

    batch_size: int = 5
    steps: int = 8

    def model(self) -> nn.Module:
        conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    def data(self) -> Any:
        draw = torch.Generator().manual_seed(self.seed)
        return TensorDataset(torch.randn(12, 1, 4, 4, generator=draw), torch.randint(0, 3, (12,), generator=draw))

    def loss(self, output: Any, batch: Any) -> Sum:
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)
