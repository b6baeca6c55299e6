"""What one rank computes, holds and sends while its code runs, on real tensors or on shapes alone.

One mode sees every operation below autograd: FLOPs by their formulas, memory by the storages that operations make and
Python lets go of, messages by the collectives that it is asked for. Nothing is estimated but what a collective sends,
which is what a ring sends (Patarasuk and Yuan 2009).
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.metrics.flops import FlopCount, FlopMode, namespace_of, packet_of
from shoal.world import World

CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "inputs", "activations")
"""`gathered`: parameters of others, while a block needs them; `inputs`: the batch; `activations`: all else, messages,
scratch."""


@dataclass
class Metered:
    """Of this rank.

    Attributes:
        peak_bytes: by category, at the moment when their sum was largest.
        sent_bytes: by axis, `dp+fsdp` for a group over two.
    """

    flops: FlopCount = field(default_factory=FlopCount)
    live_bytes: Counter[str] = field(default_factory=Counter)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    sent_bytes: Counter[str] = field(default_factory=Counter)

    @property
    def peak_total_bytes(self) -> int:
        """All categories."""
        return sum(self.peak_bytes.values())


@contextlib.contextmanager
def metering(
    world: World, known: dict[str, Iterable[Tensor]], gradients: Callable[[], Iterable[Tensor]]
) -> Iterator[Metered]:
    """Within: everything is counted.

    Args:
        known: by category, tensors that are there already.
        gradients: those that there are at any moment.
    """
    metered = Metered()
    with Meter(world, metered, gradients) as meter:
        for category, tensors in known.items():
            meter.know(category, tensors)
        meter.note_peak()
        yield metered


class Meter(FlopMode):  # type: ignore[no-untyped-call]  # torch's own hook has no types
    """Adds to what was metered; see `metering`."""

    def __init__(self, world: World, metered: Metered, gradients: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(metered.flops)
        self._world, self._metered, self._gradients = world, metered, gradients
        self._held: dict[int, tuple[str, int]] = {}  # storages by address: category, bytes
        self._live_bytes = self._peak_bytes = 0
        self._gathered: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # of fully_shard, which resizes them
        self._axes: dict[tuple[int, ...], str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:
            return out
        if namespace_of(func) in ("c10d", "_c10d_functional"):
            self._count_message(str(packet_of(func)), args)
        elif namespace_of(func) == "fsdp" and str(packet_of(func)) == "fsdp.split_with_sizes_copy":
            for tensor in (kwargs or {})["out"]:
                self._watch(tensor)
        for tensor in _tensors(out):
            self._hold(tensor.untyped_storage(), "activations")
        for address, storage in list(self._gathered.items()):
            self._resize(address, storage())
        if self._live_bytes > self._peak_bytes:
            self.note_peak()
        return out

    # -- memory --------------------------------------------------------------------------------------------

    def know(self, category: str, tensors: Iterable[Tensor]) -> None:
        """These are there, and are of a category."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._hold(storage, category)
            was, size = self._held[storage._cdata]
            if was != category:
                self._held[storage._cdata] = (category, size)
                self._metered.live_bytes[was] -= size
                self._metered.live_bytes[category] += size

    def note_peak(self) -> None:
        """This is the most so far."""
        self.know("gradients", self._gradients())
        self._peak_bytes = self._live_bytes
        self._metered.peak_bytes = {name: self._metered.live_bytes[name] for name in CATEGORIES}

    def _hold(self, storage: torch.UntypedStorage, category: str) -> None:
        address = storage._cdata
        if address in self._held:
            return
        size = storage.nbytes()
        self._held[address] = (category, size)
        self._change(category, size)
        weakref.finalize(storage, self._drop, address).atexit = False

    def _drop(self, address: int) -> None:
        category, size = self._held.pop(address)
        self._gathered.pop(address, None)
        self._change(category, -size)

    def _change(self, category: str, size: int) -> None:
        self._metered.live_bytes[category] += size
        self._live_bytes += size

    def _watch(self, tensor: Tensor) -> None:
        """What fully_shard gathers into: it gives the memory back without an operation."""
        storage = tensor.untyped_storage()
        self.know("gathered", [tensor])
        self._gathered[storage._cdata] = weakref.ref(storage)
        self._resize(storage._cdata, storage)

    def _resize(self, address: int, storage: torch.UntypedStorage | None) -> None:
        if storage is None:
            return
        category, before = self._held[address]
        now = storage.nbytes()
        if now != before:
            self._held[address] = (category, now)
            self._change(category, now - before)

    # -- messages ------------------------------------------------------------------------------------------

    def _count_message(self, name: str, args: Any) -> None:
        sent = _SENT.get(name)
        if sent is None:
            return
        group = _group_of(args)
        ranks = tuple(dist.get_process_group_ranks(group))
        self._metered.sent_bytes[self._axis(ranks)] += int(sent(args, len(ranks)))

    def _axis(self, ranks: tuple[int, ...]) -> str:
        if ranks not in self._axes:
            self._axes[ranks] = axis_of(ranks, self._world)
        return self._axes[ranks]


def axis_of(ranks: tuple[int, ...], world: World) -> str:
    """The axes, joined by +, on which the members of a group around this rank differ."""
    return world.mesh.axis_of(world.rank, ranks)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] if tree is not None else []


def _bytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(tree))


def _group_of(args: Any) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # the other one is the operation to reduce with
                return dist.ProcessGroup.unbox(arg)
    return dist.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined]  # not exported


def _reduced(args: Any, size: int) -> float:
    return 2 * (size - 1) / size * _bytes(args[0])


def _spread(args: Any, size: int) -> float:
    return (size - 1) / size * _bytes(args[0])


def _from_input(args: Any, size: int) -> float:
    return (size - 1) * _bytes(args[1])


def _from_output(args: Any, size: int) -> float:
    return (size - 1) * _bytes(args[0])


# What each of `size` ranks sends, given the arguments of the operation. What arrives was counted where it was sent.
_SENT: dict[str, Callable[[Any, int], float]] = {
    "c10d.send": lambda args, size: _bytes(args[0]),
    "c10d.allreduce_": _reduced,
    "c10d.allreduce_coalesced_": _reduced,
    "_c10d_functional.all_reduce": _reduced,
    "c10d.broadcast_": _spread,
    "_c10d_functional.broadcast": _spread,
    "c10d._allgather_base_": _from_input,
    "c10d.allgather_": _from_input,
    "c10d.allgather_into_tensor_coalesced_": _from_input,
    "_c10d_functional.all_gather_into_tensor": _from_output,  # its first argument is the input
    "c10d._reduce_scatter_base_": _from_output,
    "c10d.reduce_scatter_": _from_output,
    "c10d.reduce_scatter_tensor_coalesced_": _from_output,
    "_c10d_functional.reduce_scatter_tensor": _spread,
    "c10d.alltoall_base_": lambda args, size: _spread(args[1:], size),
    "c10d.alltoall_": lambda args, size: _spread(args[1:], size),
    "_c10d_functional.all_to_all_single": _spread,
}
