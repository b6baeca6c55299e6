"""One training recorded in any layout, and the comparison of two: every loss, gradient, weight and figure."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from ranks import run_processes
from torch import Tensor

from shoal.job import Job
from shoal.layout import Layout
from shoal.parallel.parts import Part, gather_whole, local_of, parts_of
from shoal.run import Run, assemble
from shoal.world import Place, World

TOLERANCE = 1e-10

Tensors = Mapping[str, Tensor | None]


@dataclass
class Record:
    """What a rank saw: per step the loss, the gradient norm, the learning rate and every gradient."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    ids: list[tuple[int, ...]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    evaluation: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def record(
    make_job: Callable[[], Job],
    layout: str = "lone",
    *,
    on_step: Callable[[Run], None] | None = None,
    **options: Any,
) -> list[Record]:
    """Train in a layout; the record of every rank."""

    def rank(rank: int, size: int, rendezvous: str) -> Record:
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open(layout, place=place) as world:
            return walk(assemble(make_job(), world, quiet=True, **options), on_step)

    return run_processes(rank, Layout.parse(layout).num_ranks)


def rest_of_run(step: int, whole: Record) -> Record:
    """What a run that goes on from `step` must see of a whole one."""
    cut = {name: getattr(whole, name)[step:] for name in ("losses", "norms", "lrs", "grads")}
    return replace(whole, **cut)


def walk(run: Run, on_step: Callable[[Run], None] | None = None) -> Record:
    """Every step of a run, recorded."""
    seen = Record()
    try:
        for step in run.steps():
            if on_step is not None:
                on_step(run)
            result = step()
            run.log(result)
            run.save_if_due()
            seen.losses.append(float(result.loss))
            seen.norms.append(float(result.grad_norm))
            seen.lrs.append(result.lr)
            seen.grads.append(whole_tensors(run, {n: p.grad for n, p in run.model.named_parameters()}))
        seen.evaluation = run.evaluate()
        seen.state = {n: t for n, t in whole_tensors(run, run.model.state_dict()).items() if t is not None}
    finally:
        run.close()
    seen.notes = run.recorder.notes
    return seen


def whole_tensors(run: Run, tensors: Tensors) -> dict[str, Tensor | None]:
    """Tensors of the model put together from the parts of all ranks."""
    parts = parts_of(run.model)
    held = {name: local_of(tensor).to_dense() for name, tensor in tensors.items() if tensor is not None}
    whole = gather_whole(held, parts | {name: Part.whole(held[name].shape) for name in held.keys() - parts}, run.world)
    return {name: whole.get(name) for name in tensors}


def distance(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Relative Frobenius distance; where both are smaller than the floor, it is relative to that."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    scale = max(float(a.to(wide).norm()), float(b.to(wide).norm()), floor)
    return float((a.to(wide) - b.to(wide)).norm()) / scale if scale else 0.0


def differences(seen: Record, reference: Record) -> Iterator[tuple[str, float]]:
    """What a rank saw beside what the reference saw: (the name of a number or tensor, relative distance)."""
    assert reference.losses, "the reference trained nothing"
    assert seen.lrs == reference.lrs
    for what in ("losses", "norms"):
        ours, theirs = (torch.tensor(getattr(record, what), dtype=torch.float64) for record in (seen, reference))
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield f"step {step}: {what}", distance(a, b, 1e-4)
    for step, (grads, expected) in enumerate(zip(seen.grads, reference.grads, strict=True)):
        assert {n for n, g in grads.items() if g is None} == {n for n, g in expected.items() if g is None}, step
        yield from _between(f"step {step}: gradient of ", grads, expected)
    yield from _between("", seen.state, reference.state)
    assert seen.evaluation.keys() == reference.evaluation.keys()
    for name, figure in seen.evaluation.items():
        yield f"evaluation: {name}", distance(figure, reference.evaluation[name])


def _between(what: str, ours: Tensors, theirs: Tensors) -> Iterator[tuple[str, float]]:
    """Tensor by tensor; tensors below 1e-4 of the whole are measured by that.

    Some gradients are zero but for rounding (a bias before BatchNorm, a bias of keys before a softmax): noise of about
    1e-16 of the whole, in which no digit need agree.
    """
    assert ours.keys() == theirs.keys()
    pairs = [(name, a, b) for name, a in ours.items() if a is not None and (b := theirs[name]) is not None]
    whole = math.hypot(*(float(b.norm()) for _, _, b in pairs if b.is_floating_point() or b.is_complex()))
    for name, a, b in pairs:
        assert a.shape == b.shape, f"{what}{name}"
        yield what + name, distance(a, b, 1e-4 * whole)


def assert_same_training(found: list[Record], reference: Record, tolerance: float = TOLERANCE) -> None:
    """Every rank saw what the reference saw."""
    for rank, seen in enumerate(found):
        for what, far in differences(seen, reference):
            assert far < tolerance, f"rank {rank}, {what}"


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps that a run's folder holds, ascending."""
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))
