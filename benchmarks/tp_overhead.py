"""Steady throughput of `gpt` under tp2 against the same written by hand, in two ways.

    megatron   plain tensors: a slice of each matrix, identity / all-reduce pairs around attention and MLP
    dtensor    torch's parallelize_module, ColwiseParallel and RowwiseParallel on the same layers

Table, position and head are whole in both, as such scripts have them; shoal splits table and head too. All arms live
in the same two processes (one CPU thread each), and take turns in blocks of steps, so that a busy moment hits all:
python benchmarks/tp_overhead.py [--rounds 10] [--width 128]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, RandomSampler

from shoal import World, assemble
from shoal.data import StdlibText
from shoal.models.gpt import GPT, Decoder

BLOCK = 10
CONTEXT, DEPTH, HEADS, BATCH = 128, 4, 4, 16

Step = Callable[[], float]  # one optimizer step -> the loss


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


def decoder(width: int) -> Decoder:
    """The same weights in every arm."""
    torch.manual_seed(0)
    return Decoder(width=width, depth=DEPTH, heads=HEADS, context=CONTEXT, tied=True, dropout=0.0)


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


def by_hand(model: nn.Module, sliced: set[int]) -> Step:
    """The loop of a careful person: clipping by the norm of all slices, AdamW, schedule, the loss as a number."""
    params = list(model.parameters())
    kinds = [[p for p in params if (p.dim() > 1, isinstance(p, DTensor)) == kind] for kind in _KINDS]
    decays = [0.1 if is_matrix else 0.0 for is_matrix, _ in _KINDS]
    groups = [{"params": held, "weight_decay": decay} for held, decay in zip(kinds, decays, strict=True) if held]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000, eta_min=2e-4)
    batches = _batches()

    def step() -> float:
        inputs, targets = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        _clip(params, sliced)
        optimizer.step()
        schedule.step()
        return float(loss.detach())

    return step


_KINDS = [(is_matrix, is_dtensor) for is_matrix in (True, False) for is_dtensor in (True, False)]


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    data = StdlibText(CONTEXT)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    return iter(DataLoader(data, batch_size=BATCH, sampler=sampler))


def _clip(params: list[nn.Parameter], sliced: set[int]) -> None:
    grads = {id(p): p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params}
    own = torch.nn.utils.get_total_norm([grad for key, grad in grads.items() if key in sliced]) ** 2
    dist.all_reduce(own)
    norm = (own + torch.nn.utils.get_total_norm([g for key, g in grads.items() if key not in sliced]) ** 2).sqrt()
    torch._foreach_mul_(list(grads.values()), (1.0 / (norm + 1e-6)).clamp(max=1.0))


def by_shoal(width: int, world: World) -> Step:
    """An ordinary run."""
    job = GPT(width=width, depth=DEPTH, heads=HEADS, context=CONTEXT, batch_size=BATCH, steps=10_000)
    run = assemble(job, world, quiet=True, log_every=BLOCK)
    steps = run.steps()

    def step() -> float:
        result = next(steps)()
        run.log(result)
        return float(result.loss)

    return step


def measure(arms: dict[str, Step], rounds: int, warm_up: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds per step by arm, one pair (wall, CPU) for each round; another arm begins in each."""
    for step in arms.values():
        for _ in range(warm_up):
            step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                arms[name]()
            times[name].append(((time.perf_counter() - began) / BLOCK, (time.process_time() - cpu_began) / BLOCK))
    return times


def be_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with World.open("tp2") as world:
        arms = {
            "shoal": by_shoal(args.width, world),
            "megatron": by_hand(*megatron(args.width)),
            "dtensor": by_hand(*dtensor(args.width)),
        }
        first = {name: step() for name, step in arms.items() if name != "shoal"}
        assert abs(first["megatron"] - first["dtensor"]) < 1e-4, first  # they train the same
        times = measure(arms, args.rounds, args.warm_up)
        if world.rank == 0:
            report(times)


def report(times: dict[str, list[tuple[float, float]]]) -> None:
    """What shoal takes, what it takes by hand, and the ratio round by round (below 1: shoal is faster).

    CPU time of rank 0 counts what is done and not what is waited for: a busy machine moves it less.
    """
    print("| tp2, ms per step | shoal | by hand | shoal / by hand (median of rounds) | min | max |")
    print("|---|---|---|---|---|---|")
    for name in ("megatron", "dtensor"):
        for what, place in (("wall", 0), ("CPU", 1)):
            ours, theirs = ([pair[place] for pair in times[arm]] for arm in ("shoal", name))
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            print(
                f"| {name}, {what} | {statistics.median(ours) * 1e3:.1f} | {statistics.median(theirs) * 1e3:.1f} "
                f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    if "RANK" in os.environ:
        be_rank(args)
        return
    torchrun = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, *sys.argv], check=True, env=env)


if __name__ == "__main__":
    main()
