"""Who writes what: of the ranks that hold the same part of a tensor exactly one, the bytes spread over them.

A pure function of names, whole shapes and the mesh, so that ranks agree without a word. With `dp2.fsdp2` the
two replicas of each shard take turns:

    fsdp shard      0        1
    replica 0    a.weight  a.weight      each file holds half of what its rank holds
    replica 1    b.weight  b.weight
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from shoal.checkpoint.pack import Shard
from shoal.layout import RANK_AXES
from shoal.mesh import Mesh

# A replica writes when each gets this much: a small state is one file, not one per rank.
_SHARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """What one key of a file holds: a box of the tensor `name`, at `offset` of its whole `shape`."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def pieces_to_write(
    tensors: Mapping[str, Tensor | Shard], mesh: Mesh | None = None, rank: int = 0
) -> dict[str, tuple[Piece, Tensor]]:
    """The pieces that this rank writes, by the key in its file: the tensor's name where that is one piece."""
    own = tensors if mesh is None else {name: tensors[name] for name in _dealt(tensors, mesh, rank)}
    pieces: dict[str, tuple[Piece, Tensor]] = {}
    for name, held in own.items():
        for piece, tensor in _pieces(name, held):
            pieces[_free_key(name, pieces, tensors)] = (piece, tensor)
    return pieces


def _pieces(name: str, held: Tensor | Shard) -> list[tuple[Piece, Tensor]]:
    if isinstance(held, Tensor):
        return [(Piece(name, tuple(held.shape), (0,) * held.dim()), held)]
    shape = held.part.shape
    boxes = [] if held.part.is_copy else [box for box in held.part.boxes if math.prod(box.size) or not math.prod(shape)]
    return [(Piece(name, shape, box.whole), held.local[box.local_index()]) for box in boxes]


def _free_key(name: str, taken: Mapping[str, object], names: Mapping[str, object]) -> str:
    key, count = name, 0
    while key in taken or (key != name and key in names):
        count += 1
        key = f"{name}@{count}"
    return key


def _dealt(tensors: Mapping[str, Tensor | Shard], mesh: Mesh, rank: int) -> list[str]:
    """The names of which this rank, and none of those that hold the same part, is the writer."""
    classes: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for name, held in tensors.items():
        axes = () if isinstance(held, Tensor) else tuple(sorted(held.part.axes))
        classes.setdefault(axes, []).append((-_whole_bytes(held), name))
    return [
        name
        for axes, sized in classes.items()
        for name, replica in _spread(sized, mesh, axes).items()
        if replica == _replica_of(mesh, rank, axes)
    ]


def _whole_bytes(held: Tensor | Shard) -> int:
    if isinstance(held, Tensor):
        return held.numel() * held.itemsize
    return math.prod(held.part.shape) * held.local.itemsize


def _spread(sized: list[tuple[int, str]], mesh: Mesh, axes: tuple[str, ...]) -> dict[str, int]:
    """The largest first, each to the replica that has least."""
    num_shards = math.prod(mesh.sizes[axis] for axis in axes)
    num_shares = -sum(size for size, _ in sized) // (_SHARE_BYTES * num_shards)
    loads = [(0, replica) for replica in range(max(1, min(mesh.size // num_shards, num_shares)))]
    writer = {}
    for size, name in sorted(sized):
        load, writer[name] = loads[0]
        heapq.heapreplace(loads, (load - size, writer[name]))
    return writer


def _replica_of(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> int:
    """The place of a rank among those that hold the same part, outermost axis first."""
    place = 0
    for axis in RANK_AXES:
        if axis not in axes:
            place = place * mesh.sizes[axis] + mesh.coordinate(rank, axis)
    return place
