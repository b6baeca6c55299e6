"""Steady throughput of `gpt` under fsdp2 against the same written by hand with torch's fully_shard.

Both arms live in the same two processes (one CPU thread each) and take turns in blocks of steps, so that a busy moment
hits both: python benchmarks/shard_overhead.py [--rounds 10] [--width 128]
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from shoal import World, assemble
from shoal.data import StdlibText
from shoal.models.gpt import GPT, Decoder

BLOCK, DEPTH, BATCH = 5, 4, 32


def ours(world: World, width: int) -> Iterator[Callable[[], object]]:
    """An ordinary run of shoal."""
    job = GPT(width=width, depth=DEPTH, heads=4, context=128, batch_size=BATCH, steps=100_000)
    run = assemble(job, world, quiet=True, log_every=BLOCK)
    for step in run.steps():
        yield lambda step=step: run.log(step())  # type: ignore[misc]


def by_hand(rank: int, width: int) -> Iterator[Callable[[], object]]:
    """The same model, data, batch, clipping and optimizer, with fully_shard around each block and the model."""
    torch.manual_seed(0)
    model = Decoder(width=width, depth=DEPTH, heads=4, context=128, tied=True, dropout=0.0)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), fused=True)
    data = StdlibText(128)
    sampler = DistributedSampler(data, 2, rank, shuffle=True, seed=0)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown = loss.detach()
        dist.all_reduce(shown)  # the loss of the global batch, as a log needs it
        float(shown)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        for tokens, targets in DataLoader(data, batch_size=BATCH // 2, sampler=sampler):
            yield lambda tokens=tokens, targets=targets: step(tokens, targets)  # type: ignore[misc]


def measure(rounds: int, width: int) -> None:
    """Both arms, in turns; rank 0 prints the table."""
    torch.set_num_threads(1)
    with World.open("fsdp2") as world:
        arms = [ours(world, width), by_hand(world.rank, width)]
        for arm in arms:
            for _ in range(2 * BLOCK):
                next(arm)()
        rows = []
        for turn in range(rounds):
            times = [0.0, 0.0]
            for index in (0, 1) if turn % 2 else (1, 0):
                began = time.perf_counter()
                for _ in range(BLOCK):
                    next(arms[index])()
                times[index] = (time.perf_counter() - began) / BLOCK
            rows.append(times)
        if world.rank == 0:
            ratios = [hand / own for own, hand in rows]
            own, hand = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
            print(
                "| what | shoal | by hand | throughput ratio (median of rounds) | min | max |\n|---|---|---|---|---|---|"
            )
            print(
                f"| fsdp2, ms per step | {own:.4g} | {hand:.4g} | {statistics.median(ratios):.3f} | {min(ratios):.3f} "
                f"| {max(ratios):.3f} |",
                flush=True,
            )
        world.barrier()
        os._exit(0)  # torch's own loaders and groups of the second arm end with the process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.rounds, args.width)
    else:
        torchrun = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*torchrun, __file__, *sys.argv[1:]], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    main()
