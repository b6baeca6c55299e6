"""The state of a training at one moment, copied to host memory so that training may go on."""

import errno
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.checkpoint.deal import Piece, pieces_to_write
from shoal.checkpoint.pack import Shard, Skeleton, pack
from shoal.checkpoint.tensorfile import Span, host_view, num_data_bytes, plan_file
from shoal.mesh import Mesh
from shoal.units import show_bytes

_PAGE_BYTES = 4096  # or larger


@dataclass(frozen=True)
class Image:
    """What one rank writes of a state: plain values as JSON, pieces of tensors as the data part of its file to be."""

    skeleton: Skeleton
    pieces: dict[str, Piece]
    spans: dict[str, Span]
    data: Tensor

    @property
    def num_bytes(self) -> int:
        """What the tensors need on the disk."""
        return num_data_bytes(self.spans)


class Memory(Protocol):
    """Where an image lies."""

    def hold(self, spans: Mapping[str, Span], *, pinned: bool) -> Tensor:
        """At least as many bytes as the spans need.

        Raises:
            OSError: there is no room.
        """


class HostBuffer:
    """Memory for one image, kept between saves: to touch fresh pages costs ten times what the copy does.

    Args:
        memory: by default this process's own.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory or _Own()

    def take(self, tree: object, mesh: Mesh | None = None, rank: int = 0) -> Image:
        """Copy what a rank writes of a state, which may change then; the image holds until the next one is taken.

        Raises:
            CheckpointError: a value that cannot be stored.
            OSError: no memory for the copy.
        """
        tensors, skeleton = pack(tree)
        own, spans = _laid_out(tensors, mesh, rank)
        data = self._memory.hold(spans, pinned=_on_cuda(own))
        with torch.no_grad():
            for key, span in spans.items():
                tensor = own[key][1]
                host_view(data, span).copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for _, tensor in own.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        pieces = {key: piece for key, (piece, _) in own.items()}
        return Image(skeleton, pieces, spans, data[: num_data_bytes(spans)])

    def room_for(self, tree: object, mesh: Mesh | None = None, rank: int = 0) -> Callable[[], object]:
        """What makes room for images of such a state when it is called, in any thread; it reads no tensor.

        Raises:
            CheckpointError: a value that cannot be stored.
        """
        own, spans = _laid_out(pack(tree)[0], mesh, rank)
        return functools.partial(self._memory.hold, spans, pinned=_on_cuda(own))


def _laid_out(
    tensors: Mapping[str, Tensor | Shard], mesh: Mesh | None, rank: int
) -> tuple[dict[str, tuple[Piece, Tensor]], dict[str, Span]]:
    own = pieces_to_write(tensors, mesh, rank)
    return own, plan_file({key: tensor for key, (_, tensor) in own.items()})


def _on_cuda(own: Mapping[str, tuple[Piece, Tensor]]) -> bool:
    return any(tensor.is_cuda for _, tensor in own.values())


class _Own:
    """Host memory of this process."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")

    def hold(self, spans: Mapping[str, Span], *, pinned: bool) -> Tensor:
        """What it has, or more."""
        num_bytes = num_data_bytes(spans)
        if self._data.numel() >= num_bytes and self._data.is_pinned() == pinned:
            return self._data
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old goes before the new comes
        try:
            self._data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except (RuntimeError, MemoryError) as error:
            text = f"no host memory for a copy of the state ({show_bytes(num_bytes)})"
            raise OSError(errno.ENOMEM, text) from error
        self._data.numpy()[::_PAGE_BYTES] = 0  # by numpy, which starts no threads of its own in the caller's
        return self._data
