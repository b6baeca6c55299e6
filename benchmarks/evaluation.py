"""What an evaluation costs in a layout, against `lone`: wall time, and CPU time of all ranks.

Both take turns (turns.py), each an evaluation of the first batches of the held-out text of `gpt`. Of a pipeline of p
stages the bubble alone makes the wall time of a row of r parts (r + p - 1) / r times that of lone / p.
python benchmarks/evaluation.py [--rounds 10] [--width 128] [--batches 16] [--layouts pp2:micro=8 fsdp2:micro=8]
"""

import argparse
import contextlib
from collections.abc import Iterator

import turns

from shoal import World, assemble
from shoal.evaluate import evaluate
from shoal.layout import Layout
from shoal.models.gpt import GPT
from shoal.world import Place


def evaluating(job: GPT, layout: str, num_batches: int) -> turns.Arm:
    """One evaluation is one step."""

    @contextlib.contextmanager
    def opened(place: Place) -> Iterator[turns.Step]:
        with World.open(layout, place=place) as world:
            run = assemble(job, world, quiet=True)

            def step() -> float:
                figures = evaluate(job, run.model, run.evaluation, world, num_steps=num_batches)
                return float(figures["loss"])

            yield step
            run.close()

    return turns.Arm(Layout.parse(layout).num_ranks, opened)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--layouts", nargs="+", default=["pp2:micro=8", "fsdp2:micro=8"])
    args = parser.parse_args()
    job = GPT(width=args.width, steps=10_000)
    print(f"| ms per batch of {job.batch_size} | layout | lone | lone / layout (median of rounds) | quartiles |")
    print("|---|---|---|---|---|")
    for layout in args.layouts:  # two at a time: shoal compares the calls of all ranks that one parent has started
        arms = {name: evaluating(job, name, args.batches) for name in ("lone", layout)}
        times = turns.compare(arms, rounds=args.rounds, warm_up=1, block=1)
        for clock in ("wall", "CPU"):
            ours, alone = ([s * 1e3 / args.batches for s in times[clock][arm]] for arm in (layout, "lone"))
            ratios = [b / a for a, b in zip(ours, alone, strict=True)]
            turns.show_row(f"{layout}, {clock}", ours, alone, ratios, digits=1)


if __name__ == "__main__":
    main()
