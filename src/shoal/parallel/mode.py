"""A look at a model in evaluation mode that leaves no trace."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within: evaluation mode; after it each module is in the mode that it had: a norm that was frozen stays frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


@contextlib.contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, every module called. Afterwards buffers, renormalised tables, random numbers, and what modules
    keep as attributes (a counter, an average) are as before."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is not None]
    before = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *tables)]
    state = torch.get_rng_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it skips modules, and gives nested tensors to others
    try:
        with evaluating(model), _same_attributes(model):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_rng_state(state)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


@contextlib.contextmanager
def _same_attributes(model: nn.Module) -> Iterator[None]:
    """Afterwards each module has the attributes of its own that it had, and lists, dicts and tensors in them hold the
    same."""
    before = [(module, own_attributes(module)) for module in model.modules()]
    held = [(value, copy.copy(value)) for _, own in before for value in own.values() if isinstance(value, list | dict)]
    tensors = [value for _, own in before for value in own.values() if isinstance(value, torch.Tensor)]
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for module, own in before:
            for key in own_attributes(module).keys() - own.keys():
                del module.__dict__[key]
            module.__dict__.update(own)
        for container, content in held:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.detach().copy_(value)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What it keeps besides what every module has."""
    return {key: value for key, value in vars(module).items() if key not in _TORCHS and not key.startswith("_shoal")}


_TORCHS = frozenset(vars(nn.Module()))  # attributes that every module has
