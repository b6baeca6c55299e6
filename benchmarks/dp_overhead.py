"""Steady throughput of `gpt`, lone and dp2, against the hand-written loop; and scaling efficiency E(2) of both.

One CPU thread per process. Four arms take turns, so that a busy moment hits all: rounds of short runs, the median
step of each, and the ratio round by round: python benchmarks/dp_overhead.py [--rounds 5] [--steps 40]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
BLOCK = 10
WARM_UP = 20


def shoal_step_s(layout: str, steps: int, *sets: str) -> float:
    """The median over blocks of 10 steps, as metrics.jsonl has them in an ordinary run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [BIN / "shoal", "train", "gpt", "--layout", layout, "--steps", str(steps), "--run", folder, "--json"]
        subprocess.run(
            [*command, "--threads", "1", "--log-every", str(BLOCK), *sets],
            check=True,
            stdout=subprocess.DEVNULL,
            env=ENV,
        )
        events = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        return statistics.median(e["perf/step_time_s"] for e in events if e["step"] > WARM_UP and "train/loss" in e)


def handwritten_step_s(num_ranks: int, steps: int, *arguments: str) -> float:
    """The same of the hand-written loop, under torchrun or alone."""
    script = [str(HERE / "handwritten.py"), "--steps", str(steps), "--warm-up", str(WARM_UP), *arguments]
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*torchrun, *script] if num_ranks > 1 else [sys.executable, *script]
    # With torch 2.13 one such script in ten aborts at its very end, its line printed.
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=ENV)
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    times = json.loads(line)["step_times_s"]
    return statistics.median(statistics.mean(times[i : i + BLOCK]) for i in range(0, len(times), BLOCK))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    sets, arguments = ["--set", f"width={args.width}"], ["--width", str(args.width)]
    rows = [
        (
            shoal_step_s("lone", args.steps, *sets),
            handwritten_step_s(1, args.steps, *arguments),
            shoal_step_s("dp2", args.steps, *sets),
            handwritten_step_s(2, args.steps, *arguments),
        )
        for _ in range(args.rounds)
    ]
    lone, by_hand, dp2, ddp = (statistics.median(column) for column in zip(*rows, strict=True))
    print("| what | shoal | by hand | throughput ratio (median of rounds) | min | max |")
    print("|---|---|---|---|---|---|")
    report("lone, ms per step", lone * 1e3, by_hand * 1e3, [b / a for a, b, _, _ in rows])
    report("dp2, ms per step", dp2 * 1e3, ddp * 1e3, [d / c for _, _, c, d in rows])
    efficiencies = [((a / c / 2), (b / d / 2)) for a, b, c, d in rows]
    ours, theirs = (statistics.median(column) for column in zip(*efficiencies, strict=True))
    report("E(2) = T(1) / (2 T(2))", ours, theirs, [a / b for a, b in efficiencies])


def report(name: str, ours: float, theirs: float, ratios: list[float]) -> None:
    """One row of the table."""
    print(
        f"| {name} | {ours:.4g} | {theirs:.4g} | {statistics.median(ratios):.3f} "
        f"| {min(ratios):.3f} | {max(ratios):.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
