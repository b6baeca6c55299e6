"""Steady throughput of `gpt`, lone and dp2, against the hand-written loop; and scaling efficiency E(2) of both.

Strong scaling: the global batch is the same. Both arms live in the same processes (turns.py), one CPU thread each. The
two world sizes cannot, so launches of one and of two processes take turns:
python benchmarks/dp_overhead.py [--launches 4] [--rounds 6] [--width 128]
"""

import argparse
import os
import statistics

import turns
from handwritten import decoder, loop, replicated

from shoal.models.gpt import GPT

BATCH, STEPS = 32, 10_000


def measure(args: argparse.Namespace) -> None:
    """In a rank."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    job = GPT(width=args.width, batch_size=BATCH, steps=STEPS)

    def by_hand() -> turns.Step:
        return loop(replicated(decoder(args.width)), batch_size=BATCH, steps=STEPS, num_data=size, data_rank=rank)

    turns.take(
        "lone" if size == 1 else f"dp{size}",
        lambda world: {"shoal": turns.by_shoal(job, world), "by hand": by_hand()},
        rounds=args.rounds,
        warm_up=args.warm_up,
    )


def show(launches: list[tuple[turns.Times, turns.Times]]) -> None:
    """The rounds of all launches in one row; E(2) from the medians of each pair of launches."""
    turns.show_header()
    for what, times in zip(("lone", "dp2"), zip(*launches, strict=True), strict=True):
        turns.show_arm(what, turns.joined(times), against="by hand")
    for clock in ("wall", "CPU"):
        ours, theirs = (
            [statistics.median(one[clock][arm]) / statistics.median(two[clock][arm]) / 2 for one, two in launches]
            for arm in ("shoal", "by hand")
        )
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        turns.show_row(f"E(2) = T(1) / (2 T(2)), {clock}", ours, theirs, ratios, digits=3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    if turns.is_rank():
        measure(args)
    else:
        show([(turns.start(1), turns.start(2)) for _ in range(args.launches)])


if __name__ == "__main__":
    main()
