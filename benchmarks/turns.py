"""Arms that live in the same processes and take turns in blocks of steps, so that a busy moment hits all of them.

A script with arms starts itself under torchrun; its ranks measure, rank 0 hands the times in, and the script prints:

    if turns.is_rank():
        turns.take("dp2", lambda world: {"shoal": turns.by_shoal(job, world), "by hand": ...}, rounds=10, warm_up=10)
    else:
        turns.show_header()
        turns.show_arm("dp2", turns.start(2), against="by hand")
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shoal import Job, World, assemble

BLOCK = 10
_FOLDER = "TURNS_FOLDER"  # the ranks' variable: where the times and the run's folder go

Step = Callable[[], float]  # one optimizer step -> the loss
Times = dict[str, dict[str, list[float]]]  # "wall" or "CPU" -> arm -> seconds per step of rank 0, round by round


def is_rank() -> bool:
    """Whether this process is one that `start` has made."""
    return _FOLDER in os.environ


def start(num_ranks: int) -> Times:
    """This script once more, with its arguments, in so many processes with one CPU thread each."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", str(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", _FOLDER: folder}
        # With torch 2.13 about one script with DDP in ten aborts at its very end, its times handed in.
        done = subprocess.run([*torchrun, *sys.argv], check=False, capture_output=True, text=True, env=env)
        found = Path(folder) / "times.json"
        if not found.exists():
            sys.exit(f"{num_ranks} ranks of {sys.argv[0]} measured nothing:\n{done.stderr}")
        times: Times = json.loads(found.read_text())
        return times


def take(layout: str, make_arms: Callable[[World], dict[str, Step]], *, rounds: int, warm_up: int) -> None:
    """What a rank does: open the world, make the arms in it, measure."""
    torch.set_num_threads(1)
    with World.open(layout) as world:
        # No name holds the arms: a DDP model that is freed after its group may hang at the end (torch 2.13).
        times = measure(make_arms(world), rounds=rounds, warm_up=warm_up)
        if world.rank == 0:
            (Path(os.environ[_FOLDER]) / "times.json").write_text(json.dumps(times))


def by_shoal(job: Job, world: World) -> Step:
    """An ordinary run, that logs to its folder once in a block."""
    run = assemble(job, world, folder=Path(os.environ[_FOLDER]) / "run", quiet=True, log_every=BLOCK)
    steps = run.steps()

    def step() -> float:
        result = next(steps)()
        run.log(result)
        run.save_if_due()
        return float(result.loss)

    return step


def measure(arms: dict[str, Step], *, rounds: int, warm_up: int) -> Times:
    """A block of every arm in each round; another arm begins in each."""
    for step in arms.values():
        for _ in range(warm_up):
            step()
    names = list(arms)
    times: Times = {clock: {name: [] for name in names} for clock in ("wall", "CPU")}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if dist.is_initialized():
                dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                arms[name]()
            times["wall"][name].append((time.perf_counter() - began) / BLOCK)
            times["CPU"][name].append((time.process_time() - cpu_began) / BLOCK)
    return times


def joined(launches: Sequence[Times]) -> Times:
    """The rounds of several launches as those of one."""
    return {
        clock: {arm: [s for times in launches for s in times[clock][arm]] for arm in arms}
        for clock, arms in launches[0].items()
    }


def show_header() -> None:
    """Above the rows."""
    print("| ms per step | shoal | by hand | throughput ratio (median of rounds) | min | max |")
    print("|---|---|---|---|---|---|")


def show_arm(what: str, times: Times, *, against: str) -> None:
    """Two rows. CPU time of rank 0 counts what is done and not what is waited for: a busy machine moves it less."""
    for clock in ("wall", "CPU"):
        ours, theirs = ([second * 1e3 for second in times[clock][arm]] for arm in ("shoal", against))
        show_row(f"{what}, {clock}", ours, theirs, [b / a for a, b in zip(ours, theirs, strict=True)], digits=1)


def show_row(what: str, ours: list[float], theirs: list[float], ratios: list[float], *, digits: int) -> None:
    """Medians, and how far the ratio (above 1: shoal is the better) spreads."""
    print(
        f"| {what} | {statistics.median(ours):.{digits}f} | {statistics.median(theirs):.{digits}f} "
        f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |",
        flush=True,
    )
