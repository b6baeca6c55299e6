"""Layout x world as named axes: where a rank stands, with whom it forms a group, who its neighbours are.

Pure arithmetic on strides: a query in a world of 100,000 ranks costs what it costs in a world of eight.
The ranks run through the axes with the innermost fastest; here `pp2.dp2.tp2`:

                   tp 0  tp 1
    pp 0   dp 0       0     1
           dp 1       2     3
    pp 1   dp 0       4     5
           dp 1       6     7

`ep` adds no ranks: it cuts the data ranks (dp x fsdp, as one axis) into runs of `ep` that share out the
experts, so it is an axis with the stride of fsdp.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shoal.errors import WorldError, nearest
from shoal.layout import RANK_AXES, Layout

MAX_SHOWN = 8  # ranks of one group in the drawing


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Named axes with their sizes, outermost first; a node holds `ranks_per_node` consecutive ranks.

    Every query that takes an axis takes `ep` too. Built by `Mesh.of`.

    Raises:
        WorldError: in every query, for a rank, a coordinate or an axis that this mesh does not have.
    """

    axes: tuple[tuple[str, int], ...]
    ep: int = 1
    ranks_per_node: int | None = None

    @staticmethod
    def of(layout: Layout, ranks_per_node: int | None = None) -> "Mesh":
        """The mesh that a layout spans, axes of size 1 too; without `ranks_per_node` it lies in one node."""
        if ranks_per_node is not None and ranks_per_node < 1:
            raise WorldError(f"ranks_per_node is {ranks_per_node}; a node holds at least 1 rank.")
        axes = tuple((axis, getattr(layout, axis)) for axis in RANK_AXES)
        return Mesh(axes=axes, ep=layout.ep, ranks_per_node=ranks_per_node)

    @cached_property
    def size(self) -> int:
        """Ranks of the whole world."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The degree of every axis, `ep` included."""
        return {**dict(self.axes), "ep": self.ep}

    @cached_property
    def strides(self) -> dict[str, int]:
        """Ranks from one member of a group to the next, for every axis, `ep` included."""
        strides = {}
        stride = 1
        for axis, size in reversed(self.axes):
            strides[axis] = stride
            stride *= size
        return {**strides, "ep": strides["fsdp"]}

    @property
    def num_data(self) -> int:
        """The degree of data parallelism that loss and data see: dp x fsdp."""
        return self.sizes["dp"] * self.sizes["fsdp"]

    def data_rank(self, rank: int) -> int:
        """Which of the `num_data` slices of the global batch a rank works on."""
        self._check_rank(rank)
        return rank // self.strides["fsdp"] % self.num_data

    def coordinate(self, rank: int, axis: str) -> int:
        """Where a rank stands on one axis."""
        self._check_rank(rank)
        self._check_axis(axis)
        return rank // self.strides[axis] % self.sizes[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis that spans the world (not `ep`); `rank_of` goes back."""
        return {axis: self.coordinate(rank, axis) for axis, _ in self.axes}

    def rank_of(self, **coordinates: int) -> int:
        """The rank at these coordinates; an axis that is not named stands at 0."""
        for axis, place in coordinates.items():
            self._check_axis(axis)
            if axis == "ep":
                raise WorldError("ep follows from dp and fsdp. Name those instead.")
            if not 0 <= place < self.sizes[axis]:
                raise WorldError(f"{axis}={place} is outside the axis {axis}, which runs to {self.sizes[axis] - 1}.")
        return sum(place * self.strides[axis] for axis, place in coordinates.items())

    def group(self, rank: int, axes: str | Iterable[str]) -> Sequence[int]:
        """The ranks, ascending, that differ from `rank` on these axes alone, `rank` included."""
        self._check_rank(rank)
        names = self._axis_names(axes)
        first = rank - sum(self.coordinate(rank, axis) * self.strides[axis] for axis in names)
        return self._members(first, names)

    def axis_of(self, rank: int, ranks: Iterable[int]) -> str:
        """The axes, joined by +, on which the members of a group around `rank` differ; else `other`."""
        members, axes = tuple(sorted(ranks)), [axis for axis, size in self.axes if size > 1]
        for count in range(1, len(axes) + 1):
            for chosen in itertools.combinations(axes, count):
                if tuple(self.group(rank, chosen)) == members:
                    return "+".join(chosen)
        return "other"

    def groups(self, axes: str | Iterable[str]) -> Iterator[Sequence[int]]:
        """All groups over these axes, one after the other: every rank of the world is in exactly one."""
        names = self._axis_names(axes)
        for first in range(self.size):
            if all(first // self.strides[axis] % self.sizes[axis] == 0 for axis in names):
                yield self._members(first, names)

    def neighbours(self, rank: int, axis: str, *, ring: bool = True) -> tuple[int | None, int | None]:
        """The ranks before and after on an axis; at the ends of a line (`ring=False`) there is None."""
        place, size, stride = self.coordinate(rank, axis), self.sizes[axis], self.strides[axis]
        first = rank - place * stride
        before = first + (place - 1) % size * stride if ring or place > 0 else None
        after = first + (place + 1) % size * stride if ring or place < size - 1 else None
        return before, after

    def crosses_nodes(self, axis: str) -> bool:
        """Whether some group of this axis has members on more than one node.

        The groups of an axis interleave in blocks of size x stride ranks, and a border between two nodes
        inside a block parts one of them. So none is parted exactly where all borders fall between blocks.
        """
        self._check_axis(axis)
        if self.ranks_per_node is None or self.ranks_per_node >= self.size or self.sizes[axis] == 1:
            return False
        return self.ranks_per_node % (self.sizes[axis] * self.strides[axis]) != 0

    def __str__(self) -> str:
        used = [axis for axis in self.sizes if self.sizes[axis] > 1]
        lines = ["1 rank" if self.size == 1 else f"{self.size} ranks"]
        return "\n".join(lines + [self._draw(axis) for axis in used])

    def _draw(self, axis: str) -> str:
        group = self.group(0, axis)
        ranks = " ".join(map(str, group[:MAX_SHOWN])) + (f" .. {group[-1]}" if len(group) > MAX_SHOWN else "")
        where = "" if self.ranks_per_node is None else ", across nodes" if self.crosses_nodes(axis) else ", in a node"
        return f"  {axis:<4} {self.sizes[axis]:>6}   rank 0 with {ranks}{where}"

    def _members(self, first: int, names: Sequence[str]) -> Sequence[int]:
        members: Sequence[int] = range(first, first + 1)
        for axis in sorted(names, key=self.strides.__getitem__):
            members = _repeat(members, self.sizes[axis], self.strides[axis])
        return members

    def _axis_names(self, axes: str | Iterable[str]) -> tuple[str, ...]:
        names = (axes,) if isinstance(axes, str) else tuple(dict.fromkeys(axes))
        for axis in names:
            self._check_axis(axis)
        if "ep" in names and not {"dp", "fsdp"}.isdisjoint(names):
            raise WorldError("ep is a part of dp x fsdp. Ask for ep, or for dp and fsdp.")
        return names

    def _check_axis(self, axis: str) -> None:
        if axis not in self.sizes:
            raise WorldError(f"there is no axis {axis!r} in this mesh.{nearest(axis, self.sizes)}")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise WorldError(f"rank {rank} is outside this world of {self.size}; its ranks run to {self.size - 1}.")


def _repeat(members: Sequence[int], size: int, stride: int) -> Sequence[int]:
    """`members`, and their copies at 1, 2, .. size - 1 strides; a range wherever one can say it."""
    if size == 1:
        return members
    if isinstance(members, range) and len(members) == 1:
        return range(members[0], members[0] + size * stride, stride)
    if isinstance(members, range) and len(members) * members.step == stride:
        return range(members[0], members[0] + size * stride, members.step)
    return tuple(itertools.chain.from_iterable((rank + k * stride for rank in members) for k in range(size)))
