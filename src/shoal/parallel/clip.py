"""One gradient norm for every layout, each parameter counted once."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.parallel.parts import Part, local_of, num_copies
from shoal.world import World


def dense(grad: Tensor) -> Tensor:
    """The gradient itself, of a sparse one its rows, of a sharded one this rank's."""
    grad = local_of(grad)
    # A sparse gradient lists a row once per use; the rows must be added before they are squared.
    return grad.coalesce().values() if grad.is_sparse else grad


def gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that exist, as dense tensors that share their memory (sparse: their rows)."""
    return [dense(p.grad) for p in params if p.grad is not None]


def grad_norm(params: Mapping[str, nn.Parameter], parts: Mapping[str, Part], world: World) -> Tensor:
    """The 2-norm over all gradients, 0-dim, equal on every rank; one small collective where any is cut.

    A gradient that is whole counts in full. Of one that is cut each rank adds the squares of what it holds, divided
    by the number of ranks that hold the same, so that over the world each element counts once.
    """
    cut = {name: parts[name] for name in params if name in parts and not parts[name].is_whole}
    whole = gradients(param for name, param in params.items() if name not in cut)
    norm = torch.nn.utils.get_total_norm(whole) if whole else torch.zeros((), device=world.device)
    if not cut or world.kind == "lone":
        return norm
    squares = torch.zeros((), dtype=torch.float64, device=world.device)
    by_axes: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for name, part in cut.items():
        if not part.is_copy:
            by_axes.setdefault(part.axes, []).append(params[name])
    for axes, ours in by_axes.items():
        copies = num_copies(axes, world)
        if held := gradients(ours):
            squares += torch.nn.utils.get_total_norm(held).double() ** 2 / copies
    if world.kind == "real":
        dist.all_reduce(squares, group=world.side_group)
    return (norm.double() ** 2 + squares).sqrt()


def scale_gradients(params: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient in place by a 0-dim factor."""
    grads = [local_of(p.grad) for p in params if p.grad is not None]
    sparse = [grad for grad in grads if grad.is_sparse]
    dense = [grad for grad in grads if not grad.is_sparse]
    if dense:
        torch._foreach_mul_(dense, factor.to(dense[0].device))
    for grad in sparse:
        grad.mul_(factor)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What clipping multiplies gradients with, as torch.nn.utils.clip_grad_norm_ defines it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
