"""Steady throughput of `gpt` under fsdp2 against the same written by hand with torch's fully_shard.

By hand: fully_shard on each block and on the model, clip_grad_norm_, fused AdamW, the loss of the global batch. Both
arms take turns (turns.py):
python benchmarks/fsdp_overhead.py [--rounds 10] [--width 128] [--zero 3]
"""

import argparse
import functools

import torch.distributed as dist
import turns
from handwritten import decoder, loop
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.models.gpt import GPT

BATCH, STEPS = 16, 10_000


def by_hand(width: int, zero: int) -> turns.Step:
    """The loop of a careful person."""
    model, size = decoder(width), dist.get_world_size()
    mesh, reshard = init_device_mesh("cpu", (size,)), None if zero == 3 else False
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return loop(model, batch_size=BATCH, steps=STEPS, num_data=size, data_rank=dist.get_rank())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--zero", type=int, choices=(2, 3), default=3)
    args = parser.parse_args()
    layout = "fsdp2" if args.zero == 3 else "fsdp2:reshard=false"
    job = GPT(width=args.width, batch_size=BATCH, steps=STEPS)
    arms = {
        "shoal": turns.by_shoal(job, layout, 2),
        "by hand": turns.by_hand(functools.partial(by_hand, args.width, args.zero), 2),
    }
    times = turns.compare(arms, rounds=args.rounds, warm_up=args.warm_up)
    turns.show_header()
    turns.show_arm(layout, times, "shoal", against="by hand")


if __name__ == "__main__":
    main()
