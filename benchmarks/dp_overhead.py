"""Steady throughput of `gpt`, lone and dp2, against the hand-written loop; and scaling efficiency E(2) of both.

Strong scaling: the global batch is the same. E(2) = T(1) / (2 T(2)); T(1) is the time of the fastest single process,
for both, so that a slow one flatters nobody; and, beside it, each one's own. Four arms, each in processes of its own,
one CPU thread each, take turns (turns.py): python benchmarks/dp_overhead.py [--rounds 50] [--width 128]
"""

import argparse
import functools
import statistics

import torch.distributed as dist
import turns
from handwritten import decoder, loop, replicated

from shoal.models.gpt import GPT
from shoal.world.device import keep_freed_memory

BATCH, STEPS = 32, 10_000


def by_hand(width: int, keep_memory: bool) -> turns.Step:
    """The loop of a careful person."""
    if keep_memory:
        keep_freed_memory()
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return loop(replicated(decoder(width)), batch_size=BATCH, steps=STEPS, num_data=size, data_rank=rank)


def show(times: turns.Times) -> None:
    turns.show_header()
    for what in ("lone", "dp2"):
        turns.show_arm(what, times, f"{what} shoal", against=f"{what} by hand")
    fastest = min(("lone shoal", "lone by hand"), key=lambda arm: statistics.median(times["wall"][arm]))
    # CPU time is that of both ranks already.
    for clock, ranks in (("wall", 2), ("CPU", 1)):
        of = times[clock]
        for base, ones in (("fastest T(1)", (fastest, fastest)), ("own T(1)", ("lone shoal", "lone by hand"))):
            ours, theirs = (
                [alone / (ranks * two) for alone, two in zip(of[one], of[f"dp2 {arm}"], strict=True)]
                for one, arm in zip(ones, ("shoal", "by hand"), strict=True)
            )
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            turns.show_row(f"E(2) on {base}, {clock}", ours, theirs, ratios, digits=3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--block", type=int, default=3
    )  # short ones: the machine is slower in one minute than in another
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--keep-memory", action="store_true", help="by hand, too, glibc keeps what a step frees, as shoal tells it"
    )
    args = parser.parse_args()
    job = GPT(width=args.width, batch_size=BATCH, steps=STEPS)
    make = functools.partial(by_hand, args.width, args.keep_memory)
    arms = {
        "lone shoal": turns.by_shoal(job, "lone", 1),
        "lone by hand": turns.by_hand(make, 1),
        "dp2 shoal": turns.by_shoal(job, "dp2", 2),
        "dp2 by hand": turns.by_hand(make, 2),
    }
    show(turns.compare(arms, rounds=args.rounds, warm_up=args.warm_up, block=args.block))


if __name__ == "__main__":
    main()
