"""Steady throughput of `gpt` under fsdp2 against the same written by hand with torch's fully_shard.

By hand: fully_shard on each block and on the model, clip_grad_norm_, fused AdamW, the loss of the global batch. Both
arms live in the same two processes (one CPU thread each), and take turns in blocks of steps, so that a busy moment hits
both: python benchmarks/fsdp_overhead.py [--rounds 10] [--width 128] [--zero 3]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from shoal import World, assemble
from shoal.data import StdlibText
from shoal.models.gpt import GPT, Decoder

BLOCK = 10
CONTEXT, DEPTH, HEADS, BATCH = 128, 4, 4, 16

Step = Callable[[], float]  # one optimizer step -> the loss


def by_hand(width: int, zero: int) -> Step:
    """The loop of a careful person."""
    torch.manual_seed(0)
    model = Decoder(width=width, depth=DEPTH, heads=HEADS, context=CONTEXT, tied=True, dropout=0.0)
    mesh, reshard = init_device_mesh("cpu", (dist.get_world_size(),)), None if zero == 3 else False
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000, eta_min=2e-4)
    batches = _batches()

    def step() -> float:
        inputs, targets = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        shown = loss.detach()
        dist.all_reduce(shown)  # the loss of the global batch, as a log needs it
        return float(shown) / dist.get_world_size()

    return step


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    data = StdlibText(CONTEXT)
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    return iter(DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler))


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
    """Seconds per step by arm, one pair (wall, CPU) for each round; the other arm begins in each."""
    for step in arms.values():
        for _ in range(warm_up):
            step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for turn in range(rounds):
        for name in sorted(arms, reverse=bool(turn % 2)):
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                arms[name]()
            times[name].append(((time.perf_counter() - began) / BLOCK, (time.process_time() - cpu_began) / BLOCK))
    return times


def report(layout: str, times: dict[str, list[tuple[float, float]]]) -> None:
    """CPU time of rank 0 counts what is done and not what is waited for: a busy machine moves it less."""
    print("| ms per step | shoal | by hand | throughput ratio (median of rounds) | min | max |")
    print("|---|---|---|---|---|---|")
    for what, place in (("wall", 0), ("CPU", 1)):
        ours, theirs = ([pair[place] for pair in times[arm]] for arm in ("shoal", "by hand"))
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        print(
            f"| {layout}, {what} | {statistics.median(ours) * 1e3:.1f} | {statistics.median(theirs) * 1e3:.1f} "
            f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |",
            flush=True,
        )


def be_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    layout = "fsdp2" if args.zero == 3 else "fsdp2:reshard=false"
    with World.open(layout) as world:
        arms = {"shoal": by_shoal(args.width, world), "by hand": by_hand(args.width, args.zero)}
        times = measure(arms, args.rounds, args.warm_up)
        if world.rank == 0:
            report(layout, times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--zero", type=int, choices=(2, 3), default=3)
    args = parser.parse_args()
    if "RANK" in os.environ:
        be_rank(args)
        return
    torchrun = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, *sys.argv], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
