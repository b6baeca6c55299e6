"""The job as verification runs it: in another precision, with plain SGD, without evaluation, or one ulp away."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.job import Job, Params, Precision, Scheduler

_LR, _MOMENTUM = 1e-3, 0.9  # small: nothing may diverge, and a wrong gradient shows however small the step
_COMPUTE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def variant(job: Job, *, precision: Precision, sgd: bool = False, nudge: int | None = None) -> Job:
    """The same job with a few of its methods in the place of the user's; class name, fields and file stay.

    Args:
        sgd: plain SGD instead of the job's optimizer and schedule: a gradient that is wrong by a factor shows in
            the weights, where Adam would divide it out.
        nudge: a seed; every weight starts one ulp of the precision up or down.
    """
    changed = replace(job, precision=precision)
    members: dict[str, Any] = {"__slots__": (), "__module__": type(job).__module__, "evaluation": _no_evaluation}
    if sgd:
        members |= {"optimizer": _sgd, "scheduler": _no_schedule}
    if nudge is not None:
        members["model"] = lambda self: nudged(super(cls, self).model(), nudge, _COMPUTE[precision])
    meta: Any = type(type(job))
    cls: Any = meta(type(job).__name__, (type(job),), members)
    cls.__qualname__ = type(job).__qualname__
    object.__setattr__(changed, "__class__", cls)
    return changed


def _no_evaluation(_: Job) -> None:
    return None


def _sgd(_: Job, params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=_LR, momentum=_MOMENTUM)


def _no_schedule(_: Job, optimizer: torch.optim.Optimizer) -> Scheduler | None:
    return None


@torch.no_grad()
def nudged(model: nn.Module, seed: int, dtype: torch.dtype) -> nn.Module:
    """Moves each weight one ulp of `dtype` up or down, in place; zeros stay, since their ulp says nothing."""
    draw = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if param.is_floating_point():
            up = torch.randint(0, 2, param.shape, generator=draw).to(param.device) * 2 - 1
            param.add_(_ulp(param, dtype) * up)
    return model


def _ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance to the next number of `dtype`, at each value."""
    _, exponent = torch.frexp(values)
    ulp = torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps), exponent - 1)
    return torch.where(values == 0, torch.zeros_like(values), ulp)
