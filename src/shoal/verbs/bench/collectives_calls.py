"""The operations of `shoal bench collectives`: how each is called, and what must come of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# As the sharded trainings do, in one tensor; torch 2.13 has renamed both.
_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A group as one of its ranks sees it, and memory to send from and to receive in."""

    group: "dist.ProcessGroup | None"
    members: Sequence[int]
    me: int  # index among the members
    own: Tensor
    other: Tensor

    def count(self, size_bytes: int) -> int:
        """Float32 values of a buffer of about that size that divides among the members."""
        return max(1, size_bytes // 4 // len(self.members)) * len(self.members)


@dataclass(frozen=True)
class Prepared:
    """A call that can be made again and again, and where its result lies."""

    call: Callable[[], object]
    result: Tensor


def _all_reduce(wire: Wire, count: int) -> Prepared:
    whole = wire.own[:count]
    return Prepared(lambda: dist.all_reduce(whole, group=wire.group), whole)


def _all_gather(wire: Wire, count: int) -> Prepared:
    whole, part = wire.other[:count], wire.own[: count // len(wire.members)]
    return Prepared(lambda: _gather_single(whole, part, group=wire.group), whole)


def _reduce_scatter(wire: Wire, count: int) -> Prepared:
    whole, part = wire.own[:count], wire.other[: count // len(wire.members)]
    return Prepared(lambda: _scatter_single(part, whole, group=wire.group), part)


def _broadcast(wire: Wire, count: int) -> Prepared:
    whole = wire.own[:count]
    return Prepared(lambda: dist.broadcast(whole, src=wire.members[0], group=wire.group), whole)


def _all_to_all(wire: Wire, count: int) -> Prepared:
    sent, received = wire.own[:count], wire.other[:count]
    return Prepared(lambda: dist.all_to_all_single(received, sent, group=wire.group), received)


def _send_recv(wire: Wire, count: int) -> Prepared:
    """There and back between members 0 and 1, 2 and 3, ...; an odd one out has nothing to do."""
    own, other, partner = wire.own[:count], wire.other[:count], wire.me ^ 1
    if partner >= len(wire.members):
        return Prepared(lambda: None, own)
    peer = wire.members[partner]

    def there_and_back() -> None:
        if wire.me < partner:
            dist.send(own, peer, group=wire.group)
        dist.recv(other, peer, group=wire.group)
        if wire.me > partner:
            dist.send(own, peer, group=wire.group)

    return Prepared(there_and_back, other)


PREPARE: Mapping[str, Callable[[Wire, int], Prepared]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}
"""How each is called on a number of float32 values."""

EXPECT: Mapping[str, Callable[[list[Tensor], int], Tensor]] = {
    "all_reduce": lambda had, _: sum(had[1:], had[0]),
    "all_gather": lambda had, _: torch.cat([values.chunk(len(had))[0] for values in had]),
    "reduce_scatter": lambda had, me: sum(had[1:], had[0]).chunk(len(had))[me],
    "broadcast": lambda had, _: had[0],
    "all_to_all": lambda had, me: torch.cat([values.chunk(len(had))[me] for values in had]),
    "send_recv": lambda had, me: had[me ^ 1] if me ^ 1 < len(had) else had[me],
}
"""What must come of it, given what each member had, and who asks."""
