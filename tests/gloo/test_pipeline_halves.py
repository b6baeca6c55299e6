"""Schedules that split a backward in two: each gradient counts once, whatever a stage does with its parameters."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import assert_same_training, record
from zoo import Text

from shoal.errors import JobError


class Scaled(nn.Module):
    """Four blocks, and a forward that uses a parameter of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, tokens):
        return self.head(self.between(self.token(tokens)))

    def between(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x) * self.scale)
        return x


class MadeInAMiddleStage(Scaled):
    """A value of a parameter alone, which the next stage gets too."""

    def between(self, x):
        x = torch.tanh(self.blocks[0](x))
        doubled = self.scale * 2
        for block in self.blocks[1:]:
            x = torch.tanh(block(x) * doubled)
        return x


class SlicedAtTheEnd(Scaled):
    def between(self, x):
        doubled = self.scale * 2
        for block in self.blocks:
            x = torch.tanh(block(x))
            if block is self.blocks[2]:
                x = x + doubled
        return x * doubled[:4].repeat(2)


class Written(Scaled):
    """A value of a parameter alone, written in place on the way."""

    def between(self, x):
        doubled = self.scale * 2
        for block in self.blocks:
            x = torch.tanh(block(x))
            doubled.mul_(1.1)
        return x * doubled


class WrittenInto(Scaled):
    """Writes into the memory of a value, out of sight of its graph."""

    def between(self, x):
        for block in self.blocks:
            x = block(x)
            with torch.no_grad():
                torch.mul(x.detach(), 0.5, out=x.detach())
            x = x + 1
        return x


class CalledTwice(Scaled):
    def between(self, x):
        for block in self.blocks:
            x = torch.tanh(block(torch.tanh(block(x))))
        return x


class Hooked(Scaled):
    """A hook on the very tensor that a weight has made."""

    def between(self, x):
        for block in self.blocks:
            y = block(x.flatten(0, 1))
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 0.5)
            x = torch.tanh(y).view_as(x)
        return x


@pytest.mark.parametrize(
    "model", [Scaled, MadeInAMiddleStage, SlicedAtTheEnd, Written, WrittenInto, CalledTwice, Hooked]
)
@pytest.mark.parametrize("layout", ["pp2:micro=4", "pp2:micro=4,schedule=zbv"])
def test_every_gradient_counts_once(model, layout):
    @dataclass(frozen=True, kw_only=True)
    class Job(Text):
        def model(self):
            return model()

    assert_same_training(record(Job, layout), record(Job)[0])


class Reentrant(Scaled):
    """Runs a backward of its own within the backward."""

    class Block(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True) if x.requires_grad else super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(8, 8) for _ in range(4))


def test_what_cannot_be_halved_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Job(Text):
        def model(self):
            return Reentrant()

    assert_same_training(record(Job, "pp2:micro=4"), record(Job)[0])
    with pytest.raises(JobError, match=r"cannot be halved .* 1f1b, gpipe, interleaved"):
        record(Job, "pp2:micro=4,schedule=zbv")
