"""From the command to the end of step 1: `shoal train gpt` against the hand-written script under torchrun.

Interleaved rounds, medians, and the ratio round by round: python benchmarks/startup.py [--rounds 5]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


def shoal_s(num_ranks: int) -> float:
    """Seconds to the first line of metrics.jsonl, which is written after step 1."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        subprocess.run(
            [BIN / "shoal", "train", "gpt", "--layout", f"dp{num_ranks}", "--steps", "2", "--run", folder, "--json"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        first = (Path(folder) / "metrics.jsonl").read_text().splitlines()[0]
        return float(json.loads(first)["time"]) - began


def torchrun_s(num_ranks: int) -> float:
    """Seconds to the end of step 1, as rank 0 saw it."""
    began = time.time()
    done = subprocess.run(
        [BIN / "torchrun", "--standalone", "--nproc-per-node", str(num_ranks), HERE / "handwritten.py"],
        check=False,  # with torch 2.13 one such script in ten aborts at its very end, its line printed
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return float(json.loads(last_json(done.stdout))["first_step_at"]) - began


def last_json(text: str) -> str:
    """The line that rank 0 printed."""
    return next(line for line in reversed(text.splitlines()) if line.startswith("{"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print("| ranks | shoal, s | torchrun, s | ratio (median of rounds) | min | max |")
    print("|---|---|---|---|---|---|")
    for num_ranks in (2, 4):
        pairs = [(shoal_s(num_ranks), torchrun_s(num_ranks)) for _ in range(rounds)]
        ratios = [ours / theirs for ours, theirs in pairs]
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"| {num_ranks} | {ours:.2f} | {theirs:.2f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} | {max(ratios):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
