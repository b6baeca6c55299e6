"""One training recorded in any layout, and the comparison of two: every loss, gradient, weight and figure."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from ranks import run_processes
from torch import Tensor

from shoal.job import Job
from shoal.layout import Layout
from shoal.run import Run, assemble
from shoal.world import Place, World

TOLERANCE = 1e-10


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
            seen.grads.append(
                {n: None if p.grad is None else p.grad.to_dense().clone() for n, p in run.model.named_parameters()}
            )
        seen.evaluation = run.evaluate()
        seen.state = {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}
    finally:
        run.close()
    seen.notes = run.recorder.notes
    return seen


def distance(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius distance."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    scale = max(float(a.to(wide).norm()), float(b.to(wide).norm()))
    return float((a.to(wide) - b.to(wide)).norm()) / scale if scale else 0.0


def assert_same_training(found: list[Record], reference: Record, tolerance: float = TOLERANCE) -> None:
    """Every rank saw what the reference saw."""
    assert reference.losses, "the reference trained nothing"
    for rank, seen in enumerate(found):
        where = f"rank {rank}"
        assert seen.losses == _close(reference.losses, tolerance), where
        assert seen.norms == _close(reference.norms, tolerance), where
        assert seen.lrs == reference.lrs, where
        for step, (grads, expected) in enumerate(zip(seen.grads, reference.grads, strict=True)):
            for name, grad in grads.items():
                assert (grad is None) == (expected[name] is None), f"{where}, step {step}: {name} is None"
                if grad is not None:
                    assert distance(grad, expected[name]) < tolerance, f"{where}, step {step}: gradient of {name}"
        assert seen.state.keys() == reference.state.keys()
        for name, tensor in seen.state.items():
            assert distance(tensor, reference.state[name]) < tolerance, f"{where}: {name}"
        assert seen.evaluation.keys() == reference.evaluation.keys()
        for name, figure in seen.evaluation.items():
            assert distance(figure, reference.evaluation[name]) < tolerance, f"{where}: {name}"


def _close(values: list[float], tolerance: float) -> Any:
    import pytest

    return pytest.approx(values, rel=tolerance, abs=1e-14)


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps that a run's folder holds, ascending."""
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))
