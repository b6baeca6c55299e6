"""What the ranks of one layout do: assemble, and step when it is their turn."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from shoal.checkpoint.write import versions
from shoal.job import Job
from shoal.metrics.memory import peak_memory_gib
from shoal.metrics.meter import axis_of
from shoal.metrics.peak import Peak, device_peak
from shoal.metrics.shares import Spent
from shoal.metrics.watch import Watch
from shoal.parallel.place import placement_of
from shoal.parallel.replicate import Replica
from shoal.run import Run, assemble
from shoal.run.metered import metered
from shoal.step import seed_everything
from shoal.verbs.bench.closed import closed_form
from shoal.verbs.bench.measured import Measured, RankMeasured
from shoal.verbs.bench.schedule import Actions, Schedule
from shoal.world import World

Say = Callable[[str], None]
Block = tuple[float, list[float]]  # seconds per step, losses


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How each layout is measured.

    Attributes:
        rounds: blocks that are timed, of `block` steps each.
        watched: steps in which it is seen where the time goes; they are not timed.
    """

    rounds: int
    block: int
    warm_up: int
    watched: int

    @property
    def steps(self) -> int:
        """In all; one is metered, and one may be passed over."""
        return self.warm_up + self.rounds * self.block + self.watched + 2

    @property
    def turns(self) -> int:
        """Of each layout: it warms up, looks where the time goes, and is timed."""
        return self.rounds + 2


def measure(
    job: Job, world: World, plan: Plan, turns: Iterable[int], keep: Callable[[Measured], None], say: Say
) -> None:
    """Step in each turn: warm-up in the first, then what is seen of a step, then blocks that are timed.

    Args:
        keep: is told by rank 0 after each of them what was measured so far.
    """
    run = assemble(job, world, quiet=True, log_every=plan.block)
    steps = run.steps()
    losses: list[float] = []
    times_s: list[float] = []
    found: Measured | None = None
    peak: Peak | None = None
    draws: bool | None = None
    for turn in turns:
        world.barrier()
        if turn == 0:
            peak = _peak(world, job)
            # Replicas in threads share those of the process.
            torch.set_num_threads(torch.get_num_threads() * world.layout.threads)
            draws, seen = _first(run, steps)
            losses += [*seen, *_stepped(run, steps, plan.warm_up - 1)[1]]
        elif turn == 1:
            say(f"{world.layout}  looks where the time goes")
            found, seen = _seen(run, steps, plan, peak)
            found = replace(found, draws=draws, note=_note(run))
            losses += seen
        else:
            step_s, seen = _stepped(run, steps, plan.block)
            times_s.append(step_s)
            losses += seen
            say(f"round {turn - 1}/{plan.rounds}  {world.layout}  {step_s * 1e3:.1f} ms/step  loss {seen[-1]:.4g}")
        if found is not None and world.rank == 0:
            keep(replace(found, times_s=times_s, losses=losses))


def _first(run: Run, steps: Iterator[Any]) -> tuple[bool | None, list[float]]:
    """The first step: whether its forward draws random numbers, and its loss."""
    begun, step = run.step, next(steps)
    result = step()
    run.log(result)
    after = torch.get_rng_state()
    if run.world.layout.pp > 1:
        return None, [float(result.loss)]  # each stage has a stream of its own
    seed_everything(run.job.seed, "step", begun, run.world.data_rank)
    same = torch.equal(after, torch.get_rng_state())
    torch.set_rng_state(after)
    return not same, [float(result.loss)]


def _note(run: Run) -> str:
    threads = placement_of(run.model).threads
    if threads is None or not threads.takes_turns:
        return ""
    return (
        "its replicas run one after the other, because the forward draws random numbers, so no thread can gain; take dp"
    )


def _stepped(run: Run, steps: Iterator[Any], count: int) -> Block:
    began = time.perf_counter()
    results = []
    for _ in range(count):
        result = next(steps)()
        run.log(result)
        results.append(result.loss)
    run.world.barrier()
    return (time.perf_counter() - began) / count, [float(loss) for loss in results]


def _peak(world: World, job: Job) -> Peak | None:
    """The best of what the ranks find, all at the same time, as they compute at the same time."""
    own = device_peak(world.device, job.precision)
    best = max(row[0] for row in world.gather_floats([own.flops if own else -math.inf]))
    return replace(own, flops=best) if own else None


def _seen(run: Run, steps: Iterator[Any], plan: Plan, peak: Peak | None) -> tuple[Measured, list[float]]:
    """Where time, memory and messages go; and the losses of the steps that it took."""
    world, job = run.world, run.job
    spent, actions, cpu_s, losses = _watched(run, steps, plan.watched)
    epoch = run.ledger.steps_per_epoch
    if epoch is not None and epoch > 1 and (run.step + 1) % epoch == 0:
        losses += _stepped(run, steps, 1)[1]  # the last batch of an epoch may be a small one
    with metered(run) as found:
        losses.append(float(next(steps)().loss))
    if world.layout.threads > 1:  # they are metered one after the other, and run side by side
        found.peak_bytes["activations"] *= world.layout.threads
    ratio = found.flops.hardware / max(found.flops.model, 1)
    own = {
        "measured": RankMeasured(
            spent=spent,
            peak_bytes=found.peak_bytes,
            peak_gib=peak_memory_gib(world.device),
            sent_bytes=dict(found.sent_bytes),
            formula_bytes=closed_form(run),
            cpu_s=cpu_s,
        ).as_dict(),
        "flops": [run.recorder.model_flops, run.recorder.model_flops * ratio],
        "actions": actions,
    }
    rows = [json.loads(text) for text in world.gather_text(json.dumps(own))]
    ranks = [RankMeasured.of(row["measured"]) for row in rows]
    schedule = Schedule.of(world, [row["actions"] for row in rows])
    for number, rank in enumerate(ranks if schedule.promised else ()):
        bubble_s = schedule.idle_s(world.mesh.coordinate(number, "pp"))
        ranks[number] = replace(rank, spent=replace(rank.spent, bubble_s=bubble_s))
    measured = Measured(
        layout=str(world.layout),
        num_devices=world.size * world.layout.threads,
        batch_size=job.batch_size,
        threads=torch.get_num_threads() // world.layout.threads,
        tokens_per_sample=run.ledger.tokens_per_step and run.ledger.tokens_per_step // job.batch_size,
        precision=job.precision,
        model_flops=sum(row["flops"][0] for row in rows),
        hardware_flops=sum(row["flops"][1] for row in rows),
        peak_flops=peak.flops if peak else None,
        peak_source=str(peak) if peak else "",
        bubble=schedule.bubble,
        spans=schedule.measured,
        promised=schedule.promised,
        ranks=ranks,
        versions={**versions(), "device": str(world.device), **({"backend": world.backend} if world.backend else {})},
    )
    return measured, losses


def _watched(run: Run, steps: Iterator[Any], count: int) -> tuple[Spent, Actions, float, list[float]]:
    """Where the time of some steps goes, what a pipeline does in each, CPU seconds per step, and the losses."""
    world, placement = run.world, placement_of(run.model)
    watch, actions, losses, data_s = Watch(world), [], [], 0.0
    hidden: list[float] = []
    worked = [0.0]  # when so many steps were done, their data included
    replica = placement.replica if isinstance(placement.replica, Replica) else None
    run.watch(watch.phase)
    with watch.messages():
        world.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(count):
            asked = time.perf_counter()
            step = next(steps)
            data_s += time.perf_counter() - asked
            result = step()
            run.log(result)
            losses.append(result.loss)
            if replica is not None:
                hidden.append(replica.exposed_s())
            actions.append(placement.pipeline.spans() if placement.pipeline else [])
            worked.append(data_s + watch.worked_s)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    run.watch(lambda phase: contextlib.nullcontext())
    work_s = [after - before for before, after in pairwise(worked)]
    if replica is not None:  # DDP tells of the step before, from its second call on
        work_s = [s - waited_s for s, waited_s in zip(work_s[1:-1], hidden[2:], strict=True)]
    hidden_s = sum(hidden[2:]) / len(hidden[2:]) if len(hidden) > 2 else 0.0
    axis = axis_of(tuple(world.mesh.group(world.rank, ("dp", "fsdp"))), world) if hidden_s else ""
    spent = Spent(
        wall_s=wall_s / count,
        data_s=data_s / count,
        phases_s={name: s / count for name, s in watch.phases.items()},
        waits_s={key: s / count for key, s in watch.waits.items()},
        hidden_s={axis: hidden_s} if hidden_s else {},
        work_s=work_s,
    )
    return spent, actions, cpu_s / count, [float(loss) for loss in losses]
