"""Whether what is told of time is what a stopwatch says: known seconds are planted, and looked for in what is told.

python benchmarks/stopwatch.py [--rounds 5]

The job is that of tests/gloo/planted.py, which notes by a clock of its own what it took. The tests have a clock that
counts planted seconds alone, since they run beside each other; here seconds are real.
"""

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "gloo"))

from planted import Slow  # noqa: E402  # found by the path above

from shoal.verbs.bench import command  # noqa: E402

_MS = 1e3


def row(what: str, stopwatch: str, told: str, *, holds: bool) -> bool:
    """One line of the table."""
    print(f"| {what} | {stopwatch} | {told} | {'yes' if holds else '**no**'} |", flush=True)
    return holds


def near(what: str, stopwatch: float, told: float, within: float, unit: str = "") -> bool:
    """A row of a figure."""
    holds = abs(stopwatch - told) <= within
    return row(what, f"{stopwatch:.4g}{unit}", f"{told:.4g}{unit} (± {within:.2g} allowed)", holds=holds)


def noted(watch: str, what: str, size: int) -> list[float]:
    """By the job itself, in a world of so many ranks."""
    return [float(line) for line in Path(watch, f"{what}_{size}").read_text().splitlines()]


def reading(rounds: int) -> bool:
    """A sample takes 25 ms to read: four of them in one process, two in each of two."""
    with tempfile.TemporaryDirectory() as watch:
        rows = command(Slow(read_s=0.025, watch=watch), ["lone", "dp2"], rounds=1, block=4 * rounds, quiet=True).rows
        holds = []
        for bench, size in zip(rows, (1, 2), strict=True):
            stopwatch = statistics.mean(noted(watch, "read", size)) * 4 / size
            told = statistics.mean(rank.spent.data_s for rank in bench.ranks)
            holds.append(near(f"data wait, {bench.layout}", stopwatch * _MS, told * _MS, 5, " ms"))
    return all(holds)


def steps_s(watch: str, size: int) -> float:
    """From a forward to the next; that of the next block, after the turns of others, is no median."""
    return statistics.median(b - a for a, b in itertools.pairwise(noted(watch, "forward", size)))


def scaling(rounds: int) -> bool:
    """A sample takes 50 ms to compute, wherever it is."""
    with tempfile.TemporaryDirectory() as watch:
        job = Slow(sample_s=0.05, watch=watch)
        one, two = command(job, ["lone", "dp2"], rounds=rounds, block=8, quiet=True).table()
        by_hand = [steps_s(watch, size) for size in (1, 2)]
    with tempfile.TemporaryDirectory() as watch:
        job = Slow(sample_s=0.03, watch=watch)
        weak = command(job, scale=[1, 2], mode="weak", rounds=rounds, block=8, quiet=True).table()[1]
        weakly = [steps_s(watch, size) for size in (1, 2)]
    return (
        near("step, lone, 200 ms planted", by_hand[0] * _MS, one.step_ms, 10, " ms")
        & near("step, dp2, 100 ms planted", by_hand[1] * _MS, two.step_ms, 5, " ms")
        & near("S, strong", by_hand[0] / by_hand[1], two.speed_up, 0.1)
        & near("E, strong", by_hand[0] / by_hand[1] / 2, two.efficiency, 0.05)
        & near("E, weak", weakly[0] / weakly[1], weak.efficiency, 0.05)
    )


def slow_rank() -> bool:
    """Rank 1 takes 50 ms longer."""
    said = command(Slow(slow_rank_s=0.05), ["lone", "dp2"], rounds=1, block=4, quiet=True).sentences()[1]
    return row(
        "slow rank, 50 ms planted",
        "rank 1",
        said.partition(":")[2].partition(":")[0].strip(),
        holds="rank 1 is slow" in said,
    )


def interrupted(rounds: int) -> bool:
    """Seconds from Ctrl-C in the midst of steps to the end of the command."""
    took = [_ctrl_c_s() for _ in range(rounds)]
    text = f"{statistics.median(took):.2f} s (at most {max(took):.2f})"
    return row("Ctrl-C to the end, dp2", text, "at most 2 s", holds=max(took) <= 2)


def _ctrl_c_s() -> float:
    with tempfile.TemporaryDirectory() as name:
        words = ["train", "digits", "--layout", "dp2", "--steps", "1000000", "--log-every", "1", "--run", "run"]
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words],
            cwd=name,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        while not (Path(name) / "run" / "metrics.jsonl").exists():
            assert process.poll() is None, "it did not start"
            time.sleep(0.05)
        time.sleep(0.5)  # of steps
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        return time.monotonic() - began


def main() -> int:
    """Print the table; 1 where a row does not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print("| what | stopwatch | told | holds |")
    print("|---|---|---|---|")
    return int(not (reading(rounds) & scaling(rounds) & slow_rank() & interrupted(rounds)))


if __name__ == "__main__":
    sys.exit(main())
