"""Small jobs in float64, each with one trait that data parallelism finds hard."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.job import Job, Params, Scheduler, Sum, mean_loss, token_loss


def points(num: int, width: int = 4, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, width, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, classes, (num,), generator=generator))


@dataclass(frozen=True, kw_only=True)
class Points(Job):
    """Classify points with a small MLP: 24 samples, so that batches of 7 end every epoch with one of 3."""

    batch_size: int = 7
    steps: int = 5
    precision: str = "fp64"  # type: ignore[assignment]
    num_samples: int = 24
    lr: float = 0.1
    momentum: float = 0.9

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def data(self) -> Any:
        return points(self.num_samples)

    def loss(self, output: Any, batch: Any) -> Sum:
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum, weight_decay=0.01)

    def evaluation(self) -> Any:
        return points(11)

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Sum]:
        hits = output.argmax(-1) == batch[1]
        counts = torch.zeros(3, 3, dtype=torch.float64)
        counts.index_put_((batch[1], output.argmax(-1)), torch.ones(len(hits), dtype=torch.float64), accumulate=True)
        return {"accuracy": Sum(hits.double().sum(), len(hits)), "confusion": Sum(counts, len(hits))}


@dataclass(frozen=True, kw_only=True)
class Normed(Points):
    """With BatchNorm, whose statistics belong to the global batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@dataclass(frozen=True, kw_only=True)
class Adamant(Points):
    """AdamW, clipping that bites, and a schedule."""

    clip_grad_norm: float | None = 0.05

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Scheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=self.steps + 10)


class LanguageModel(nn.Module):
    """A tied embedding, a frozen positional table, a buffer, and a layer that is called twice."""

    def __init__(self, vocabulary: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(5, width)
        self.position.weight.requires_grad_(False)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor, shift: Tensor | None = None) -> dict[str, Tensor | None]:
        hidden = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        hidden = self.mix(torch.tanh(self.mix(hidden))) * self.scale
        return {"logits": self.head(hidden if shift is None else hidden + shift), "extra": None}


@dataclass(frozen=True, kw_only=True)
class Tokens(Points):
    """Sequences with 1, 2, 3 or 5 tokens that count: a mean of means would weigh them wrongly."""

    def model(self) -> nn.Module:
        return LanguageModel()

    def data(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(0, 11, (self.num_samples, 5), generator=generator)
        targets = torch.randint(0, 11, (self.num_samples, 5), generator=generator)
        for row in range(self.num_samples):
            targets[row, (1, 2, 3, 5)[row % 4] :] = -100
        return [{"ids": i, "targets": t, "shift": torch.tensor(0.1)} for i, t in zip(ids, targets, strict=True)]

    def inputs(self, batch: Any) -> Any:
        return {"ids": batch["ids"], "shift": batch["shift"][:, None, None]}

    def loss(self, output: Any, batch: Any) -> Sum:
        return token_loss(output["logits"], batch["targets"])

    def evaluation(self) -> Any:
        return self.data()[:7]

    def metrics(self, output: Any, batch: Any) -> dict[str, Sum]:
        return {}


class Branches(nn.Module):
    """`always` for all, `rare` for samples whose first feature is large, `never` for none; `rare` is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output = self.always(x)
        large = x[:, 0] > 0.9
        if large.any():
            extra = self.rare(x[large]) + self.rare(x[large] ** 2)
            output = output.index_add(0, large.nonzero()[:, 0], extra)
        return output


@dataclass(frozen=True, kw_only=True)
class Branching(Points):
    """Ranks and steps use different parameters; momentum and decay show a zero where there should be None."""

    batch_size: int = 4

    def model(self) -> nn.Module:
        return Branches()


@dataclass(frozen=True, kw_only=True)
class SparseRows(Points):
    """A sparse embedding, clipped."""

    clip_grad_norm: float | None = 0.1
    momentum: float = 0.0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 5, sparse=True, padding_idx=0), nn.Flatten(), nn.Linear(15, 3))

    def data(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(0, 9, (self.num_samples, 3), generator=generator)
        ids[:12] = 0  # some ranks see padding alone
        return TensorDataset(ids, torch.randint(0, 3, (self.num_samples,), generator=generator))

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr)

    def evaluation(self) -> Any:
        return None
