"""What a checkpoint holds of a run, by name, so that another layout (or an edited model) cannot mix things up."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.pack import Leaf, Shard, in_pairs
from shoal.checkpoint.tensorfile import dtype_of
from shoal.errors import CheckpointError
from shoal.job import Scheduler
from shoal.parallel.parts import Part, is_sharded, local_of, parts_of

# How an update is computed, not what: decided anew by the machine that resumes.
_ENGINE = {"fused", "foreach", "capturable", "differentiable"}

_Facts = dict[str, tuple[tuple[int, ...], torch.dtype]]


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    scaler: torch.amp.GradScaler | None,
    *,
    state_parts: Mapping[str, Part] | None = None,
) -> dict[str, Any]:
    """The state as a tree of names; tensors are the live ones of this rank, not copies.

    Args:
        state_parts: what this rank holds of the optimizer state of each parameter, where that is not as of the
            parameter itself. Of what is not in it this rank holds none; an axis on which only some ranks hold any is
            among the part's axes.

    Raises:
        CheckpointError: optimizer state of which nobody can say what part of a whole it is.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [
        {
            "params": [names[id(param)] for param in group["params"]],
            "values": {k: v for k, v in group.items() if k not in ("params", "param_names") and k not in _ENGINE},
        }
        for group in optimizer.param_groups
    ]
    parts = parts_of(model)
    return {
        "model": _capture_model(model, parts),
        "optimizer": {"state": _capture_state(model, optimizer, parts, state_parts), "groups": groups},
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "scaler": scaler.state_dict() if scaler is not None else None,
    }


def _capture_model(model: nn.Module, parts: Mapping[str, Part]) -> OrderedDict[str, Any]:
    leaves: dict[int, Tensor | Shard] = {}  # tied names share one

    def leaf(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return leaves.setdefault(id(value), _leaf(value, parts[name]))

    return OrderedDict((name, leaf(name, value)) for name, value in model.state_dict(keep_vars=True).items())


def _leaf(tensor: Tensor, part: Part) -> Tensor | Shard:
    local = local_of(tensor.detach())
    return local if part.is_whole else Shard(local, part)


def _capture_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, Part],
    state_parts: Mapping[str, Part] | None,
) -> dict[str, dict[str, Any]]:
    params = dict(model.named_parameters())
    if set(optimizer.state) - set(params.values()):
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps state that belongs to no parameter of the model, so that it has no name "
            "to be found by. Keep it in the parameter groups, or under a parameter."
        )
    held = {}
    for name, param in params.items():
        state_part = (parts if state_parts is None else state_parts).get(name)
        if param in optimizer.state and state_part is not None:
            held[name] = {
                key: _state_leaf(f"{name}: {key}", value, param, parts[name], state_part)
                for key, value in optimizer.state[param].items()
            }
    return held


def _state_leaf(what: str, value: Any, param: nn.Parameter, part: Part, state_part: Part) -> Any:
    """A tensor of the parameter's shape is cut as the parameter is; a counter is whole; of others nobody can tell."""
    if not isinstance(value, Tensor):
        return value
    some = tuple(axis for axis in state_part.axes if axis not in part.axes)  # where only some ranks hold it
    local = local_of(value)
    if value.dim() and local.shape == state_part.local_shape and is_sharded(value) == is_sharded(param):
        return _leaf(value, state_part)
    if value.dim() and not part.is_whole:
        raise CheckpointError(_uncut(what, value.shape, part))
    return _leaf(value, replace(Part.whole(value.shape), axes=some))


def _uncut(what: str, shape: tuple[int, ...], part: Part) -> str:
    return (
        f"the optimizer state of {what} has shape {list(shape)}; the parameter, of shape {list(part.shape)}, is cut "
        f"over {', '.join(part.axes)}, and nobody can say what part of a whole that is. State of the parameter's shape "
        "and counters can be cut with it. Take another optimizer, or a layout that keeps this parameter whole (dpN)."
    )


def reading_plan(
    manifest: Manifest,
    model: nn.Module,
    *,
    state_parts: Mapping[str, Part] | None = None,
) -> dict[str, Part | None]:
    """What this rank needs of a captured state: by the name of a tensor in the checkpoint its part, None for nothing.

    Args:
        state_parts: as in `capture`, of the layout that is to go on.

    Raises:
        CheckpointError: names, whole shapes or dtypes differ, or state that this layout cannot cut. Nothing was read.
    """
    parts = parts_of(model)
    tree, own = manifest.outline(), _facts(model, parts)
    _check_model(tree["model"], _saved_facts(manifest, tree["model"]), set(model.state_dict(keep_vars=True)), own)
    foreign = [name for name in tree["optimizer"]["state"] if name not in own]
    if foreign:
        raise CheckpointError(f"the checkpoint holds optimizer state of {foreign[0]!r}, which is not in this model.")
    plan: dict[str, Part | None] = {}
    for name, part in parts.items():
        _choose(plan, tree["model"][name], part)
    for name, state in tree["optimizer"]["state"].items():
        part, state_part = parts[name], (parts if state_parts is None else state_parts).get(name)
        for key, (shape, _) in _saved_facts(manifest, state).items():
            if state_part is None or shape == part.shape:
                _choose(plan, state[key], state_part)
            elif shape and not part.is_whole:
                raise CheckpointError(_uncut(f"{name}: {key}", shape, part))
    return plan


def _choose(plan: dict[str, Part | None], leaf: Leaf, part: Part | None) -> None:
    chosen = in_pairs(part) if leaf.complex and part is not None else part
    if plan.setdefault(leaf.name, chosen) != chosen:
        raise CheckpointError(f"{leaf.name} is one tensor under two names, which this layout cuts in two ways.")


def restore(
    tree: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    scaler: torch.amp.GradScaler | None,
    *,
    state_parts: Mapping[str, Part] | None = None,
) -> None:
    """Put a captured state back, in place: each tensor is what this rank holds of it.

    Args:
        state_parts: as in `capture`.

    Raises:
        CheckpointError: names, shapes or dtypes differ; nothing was changed.
    """
    own = model.state_dict(keep_vars=True)
    saved = {name: (tuple(v.shape), v.dtype) for name, v in tree["model"].items() if isinstance(v, Tensor)}
    _check_model(tree["model"], saved, set(own), _facts(model, {}))
    _check_groups(tree["optimizer"]["groups"], model, optimizer)
    _check_schedule(tree["scheduler"], scheduler)
    _restore_model(tree["model"], model, own)
    _restore_optimizer(tree["optimizer"], model, optimizer, state_parts)
    if scheduler is not None and tree["scheduler"] is not None:
        scheduler.load_state_dict(tree["scheduler"])
    if scaler is not None and tree["scaler"]:
        scaler.load_state_dict(tree["scaler"])


def _facts(model: nn.Module, parts: Mapping[str, Part]) -> _Facts:
    """Shapes and dtypes of the model's tensors: whole ones, where parts are given."""
    return {
        name: (parts[name].shape if name in parts else tuple(local_of(value.detach()).shape), value.dtype)
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }


def _saved_facts(manifest: Manifest, leaves: Mapping[str, Any]) -> _Facts:
    found = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, Leaf):
            entry = manifest.tensors[leaf.name]
            dtype = dtype_of(entry.dtype)
            found[name] = (entry.shape[:-1], dtype.to_complex()) if leaf.complex else (entry.shape, dtype)
    return found


def _check_model(tree: Mapping[str, Any], saved: _Facts, names: set[str], own: _Facts) -> None:
    missing, extra = sorted(names - set(tree)), sorted(set(tree) - names)
    if missing or extra:
        raise CheckpointError(
            f"the checkpoint is of another model: it lacks {missing[:5]} and has {extra[:5]} that this model lacks."
        )
    for name, (shape, dtype) in own.items():
        if saved.get(name) != (shape, dtype):
            was = "no tensor" if name not in saved else f"{saved[name][0]} {saved[name][1]}"
            raise CheckpointError(f"{name} is {was} in the checkpoint, {shape} {dtype} in the model.")


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


def _restore_model(tree: Mapping[str, Any], model: nn.Module, own: Mapping[str, Any]) -> None:
    """Shards are filled in place; then the model loads these and all else, as its own hooks want it."""
    values = dict(tree)
    with torch.no_grad():
        for name, value in own.items():
            if is_sharded(value):
                local_of(value.detach()).copy_(values[name])
                values[name] = value
    model.load_state_dict(values)


def _restore_optimizer(
    saved: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_parts: Mapping[str, Part] | None,
) -> None:
    params = dict(model.named_parameters())
    optimizer.state.clear()
    for name, state in saved["state"].items():
        param = params[name]
        if state_parts is None or name in state_parts:
            optimizer.state[param] = {
                key: _to(param, value) if isinstance(value, Tensor) else value for key, value in state.items()
            }
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(values["values"])


def _to(param: Tensor, value: Tensor) -> Tensor:
    # A step counter stays on the host unless the engine wants it beside the parameter; moments go there.
    if value.dim() == 0:
        return value.clone() if not param.is_cuda else value.to(param.device, copy=True)
    if not is_sharded(param):
        return value.to(param.device, copy=True)
    local = value.to(local_of(param.detach()).device, copy=True)
    shape, stride = param.shape, param.stride()
    from torch.distributed.tensor import DTensor  # loaded already, where there is one

    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride)
