"""What proofs on copies share: how wide they compute, copies that hide nothing, and when two answers are the same."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.dry import convert, is_equal


class Width(NamedTuple):
    """In which a trial computes, and how far two answers may be apart; a wrong cut is wrong by a part of the whole."""

    dtype: torch.dtype
    relative: float
    absolute: float  # of what is zero but for rounding


# float32 where a model has tensors or kernels that are float32 whatever it is told. Narrower would hide mistakes.
WIDTHS = (Width(torch.float64, 1e-9, 1e-12), Width(torch.float32, 1e-4, 1e-5))


def is_close(ours: Tensor | None, theirs: Tensor | None, width: Width) -> bool:
    """Whether two answers are the same but for rounding."""
    if ours is None or theirs is None:
        return ours is theirs
    if ours.shape != theirs.shape:
        return False
    # Masks fill with -inf or the lowest number; both are equal or they are not.
    finite = theirs.abs() < 1e30
    if not torch.equal(finite, ours.abs() < 1e30):
        return False
    error = torch.linalg.vector_norm((ours - theirs)[finite])
    return bool(error <= width.relative * torch.linalg.vector_norm(theirs[finite]) + width.absolute)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors of a structure, with those in dataclasses."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, each.name) for each in dataclasses.fields(leaf)])


def moved(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A wide copy, evaluating, no parameter zero or one: what starts at zero would hide a mistake."""
    made = widened(module, dtype).eval()
    for part in made.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in made.parameters():
            if param.is_floating_point():
                noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.add_((0.02 * noise).to(param))
                param.requires_grad_(True)
            param.grad = None
    return made


def widened(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of that dtype."""
    copied = copy.deepcopy(module)
    convert(copied, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return copied


def wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A leaf of that dtype, trained as the tensor is."""
    made = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
    return made.requires_grad_(tensor.requires_grad)


def weights(output: Tensor) -> Tensor:
    """Of a sum over an output, so that every element of it counts, differently."""
    generator = torch.Generator().manual_seed(output.numel())
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


def draws(module: nn.Module, calls: Sequence[tuple[Any, Any]], *, in_training: bool = True) -> bool:
    """Whether a forward moves the random stream."""
    probe = copy.deepcopy(module).train(in_training)
    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    stream: Any = torch.cuda if device.type == "cuda" else torch
    state = stream.get_rng_state()
    with torch.no_grad():
        for args, kwargs in copy.deepcopy(calls):
            probe(*args, **kwargs)
    has_moved = not is_equal(state, stream.get_rng_state())
    stream.set_rng_state(state)
    return has_moved
