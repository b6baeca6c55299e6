"""Which part of each parameter a rank holds: the one record that checkpoints, norms and verification read.

A part is a set of boxes. Rows 2..3 of a (4, 6) matrix that tp2 has cut by columns, on the rank of the second half:

    whole, 4 x 6     . . . . . .
                     . . . . . .
                     . . . # # #       one box: local (0, 0), whole (2, 3), size (2, 3)
                     . . . # # #

A fused q, k, v matrix that is cut by heads has three boxes: the rank's rows of q, of k and of v.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.world import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_KEY = "_shoal_parts"


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: where it begins in this rank's tensor and in the whole one, and its extent."""

    local: tuple[int, ...]
    whole: tuple[int, ...]
    size: tuple[int, ...]

    def local_index(self) -> tuple[slice, ...]:
        """To index this rank's tensor with."""
        return tuple(slice(at, at + n) for at, n in zip(self.local, self.size, strict=True))

    def whole_index(self) -> tuple[slice, ...]:
        """To index the whole tensor with."""
        return tuple(slice(at, at + n) for at, n in zip(self.whole, self.size, strict=True))


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of one tensor.

    Attributes:
        shape: of the whole tensor.
        boxes: what this rank holds, in its own tensor and in the whole.
        axes: on which ranks hold different parts; on every other axis they hold the same.
        is_copy: another rank along these axes holds the same and stands for it: a weight that two stages share.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    axes: tuple[str, ...] = ()
    is_copy: bool = False

    @staticmethod
    def whole(shape: Sequence[int]) -> "Part":
        """All of it, as every rank has it."""
        zero = (0,) * len(shape)
        return Part(tuple(shape), (Box(zero, zero, tuple(shape)),))

    @property
    def is_whole(self) -> bool:
        """Nothing is cut: every rank holds all of it."""
        return not self.axes

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's tensor."""
        if not self.boxes:
            return (0, *self.shape[1:])
        ends = [[at + n for at, n in zip(box.local, box.size, strict=True)] for box in self.boxes]
        return tuple(map(max, zip(*ends, strict=True)))

    def take(self, dim: int, spans: Iterable[tuple[int, int]], axis: str) -> "Part":
        """The part that is left of this one, of these spans (start, stop) of its own dim, laid side by side."""
        boxes, at = [], 0
        for start, stop in spans:
            boxes += [cut for box in self.boxes for cut in _intersect(box, dim, start, stop, at - start)]
            at += stop - start
        if not boxes:
            # Nothing, of the shape that the other dims have.
            boxes = [replace(box, local=_with(box.local, dim, 0), size=_with(box.size, dim, 0)) for box in self.boxes]
        return replace(self, boxes=tuple(boxes), axes=(*self.axes, axis))


def _intersect(box: Box, dim: int, start: int, stop: int, shift: int) -> list[Box]:
    low, high = max(box.local[dim], start), min(box.local[dim] + box.size[dim], stop)
    if low >= high:
        return []
    inside = low - box.local[dim]
    whole = _with(box.whole, dim, box.whole[dim] + inside)
    return [Box(_with(box.local, dim, low + shift), whole, _with(box.size, dim, high - low))]


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def is_sharded(tensor: Tensor) -> TypeGuard["DTensor"]:
    """Whether it is a DTensor; asked so, since importing that class costs every start half a second."""
    return hasattr(tensor, "to_local")


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def cut(whole: Tensor, part: Part) -> Tensor:
    """This rank's part of a whole tensor; the tensor itself where nothing is cut."""
    if part.is_whole:
        return whole
    local = whole.new_empty(part.local_shape)
    for box in part.boxes:
        local[box.local_index()] = whole[box.whole_index()]
    return local


def paste(whole: Tensor, local: Tensor, part: Part) -> None:
    """Put this rank's part at its place in a whole tensor."""
    for box in part.boxes:
        whole[box.whole_index()] = local[box.local_index()]


def gather_whole(held: Mapping[str, Tensor], parts: Mapping[str, Part], world: World) -> dict[str, Tensor]:
    """Whole tensors, on every rank, bit for bit; for tests, and for small ones.

    Collective: one message for each set of axes that any are cut over.
    """
    found = {name: local.detach().clone() for name, local in held.items()}
    cuts: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for name, local in found.items() if world.kind == "real" else ():
        part = parts[name]
        if part.is_whole:
            continue
        whole = cuts.setdefault(part.axes, {})[name] = torch.zeros(part.shape, dtype=local.dtype, device=local.device)
        if not part.is_copy:
            paste(whole, local, part)
    for axes, wholes in cuts.items():
        # Sums of one part and zeros: exact, except that -0.0 would come back as 0.0; so the bytes are summed.
        raw, end = torch.cat([_bytes(whole) for whole in wholes.values()]), 0
        dist.all_reduce(raw, group=world.axis_group(*axes))
        for whole in wholes.values():
            begin, end = end, end + whole.nbytes
            _bytes(whole).copy_(raw[begin:end])
        found |= wholes
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """Of its own memory."""
    flat = tensor.view(-1)
    return flat.view(torch.uint8) if len(flat) else flat.new_empty(0, dtype=torch.uint8)


def num_copies(axes: Sequence[str], world: World) -> int:
    """How many ranks hold the same part of what is cut over these axes."""
    return world.size // len(world.mesh.group(world.rank, axes)) if axes else world.size


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Of every tensor in `model.state_dict()`: what this rank holds of it; whole where nothing was cut."""
    known = model.__dict__.get(_KEY, {})
    return {
        name: known.get(name) or Part.whole(tensor.shape)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }


def keep_parts(model: nn.Module, parts: dict[str, Part]) -> None:
    """Remember what was cut, beside the model's parameters and never among them."""
    model.__dict__[_KEY] = parts
