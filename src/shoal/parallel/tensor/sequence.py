"""Activations between the splits, cut along the sequence (Korthikanti et al. 2022, arXiv:2205.05198).

    x (B, t, W) -> norm -> [ gather -> column layers .. row layer -> reduce-scatter ] -> dropout -> + x -> ...
       slice       slice     whole      a part of the features       slice                slice

What is summed over all ranks in plain tensor parallelism is summed and handed out in slices of the tokens, and
gathered before the next split: as many bytes are sent, and norms, dropouts and residuals hold 1/N of theirs.

B batch, T tokens of all ranks, t of this one, W width.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shoal.errors import LayoutError
from shoal.parallel.swap import become
from shoal.parallel.tensor.peers import Peers
from shoal.parallel.tensor.stream import OwnStream
from shoal.parallel.tensor.units import Units

_LEFT_OUT = (
    "sequence=true: the first or the last of a run of blocks was left out of this forward; with the sample it was not. "
    "The first cuts the tokens and the last gathers them, so both must run. Drop sequence."
)


class Stretch:
    """A run of blocks: the first cuts its input, the last gathers its output, and all between is on slices.

    Attributes:
        dim: of the tokens.
        is_inside: of a region, where the tokens are whole.
        is_open: a block runs.
    """

    def __init__(self, peers: Peers, dim: int) -> None:
        self.peers, self.dim = peers, dim
        self.is_inside = self.is_open = False
        self.stream = OwnStream(peers.rank)
        self._has_begun = False
        self._length = 0
        self._last: tuple[Tensor, int, Tensor] | None = None  # as in Peers

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stretch":
        twin = memo[id(self)] = Stretch(self.peers, self.dim)
        return twin

    # -- around modules -----------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the first block."""
        self._has_begun = True
        return _exchanged((args, kwargs), self._cut)  # type: ignore[no-any-return]

    def go_on(self, module: nn.Module, args: Any) -> None:
        """Before another one."""
        if not self._has_begun:
            raise LayoutError(_LEFT_OUT)

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the last one."""
        self._has_begun = False
        return _exchanged(output, lambda x: _Whole.apply(x, self))  # type: ignore[no-untyped-call]

    def check_end(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the model."""
        if self._has_begun:
            raise LayoutError(_LEFT_OUT)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before a module that holds the column layers of a region, and that looks at the tokens itself."""
        return _exchanged((args, kwargs), self.gather)  # type: ignore[no-any-return]

    # -- the four ways ------------------------------------------------------------------------------------

    def gather(self, x: Tensor) -> Tensor:
        """Slices to whole, where a region begins; its gradient is a sum of parts, so slices of the sum go back."""
        self.is_inside = True
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self.peers.join(x, self._sizes_of(x), self.dim)
        if self._last is None or self._last[0] is not x or self._last[1] != x._version:
            self._last = (x, x._version, _Gather.apply(x, self))  # type: ignore[no-untyped-call]
        return self._last[2]

    def has_gathered(self, x: Tensor) -> bool:
        """Whether this is what `gather` gave last."""
        return self._last is not None and self._last[2] is x

    def scatter(self, x: Tensor) -> Tensor:
        """Slices of the sum of parts, where it ends."""
        self.is_inside = False
        return _Scatter.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def _cut(self, x: Tensor) -> Tensor:
        self.set_length(x.shape[self.dim])
        return _Cut.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def set_length(self, length: int) -> None:
        """Of the sequences that run forward, or that a backward runs again."""
        self._length = length

    def sizes(self) -> list[int]:
        """How many tokens each rank has."""
        return Units(self._length, (self._length,), self.peers.size).sizes() if self._length else [0] * self.peers.size

    def _sizes_of(self, x: Tensor) -> list[int]:
        sizes = self.sizes()
        if x.dim() != 3 or x.shape[self.dim] != sizes[self.peers.rank]:
            raise LayoutError(
                f"sequence=true: a layer that is split got a tensor of shape {tuple(x.shape)} between blocks whose "
                f"input had {self._length} tokens, of which {sizes[self.peers.rank]} are this rank's. Drop sequence."
            )
        return sizes


class Tokens(Peers):
    """The peers of the layers of a region between which tokens are cut."""

    def __init__(self, stretch: Stretch, *, gathers: bool) -> None:
        super().__init__(None, stretch.peers.rank, stretch.peers.size)
        self._stretch, self._gathers = stretch, gathers

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tokens":
        return Tokens(copy.deepcopy(self._stretch, memo), gathers=self._gathers)

    def enter(self, tensor: Tensor) -> Tensor:
        if self._gathers:
            return self._stretch.gather(tensor)
        # What a module around the layers has gathered is summed by that; what else they take is whole on all ranks.
        return tensor if self._stretch.has_gathered(tensor) else self._stretch.peers.enter(tensor)

    def leave(self, tensor: Tensor) -> Tensor:
        return self._stretch.scatter(tensor)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stretch: Stretch) -> Tensor:
        ctx.stretch, ctx.length = stretch, stretch._length
        return stretch.peers.join(x, stretch._sizes_of(x), stretch.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.stretch.set_length(ctx.length)
        return _Scatter.apply(grad, ctx.stretch), None  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stretch: Stretch) -> Tensor:
        ctx.stretch, ctx.length = stretch, stretch._length
        return stretch.peers.add_slices(x, stretch.sizes(), stretch.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.stretch.set_length(ctx.length)
        return _Gather.apply(grad, ctx.stretch), None  # type: ignore[no-untyped-call]


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stretch: Stretch) -> Tensor:
        ctx.stretch, ctx.length = stretch, stretch._length
        own = torch.split(x, stretch.sizes(), stretch.dim)[stretch.peers.rank]
        return own.clone(memory_format=torch.contiguous_format)  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.stretch.set_length(ctx.length)
        return _Whole.apply(grad, ctx.stretch), None  # type: ignore[no-untyped-call]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stretch: Stretch) -> Tensor:
        ctx.stretch, ctx.length = stretch, stretch._length
        return stretch.peers.join(x, stretch._sizes_of(x), stretch.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.stretch.set_length(ctx.length)  # of the blocks that this backward will run again
        return _Cut.apply(grad, ctx.stretch), None  # type: ignore[no-untyped-call]


def first_float(values: Any) -> list[Tensor]:
    """The first floating-point tensor of a structure: what blocks pass on to each other; none, or one."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()][:1]


def _exchanged(values: Any, exchange: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with another first floating-point tensor, wherever it stands in it."""
    for first in first_float(values):
        leaves, spec = tree_flatten(values)
        other = exchange(first)
        return tree_unflatten([other if leaf is first else leaf for leaf in leaves], spec)
    return values


class InStretch:
    """A block of a stretch; the state is set here, so that it is set when the block runs again in backward, too."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (stretch,) = self.__dict__["_shoal_stretches"]
        stretch.is_open, stretch.is_inside = True, False
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the class that this one is mixed into
        finally:
            stretch.is_open = False


class OwnDropout:
    """Dropout that is of slices while a block runs: there each rank draws its own numbers."""

    def forward(self, input: Tensor) -> Tensor:
        module: Any = self
        stretch = next(
            (each for each in self.__dict__["_shoal_stretches"] if each.is_open and not each.is_inside), None
        )
        if stretch is None or not module.training or not module.p:
            return super().forward(input)  # type: ignore[misc, no-any-return]  # as above
        stretch.is_open = False
        stretch.stream.begin(input)
        try:
            return super().forward(input)  # type: ignore[misc, no-any-return]  # as above
        finally:
            stretch.stream.end()
            stretch.is_open = True


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes whether something draws on slices, other than dropout that draws a rank's own numbers."""

    def __init__(self, is_between: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._is_between, self.found = is_between, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and self._is_between():
            self.found = True
        return func(*args, **(kwargs or {}))


def put_in(module: nn.Module, stretch: Stretch, kind: type) -> None:
    """Let a module run as `InStretch` or `OwnDropout` says; a dropout may be in several."""
    if "_shoal_stretches" not in module.__dict__:
        module.__dict__["_shoal_stretches"] = []
        become(module, kind)
    module.__dict__["_shoal_stretches"].append(stretch)
