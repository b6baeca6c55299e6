"""Ranks of one run killed at random times: who is named, how long until it trains again, how many steps that cost.

    python benchmarks/restarts.py [KILLS] [SEED] [LAYOUT]      by default 20 kills, seed 0, dp2

A real `shoal train digits` with a copy of the state in memory after each step. From outside: the time from kill -9 to
the end of the first step of the next generation. Of that, what went by before the parent noticed is the rest over what
it says itself.
"""

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.history import NAME, committed, problems
from shoal.launch.incident import INCIDENTS, read

_LIMIT_S = 60.0
_PAUSE_S = (0.2, 3.0)  # of steps between two kills


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One kill."""

    noticed_s: float
    again_s: float  # from the kill to the end of the first step
    lost: int
    is_named: bool  # it, and no other


def rank_of(process: psutil.Process) -> int | None:
    """Which rank a process is: the one whose log it writes."""
    for file in Path(f"/proc/{process.pid}/fd").iterdir():
        found = re.search(r"/logs/rank_(\d+)\.log$", os.readlink(file))
        if found:
            return int(found[1])
    return None


def wait_until(what: str, is_so) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + _LIMIT_S
    while not is_so():
        if time.monotonic() > until:
            raise SystemExit(f"waited {_LIMIT_S:.0f} s for {what}")
        time.sleep(0.002)


def restarts(run: Path) -> list[dict[str, object]]:
    return [row for row in read(run / INCIDENTS) if row["kind"] == "restart"]


def generation(run: Path) -> int:
    """Of the last step that is done."""
    try:
        return int(json.loads((run / NAME).read_text().splitlines()[-1])["generation"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def has_stepped(run: Path, number: int) -> bool:
    try:
        last = json.loads((run / NAME).read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return False
    return "step" in last and last["generation"] > number


def strike(parent: psutil.Process, run: Path, chance: random.Random) -> Measured:
    time.sleep(chance.uniform(*_PAUSE_S))
    before, number = len(restarts(run)), generation(run)
    ranks = {rank: child for child in parent.children() if (rank := rank_of(child)) is not None}
    victim = chance.choice(sorted(ranks))
    killed_at = time.monotonic()
    ranks[victim].kill()
    wait_until("a step", lambda: has_stepped(run, number))
    again_s = time.monotonic() - killed_at
    wait_until("the restart's line", lambda: len(restarts(run)) > before)
    told = restarts(run)[-1]
    return Measured(
        noticed_s=max(0.0, again_s - float(told["took_s"])),  # type: ignore[arg-type]
        again_s=again_s,
        lost=int(told["lost"]),  # type: ignore[call-overload]
        is_named=told["rank"] == victim,
    )


def main(kills: int = 20, seed: int = 0, layout: str = "dp2") -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["train", "digits", "--layout", layout, "--run", str(run), "--steps", "1000000", "--log-every", "1000"]
        words += ["--max-restarts", "3", "--memory-copies", "1", "--save-every", "100000"]
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until("the first step", lambda: has_stepped(run, 0))
            rows = [strike(psutil.Process(process.pid), run, chance) for _ in range(kills)]
        finally:
            process.terminate()
            process.wait(_LIMIT_S)
        wrong = problems(committed(run / NAME))
        steps = len(committed(run / NAME))
    print(f"{kills} kills of {layout}, seed {seed}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| | median | worst |\n|---|---|---|")
    for name, values in (
        ("noticed, s", [row.noticed_s for row in rows]),
        ("trains again, s after the kill", [row.again_s for row in rows]),
        ("steps lost", [float(row.lost) for row in rows]),
    ):
        print(f"| {name} | {statistics.median(values):.2f} | {max(values):.2f} |")
    print(f"\nright rank named: {sum(row.is_named for row in rows)} of {kills}")
    print(f"history of {steps} steps: " + ("each sample once" if not wrong else wrong[0]))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*(kind(text) for kind, text in zip((int, int, str), given, strict=False)))
