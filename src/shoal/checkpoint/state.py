"""What a checkpoint holds of a run, by name, so that another layout (or an edited model) cannot mix things up."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError
from shoal.job import Scheduler

# How an update is computed, not what: decided anew by the machine that resumes.
_ENGINE = {"fused", "foreach", "capturable", "differentiable"}


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    scaler: torch.amp.GradScaler | None,
) -> dict[str, Any]:
    """The state as a tree of names; tensors are the live ones, not copies."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [
        {
            "params": [names[id(param)] for param in group["params"]],
            "values": {k: v for k, v in group.items() if k not in ("params", "param_names") and k not in _ENGINE},
        }
        for group in optimizer.param_groups
    ]
    return {
        "model": model.state_dict(),
        "optimizer": {
            "state": {names[id(param)]: dict(state) for param, state in optimizer.state.items()},
            "groups": groups,
        },
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "scaler": scaler.state_dict() if scaler is not None else None,
    }


def restore(
    tree: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Put a captured state back, in place.

    Raises:
        CheckpointError: names, shapes or dtypes differ; nothing was changed.
    """
    _check_model(tree["model"], model)
    _check_groups(tree["optimizer"]["groups"], model, optimizer)
    _check_schedule(tree["scheduler"], scheduler)
    model.load_state_dict(dict(tree["model"]))
    _restore_optimizer(tree["optimizer"], model, optimizer)
    if scheduler is not None and tree["scheduler"] is not None:
        scheduler.load_state_dict(tree["scheduler"])
    if scaler is not None and tree["scaler"]:
        scaler.load_state_dict(tree["scaler"])


def _check_model(saved: Mapping[str, Any], model: nn.Module) -> None:
    own = model.state_dict()
    missing, extra = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
    if missing or extra:
        raise CheckpointError(
            f"the checkpoint is of another model: it lacks {missing[:5]} and has {extra[:5]} that this model lacks."
        )
    for name, tensor in own.items():
        if isinstance(tensor, Tensor) and (tensor.shape, tensor.dtype) != (
            saved[name].shape,
            saved[name].dtype,
        ):
            raise CheckpointError(
                f"{name} is {tuple(saved[name].shape)} {saved[name].dtype} in the checkpoint, "
                f"{tuple(tensor.shape)} {tensor.dtype} in the model."
            )


def _check_groups(saved: list[dict[str, Any]], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {id(param): name for name, param in model.named_parameters()}
    own = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    if own != [group["params"] for group in saved]:
        raise CheckpointError(
            f"the optimizer's parameter groups differ: {[len(g['params']) for g in saved]} parameters in the "
            f"checkpoint, {list(map(len, own))} now, or in another order."
        )


# How far a schedule has come; all else in its state says what schedule it is.
_PROGRESS = {"last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step", "_initial_step"}


def _check_schedule(saved: Mapping[str, Any] | None, scheduler: Scheduler | None) -> None:
    """The schedule as the job builds it now is the one that was saved; one made for another number of steps is not."""
    if saved is None or scheduler is None:
        return
    before, now = _constants(saved), _constants(scheduler.state_dict())
    differ = [f"{name}: saved {before[name]!r}, now {now[name]!r}" for name in before if before[name] != now.get(name)]
    if differ:
        raise CheckpointError(
            f"the learning-rate schedule of the checkpoint is another one ({'; '.join(differ[:3])}). A schedule made "
            "for a number of steps cannot go on to more: the run would not be the one that was never interrupted. "
            "Resume with the steps that it was made for, or start afresh."
        )


def _constants(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if key == "_schedulers" and isinstance(value, list):
            for index, inner in enumerate(value):
                found |= _constants(inner, f"{name}[{index}].")
        elif key not in _PROGRESS and isinstance(value, int | float | str | list | tuple):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _restore_optimizer(saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    params = dict(model.named_parameters())
    optimizer.state.clear()
    for name, state in saved["state"].items():
        param = params[name]
        optimizer.state[param] = {
            key: _to(param, value) if isinstance(value, Tensor) else value for key, value in state.items()
        }
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(values["values"])


def _to(param: Tensor, value: Tensor) -> Tensor:
    # A step counter stays on the host unless the engine wants it beside the parameter; moments go there.
    return value.clone() if value.dim() == 0 and not param.is_cuda else value.to(param.device, copy=True)
