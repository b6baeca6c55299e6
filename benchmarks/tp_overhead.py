"""Steady throughput of `gpt` under tp2 against the same written by hand, in two ways.

    megatron   plain tensors: a slice of each matrix, identity / all-reduce pairs around attention and MLP
    dtensor    torch's parallelize_module, ColwiseParallel and RowwiseParallel on the same layers

Table, position and head are whole in both, as such scripts have them; shoal splits table and head too. All arms take
turns (turns.py): python benchmarks/tp_overhead.py [--rounds 10] [--width 128]
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import turns
from handwritten import decoder, loop
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shoal.models.gpt import GPT

BATCH, STEPS = 16, 10_000


class Enter(torch.autograd.Function):
    """As it is; in backward the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """The sum over the ranks; in backward as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Column(nn.Module):
    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = (_slice(t, 0) for t in (whole.weight, whole.bias))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Enter.apply(x), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = _slice(whole.weight, 1), whole.bias

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(F.linear(x, self.weight)) + self.bias


def _slice(whole: Tensor, dim: int) -> nn.Parameter:
    return nn.Parameter(whole.detach().tensor_split(dist.get_world_size(), dim)[dist.get_rank()].clone())


def megatron(width: int) -> tuple[nn.Module, set[int]]:
    """The model, and the ids of the parameters that are slices."""
    model, sliced = decoder(width), set()
    for block in model.blocks:
        block.attention.qkv, block.attention.out = Column(block.attention.qkv), Row(block.attention.out)
        block.mlp.up, block.mlp.down = Column(block.mlp.up), Row(block.mlp.down)
        for layer in (block.attention.qkv, block.mlp.up):
            sliced |= {id(layer.weight), id(layer.bias)}
        sliced |= {id(block.attention.out.weight), id(block.mlp.down.weight)}
    return model, sliced


def dtensor(width: int) -> tuple[nn.Module, set[int]]:
    """The same from parallelize_module."""
    model, mesh = decoder(width), init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel()}
    plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    sliced = {id(p) for p in model.parameters() if isinstance(p, DTensor) and not p.placements[0].is_replicate()}
    return model, sliced


def by_hand(model: nn.Module, sliced: set[int]) -> turns.Step:
    """The loop of a careful person: both ranks take the whole batch, and clip by the norm of all slices."""
    clip = functools.partial(clip_slices, sliced=sliced)
    return loop(model, batch_size=BATCH, steps=STEPS, num_data=1, data_rank=0, clip=clip)


def clip_slices(params: list[nn.Parameter], *, sliced: set[int]) -> None:
    """Slices add up over the ranks; what is whole counts once."""
    grads = {id(p): p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params}
    own = torch.nn.utils.get_total_norm([grad for key, grad in grads.items() if key in sliced]) ** 2
    dist.all_reduce(own)
    norm = (own + torch.nn.utils.get_total_norm([g for key, g in grads.items() if key not in sliced]) ** 2).sqrt()
    torch._foreach_mul_(list(grads.values()), (1.0 / (norm + 1e-6)).clamp(max=1.0))


def made(split: Callable[[int], tuple[nn.Module, set[int]]], width: int) -> turns.Step:
    """In a rank; the first losses are those of one process."""
    alone = loop(decoder(width), batch_size=BATCH, steps=STEPS, num_data=1, data_rank=0)
    step = by_hand(*split(width))
    for _ in range(3):
        assert abs(alone() - step()) < 1e-4, "by hand it is another training"
    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    arms = {
        "shoal": turns.by_shoal(GPT(width=args.width, batch_size=BATCH, steps=STEPS), "tp2", 2),
        "megatron": turns.by_hand(functools.partial(made, megatron, args.width), 2),
        "dtensor": turns.by_hand(functools.partial(made, dtensor, args.width), 2),
    }
    times = turns.compare(arms, rounds=args.rounds, warm_up=args.warm_up)
    turns.show_header()
    for against in ("megatron", "dtensor"):
        turns.show_arm(f"tp2 against {against}", times, "shoal", against=against)


if __name__ == "__main__":
    main()
