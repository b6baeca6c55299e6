"""The ranks that share the work on one tensor, and the four ways in which a tensor passes between them.

              forward      backward
    enter     as it is     sum           from whole to cut: each rank's gradient is a part of the whole
    leave     sum          as it is      from partial sums to whole
    gather    concatenate  cut           from slices of the last dim to whole
    scatter   cut          concatenate   the opposite

The pair enter / leave is Megatron's f and g (Shoeybi et al. 2019, section 3).
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import LayoutError


class Peers:
    """One tensor-parallel group; a copy of a model shares it."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._last: tuple[Tensor, int, Tensor] | None = None  # what was entered last, its version, and what came of it

    def __deepcopy__(self, memo: dict[int, Any]) -> "Peers":
        return self

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all, in a tensor of its own."""
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=self._open())
        return total

    def join(self, tensor: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
        """The slices of all side by side along a dim; `sizes` are theirs."""
        widest = max(sizes)
        own = tensor.contiguous()
        if min(sizes) < widest:  # ranks may hold one column more or less
            own = _widened(tensor, dim, widest)
        slices = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(slices, own, group=self._open())
        return torch.cat([piece.narrow(dim, 0, size) for piece, size in zip(slices, sizes, strict=True)], dim=dim)

    def add_slices(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """This rank's slice along a dim of the sum over all."""
        # Each is sent its slice by all others, and adds up: gloo has no reduce-scatter, and sums everything everywhere.
        sent = torch.stack([_widened(piece, dim, max(sizes)) for piece in torch.split(tensor, list(sizes), dim)])
        slices = torch.empty_like(sent)
        dist.all_to_all_single(slices, sent, group=self._open())
        return slices.sum(dim=0).narrow(dim, 0, sizes[self.rank]).contiguous()

    def enter(self, tensor: Tensor) -> Tensor:
        """Into the cut part of a model; once for q, k and v that follow each other, so that backward sums once."""
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        if tensor.is_leaf or torch.compiler.is_compiling():  # a leaf may be entered again in the next step
            return _Enter.apply(tensor, self)  # type: ignore[no-any-return, no-untyped-call]
        if self._last is None or self._last[0] is not tensor or self._last[1] != tensor._version:
            self._last = (tensor, tensor._version, _Enter.apply(tensor, self))  # type: ignore[no-untyped-call]
        return self._last[2]

    def leave(self, tensor: Tensor) -> Tensor:
        """Out of it: partial sums to the whole."""
        return _Leave.apply(tensor, self)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Slices of the last dim to the whole."""
        return _Gather.apply(tensor, self, tuple(sizes))  # type: ignore[no-any-return, no-untyped-call]

    def scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's slice of the last dim."""
        return _Scatter.apply(tensor, self, tuple(sizes))  # type: ignore[no-any-return, no-untyped-call]

    def _open(self) -> dist.ProcessGroup:
        if self.group is None:
            raise LayoutError(
                "the world of this tensor-parallel model is closed, and each rank holds only its part. Use the model "
                "within `with World.open(...)`, or load its checkpoint into a whole one."
            )
        return self.group


class GivenUpElsewhereError(Exception):
    """Another rank has given this guess up."""


class Trying(Peers):
    """Peers that ask each other before every sum whether all are still there, and whether it is the same sum."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers.group, peers.rank, peers.size)
        self.compares = False  # what is entered, which all must hold alike
        self.parted = False  # they did not

    def enter(self, tensor: Tensor) -> Tensor:
        if self.compares:
            self._same(tensor)
            self.parted = not self.have_same(tensor) or self.parted
        return super().enter(tensor)

    def add(self, tensor: Tensor) -> Tensor:
        self._same(tensor)
        return super().add(tensor)

    def join(self, tensor: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
        self._same(tensor.narrow(dim, 0, 0))
        return super().join(tensor, sizes, dim)

    def add_slices(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        self._same(tensor)
        return super().add_slices(tensor, sizes, dim)

    def _same(self, tensor: Tensor) -> None:
        self.meet(float(zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode())))

    def meet(self, what: float = 0.0) -> None:
        """All here, about to do the same; or `GivenUpElsewhereError` on every rank."""
        told = self._tell(what)
        if min(told) < 0 or len(set(told)) > 1:
            raise GivenUpElsewhereError

    def give_up(self) -> None:
        """Tell those who wait in `meet`."""
        self._tell(-1.0)

    def have_same(self, tensor: Tensor) -> bool:
        """Whether all hold it bit for bit."""
        most = torch.stack([tensor, -tensor])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return torch.equal(most[0], -most[1])

    def _tell(self, what: float) -> list[float]:
        backend = dist.get_backend(self.group)
        if backend == "fake":
            return [what]
        own = torch.tensor([what], dtype=torch.float64, device="cuda" if backend == "nccl" else "cpu")
        told = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(told, own, group=self.group)
        return [float(flag) for flag in told]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Leave.apply(grad, ctx.peers), None  # type: ignore[no-untyped-call]  # which has a gradient too


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.add(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (_Enter.apply(grad, ctx.peers) if torch.is_grad_enabled() else grad), None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers, sizes: tuple[int, ...]) -> Tensor:
        ctx.peers, ctx.sizes = peers, sizes
        return peers.join(tensor, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Scatter.apply(grad, ctx.peers, ctx.sizes), None, None  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: Peers, sizes: tuple[int, ...]) -> Tensor:
        ctx.peers, ctx.sizes = peers, sizes
        return _slice(tensor, peers, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grad, ctx.peers, ctx.sizes), None, None  # type: ignore[no-untyped-call]


def _widened(tensor: Tensor, dim: int, width: int) -> Tensor:
    if tensor.shape[dim] == width:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = width
    wide = tensor.new_zeros(shape)
    wide.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return wide


def _slice(tensor: Tensor, peers: Peers, sizes: Sequence[int]) -> Tensor:
    return torch.split(tensor, list(sizes), dim=-1)[peers.rank].contiguous()
