"""One gradient norm for every layout, each parameter counted once."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def dense(grad: Tensor) -> Tensor:
    """The gradient itself, or the rows of a sparse one."""
    # A sparse gradient lists a row once per use; the rows must be added before they are squared.
    return grad.coalesce().values() if grad.is_sparse else grad


def gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that exist, as dense tensors that share their memory (sparse: their rows)."""
    return [dense(p.grad) for p in params if p.grad is not None]


def grad_norm(params: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm over all gradients, 0-dim. Data-parallel gradients are equal on every rank: nothing is sent."""
    grads = gradients(params)
    if not grads:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm(grads)


def scale_gradients(params: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient in place by a 0-dim factor."""
    grads = [p.grad for p in params if p.grad is not None]
    sparse = [grad for grad in grads if grad.is_sparse]
    dense = [grad for grad in grads if not grad.is_sparse]
    if dense:
        torch._foreach_mul_(dense, factor.to(dense[0].device))
    for grad in sparse:
        grad.mul_(factor)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What clipping multiplies gradients with, as torch.nn.utils.clip_grad_norm_ defines it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Clip the gradients of a placed model by their global norm, and return the norm before."""
    params = list(model.parameters())
    norm = grad_norm(params)
    scale_gradients(params, clip_factor(norm, max_norm))
    return norm
