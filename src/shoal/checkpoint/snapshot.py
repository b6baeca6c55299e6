"""The state of a training at one moment, copied to host memory so that training may go on."""

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.checkpoint.deal import Piece, pieces_to_write
from shoal.checkpoint.pack import Skeleton, pack
from shoal.checkpoint.tensorfile import Span, host_view, num_data_bytes, plan_file
from shoal.mesh import Mesh
from shoal.units import show_bytes


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
    """Memory for one image, kept between saves: fresh pages cost more than the copy itself.

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
        own = pieces_to_write(tensors, mesh, rank)
        spans = plan_file({key: tensor for key, (_, tensor) in own.items()})
        data = self._memory.hold(spans, pinned=any(tensor.is_cuda for _, tensor in own.values()))
        with torch.no_grad():
            for key, span in spans.items():
                tensor = own[key][1]
                host_view(data, span).copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for _, tensor in own.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        pieces = {key: piece for key, (piece, _) in own.items()}
        return Image(skeleton, pieces, spans, data[: num_data_bytes(spans)])


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
        return self._data
