"""A look at a model in evaluation mode that leaves no trace."""

import contextlib
from collections.abc import Iterator

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
    """Evaluation mode, every module called; buffers, renormalised tables and random numbers are as before after it."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is not None]
    before = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *tables)]
    state = torch.get_rng_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it skips modules, and gives nested tensors to others
    try:
        with evaluating(model):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_rng_state(state)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
