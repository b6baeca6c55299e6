"""Arms that take turns in blocks of steps, so that a busy moment hits all of them; each has processes of its own.

    arms = {"shoal": turns.by_shoal(job, "dp2"), "by hand": turns.by_hand(make_step, 2)}
    times = turns.compare(arms, rounds=10, warm_up=10)
    turns.show_header()
    turns.show_arm("dp2", times, "shoal", against="by hand")

All ranks are forked from this one process, and have one CPU thread; who has no turn sleeps.
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from shoal import Job, World, assemble
from shoal.launch import start, warm_up
from shoal.verbs.bench.turns import Turns
from shoal.world import Place

BLOCK = 10

Step = Callable[[], float]  # one optimizer step -> the loss
Times = dict[str, dict[str, list[float]]]  # "wall" or "CPU" (of all ranks) -> arm -> seconds per step, round by round


@dataclass(frozen=True)
class Arm:
    """A way to train: how many ranks, and what each makes where it stands."""

    num_ranks: int
    open: Callable[[Place], contextlib.AbstractContextManager[Step]]


def by_shoal(job: Job, layout: str, num_ranks: int) -> Arm:
    """An ordinary run, that logs to its folder once in a block."""

    @contextlib.contextmanager
    def opened(place: Place) -> Iterator[Step]:
        with World.open(layout, place=place) as world, tempfile.TemporaryDirectory() as folder:
            path = Path(world.broadcast_text(folder))
            run = assemble(job, world, folder=path / "run", quiet=True, log_every=BLOCK)
            steps = run.steps()

            def step() -> float:
                result = next(steps)()
                run.log(result)
                run.save_if_due()
                return float(result.loss)

            yield step
            world.barrier()

    return Arm(num_ranks, opened)


def by_hand(make: Callable[[], Step], num_ranks: int) -> Arm:
    """A step of one's own, made in a process group of torch's where there are several ranks."""

    @contextlib.contextmanager
    def opened(place: Place) -> Iterator[Step]:
        if place.size > 1:
            dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.size)
        yield make()  # no name holds it: a DDP model that is freed after its group may hang at the end (torch 2.13)
        if place.size > 1:
            dist.barrier()
            dist.destroy_process_group()

    return Arm(num_ranks, opened)


def compare(arms: dict[str, Arm], *, rounds: int, warm_up: int, block: int = BLOCK) -> Times:
    """A block of every arm in each round, another one first in each."""
    prepare()
    names, turns = list(arms), Turns(len(arms), rounds + 1)
    firsts = [sum(arms[name].num_ranks for name in names[:at]) for at in range(len(names))]
    with tempfile.TemporaryDirectory() as folder:

        def rank(place: Place) -> None:
            at = max(at for at, first in enumerate(firsts) if first <= place.rank)
            own = _own(place, at, firsts[at], arms[names[at]].num_ranks)
            counted = (turn for turn, _ in turns.taken(at)) if own.rank == 0 else iter(range(rounds + 1))
            with arms[names[at]].open(own) as step:
                times = _take(step, counted, warm_up, block)
            if own.rank == 0:
                (Path(folder) / f"{at}.json").write_text(json.dumps(times))

        if start(rank, sum(arm.num_ranks for arm in arms.values()), threads=1, show="none").exit_code:
            sys.exit("nothing was measured")
        rows = [json.loads((Path(folder) / f"{at}.json").read_text()) for at in range(len(names))]
    return {clock: {name: row[clock] for name, row in zip(names, rows, strict=True)} for clock in ("wall", "CPU")}


def prepare() -> None:
    """Import here what every rank needs."""
    warm_up(also=("shoal.run", "psutil", "torch.distributed.fsdp", "torch._dynamo.config", "shoal.parallel.pipeline"))


def _own(place: Place, at: int, first: int, size: int) -> Place:
    rank = place.rank - first
    there = {"rank": rank, "size": size, "local_rank": rank, "local_size": size}
    return replace(place, **there, rendezvous=f"{place.rendezvous}-{at}", source="shoal" if size > 1 else "lone")


def _take(step: Step, turns: Iterator[int], warm_up: int, block: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"wall": [], "CPU": []}
    for turn in turns:
        if dist.is_initialized():
            dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(block if turn else warm_up):
            step()
        wall_s, cpu_s = time.perf_counter() - began, torch.tensor(time.process_time() - cpu_began)
        if dist.is_initialized():
            dist.all_reduce(cpu_s)
        if turn:
            times["wall"].append(wall_s / block)
            times["CPU"].append(float(cpu_s) / block)
    return times


def show_header() -> None:
    """Above the rows."""
    print("| ms per step | shoal | by hand | throughput ratio (median of rounds) | quartiles |")
    print("|---|---|---|---|---|")


def show_arm(what: str, times: Times, ours: str, *, against: str) -> None:
    """Two rows. CPU time, of all ranks, counts what is done and not what is waited for."""
    for clock in ("wall", "CPU"):
        mine, theirs = ([second * 1e3 for second in times[clock][arm]] for arm in (ours, against))
        show_row(f"{what}, {clock}", mine, theirs, [b / a for a, b in zip(mine, theirs, strict=True)], digits=1)


def show_row(
    what: str, ours: Sequence[float], theirs: Sequence[float], ratios: Sequence[float], *, digits: int
) -> None:
    """Medians, and how far the ratio (above 1: shoal is the better) spreads."""
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    print(
        f"| {what} | {statistics.median(ours):.{digits}f} | {statistics.median(theirs):.{digits}f} "
        f"| {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} |",
        flush=True,
    )
