"""Steady throughput of `gpt`, lone and dp2, against the hand-written loop; and scaling efficiency E(2) of both.

Strong scaling: the global batch is the same. Four arms, each in processes of its own, one CPU thread each, take turns
(turns.py): python benchmarks/dp_overhead.py [--rounds 20] [--width 128]
"""

import argparse
import functools

import torch.distributed as dist
import turns
from handwritten import decoder, loop, replicated

from shoal.models.gpt import GPT

BATCH, STEPS = 32, 10_000


def by_hand(width: int) -> turns.Step:
    """The loop of a careful person."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return loop(replicated(decoder(width)), batch_size=BATCH, steps=STEPS, num_data=size, data_rank=rank)


def show(times: turns.Times) -> None:
    turns.show_header()
    for what in ("lone", "dp2"):
        turns.show_arm(what, times, f"{what} shoal", against=f"{what} by hand")
    # CPU time is that of both ranks already.
    for clock, ranks in (("wall", 2), ("CPU", 1)):
        ours, theirs = (
            [
                one / (ranks * two)
                for one, two in zip(*(times[clock][f"{n} {arm}"] for n in ("lone", "dp2")), strict=True)
            ]
            for arm in ("shoal", "by hand")
        )
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        turns.show_row(f"E(2) = T(1) / (2 T(2)), {clock}", ours, theirs, ratios, digits=3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    job, make = GPT(width=args.width, batch_size=BATCH, steps=STEPS), functools.partial(by_hand, args.width)
    arms = {
        "lone shoal": turns.by_shoal(job, "lone", 1),
        "lone by hand": turns.by_hand(make, 1),
        "dp2 shoal": turns.by_shoal(job, "dp2", 2),
        "dp2 by hand": turns.by_hand(make, 2),
    }
    show(turns.compare(arms, rounds=args.rounds, warm_up=args.warm_up))


if __name__ == "__main__":
    main()
