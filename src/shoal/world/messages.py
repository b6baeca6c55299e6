"""Every message that Python asks for or waits for, noted in the record and the ledger of its process, whoever sent it.

What DDP's reducer waits for in C++ it cannot see: `parallel/replicate.py` notes that.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.calls import Channel, Ledger
from shoal.mesh import Mesh
from shoal.record import Record
from shoal.world.signature import describe, signature_of

if TYPE_CHECKING:
    import torch.distributed as dist

# The methods of a process group, and what they are called elsewhere; those that this torch does not have are left out.
OPERATIONS = {
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "all_to_all_single": "all_to_all",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "recv": "recv",
    "recv_anysource": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "scatter": "scatter",
    "send": "send",
}
_TO_ONE = ("send", "recv")
_GRADIENTS = "all_reduce of the gradients (DDP)"
_MOST_KEPT = 1024  # works that nobody has waited for yet

Method = Callable[..., Any]
Packed = tuple[bytes, bytes, bytes, int]  # as `Record.enter` takes it


@contextlib.contextmanager
def noting(record: Record, ledger: Ledger, mesh: Mesh, rank: int) -> "Iterator[Noted]":
    """Within: messages of this rank are noted."""
    noted = Noted(record, ledger, mesh, rank)
    with seen(noted.asking, noted.waiting):
        yield noted


@contextlib.contextmanager
def seen(asking: Callable[[Method, str], Method], waiting: Callable[[Method], Method]) -> Iterator[None]:
    """Within: what Python asks process groups for, and waits for, goes through these.

    Args:
        asking: given a method of a process group and its operation, what takes its place.
        waiting: the same for `Work.wait`.
    """
    import torch.distributed as dist

    group, work = dist.ProcessGroup, dist.Work
    # From the class's own table: what `getattr` gives would not be bound to an object when it is put back.
    kept = {name: vars(group)[name] for name in OPERATIONS if name in vars(group)}
    wait = vars(work)["wait"]
    for name in kept:
        setattr(group, name, asking(getattr(group, name), OPERATIONS[name]))
    work.wait = waiting(work.wait)  # type: ignore[method-assign]
    try:
        yield
    finally:
        work.wait = wait  # type: ignore[method-assign]
        for name, method in kept.items():
            setattr(group, name, method)


def group_label(ranks: Sequence[int], name: str) -> bytes:
    """Who is in a group, and which of theirs it is: `0..6x4 17`; two groups of the same ranks begin alike."""
    return f"{min(ranks)}..{max(ranks)}x{len(ranks)} {name[-8:]}".encode()[:24]


class Noted:
    """Notes the messages of one rank in one world."""

    def __init__(self, record: Record, ledger: Ledger, mesh: Mesh, rank: int) -> None:
        self.ledger = ledger
        self._record, self._mesh, self._rank = record, mesh, rank
        self._groups: dict[str, _Group] = {}
        self._on_their_way: dict[int, Packed] = {}  # works by id

    def asking(self, method: Callable[..., Any], operation: str) -> Callable[..., Any]:
        """A method of a group, noted while it runs."""
        record, ledger, packed, counts = self._record, self.ledger, operation.encode(), operation not in _TO_ONE
        name = method.__name__
        signature = signature_of(name, operation)

        @functools.wraps(method)
        def asked(group: "dist.ProcessGroup", *args: Any, **kwargs: Any) -> Any:
            found = self._group(group)
            message = found.message(packed, counts=counts)
            record.enter(message)
            channel = found.channel if counts else found.to_one(name, args)
            if channel is not None:
                ledger.note(channel, signature(args, kwargs), describe)
            try:
                work = method(group, *args, **kwargs)
            except BaseException:
                record.broke()
                raise
            record.asked()
            if len(self._on_their_way) >= _MOST_KEPT:
                self._on_their_way.clear()
            self._on_their_way[id(work)] = message
            return work

        return asked

    def waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`Work.wait`, noted while it runs."""
        record, on_their_way = self._record, self._on_their_way

        @functools.wraps(wait)
        def waited(work: "dist.Work", *args: Any, **kwargs: Any) -> Any:
            message = on_their_way.pop(id(work), None)
            if message is None:
                return wait(work, *args, **kwargs)
            record.enter(message)
            try:
                done = wait(work, *args, **kwargs)
            except BaseException:
                record.broke()
                raise
            record.leave()
            return done

        return waited

    def gradients(self, group: "dist.ProcessGroup") -> None:
        """The next backward adds them up over this group, in C++, where nobody sees the call."""
        self.ledger.note(self._group(group).channel, _GRADIENTS)

    def _group(self, group: "dist.ProcessGroup") -> "_Group":
        name = group.group_name
        found = self._groups.get(name)
        if found is None:
            import torch.distributed as dist

            ranks = dist.get_process_group_ranks(group)
            axis = self._mesh.axis_of(self._rank, ranks)
            found = self._groups[name] = _Group(axis, ranks, name, ranks.index(self._rank), self.ledger)
        return found


class _Group:
    def __init__(self, axis: str, ranks: Sequence[int], name: str, index: int, ledger: Ledger) -> None:
        label = group_label(ranks, name)
        self._axis, self._label, self._number = axis.encode(), label, 0
        self._ranks, self._name, self._index, self._ledger = ranks, name, index, ledger
        self.channel = ledger.channel(label, index, len(ranks))
        self._to_one: dict[tuple[str, int, int], Channel] = {}

    def message(self, operation: bytes, *, counts: bool) -> Packed:
        """The next one; `counts`: the other members count it too."""
        self._number += counts
        return operation, self._axis, self._label, self._number if counts else 0

    def to_one(self, method: str, args: Sequence[Any]) -> Channel | None:
        """Of messages from one rank to one: both note them alike. None where the sender may be anybody."""
        if method not in ("send", "recv"):
            return None
        peer, tag = args[1:3]
        found = self._to_one.get((method, peer, tag))
        if found is None:
            ends = (self._index, peer) if method == "send" else (peer, self._index)
            sender, receiver = (self._ranks[index] for index in ends)
            label = f"{sender}>{receiver} {self._name[-8:]} {tag}".encode()[:24]
            found = self._to_one[method, peer, tag] = self._ledger.channel(label, 0, 0)
        return found
