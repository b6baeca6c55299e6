"""Copies of the state in shared memory, which outlive the ranks that made them; where they lie: `shoal.sealed`.

A copy is taken between two steps. A rank that begins its copy of step k + 1 has been through the collectives of that
step, so every rank has sealed step k by then: only the copy before that is written over.
"""

import json
import mmap
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.deal import Piece
from shoal.checkpoint.snapshot import HostBuffer, Image
from shoal.checkpoint.tensorfile import Span, header_bytes, num_data_bytes
from shoal.mesh import Mesh
from shoal.sealed import SLOTS, file_of, generation_folder, seal_of, write_whole
from shoal.world import World

_WORD = 8  # bytes that the checksum takes at once


class SharedCopies:
    """The copies of one rank, double-buffered."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder = generation_folder(folder, world.place.generation)
        self._folder.mkdir(exist_ok=True)
        self._above, self._world, self._count = folder, world, 0
        self._files = [_File(file_of(self._folder, world.rank, slot)) for slot in SLOTS]
        self._buffers = [HostBuffer(file) for file in self._files]

    def take(self, tree: object, *, step: int) -> int:
        """Copy what this rank writes of a state; the bytes.

        Raises:
            OSError: there is no room.
        """
        file, buffer = self._files[self._count % 2], self._buffers[self._count % 2]
        file.seal.unlink(missing_ok=True)
        mesh: Mesh | None = self._world.mesh if self._world.kind == "real" else None
        image = buffer.take(tree, mesh, self._world.rank)
        self._count += 1
        write_whole(file.seal, Seal.of(image, step, self._world, number=self._count).to_bytes())
        if self._count == len(SLOTS) + 1:  # all ranks have sealed one of this generation
            self._remove_older()
        return image.num_bytes

    def forget(self) -> None:
        """Free what this rank holds."""
        for file in self._files:
            file.seal.unlink(missing_ok=True)
            file.path.unlink(missing_ok=True)

    def _remove_older(self) -> None:
        if self._world.place.local_rank == 0:
            for path in self._above.glob("*_*"):
                if path != self._folder:
                    shutil.rmtree(path, ignore_errors=True)


class _File:
    """A file of a checkpoint in shared memory, mapped; `hold` makes room for what is to be copied."""

    def __init__(self, path: Path) -> None:
        self.path, self.seal = path, seal_of(path)
        self._start = b""
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")

    def hold(self, spans: Mapping[str, Span], *, pinned: bool) -> Tensor:
        """Memory for the data of these spans; what lies in it is kept."""
        start, num_bytes = header_bytes(spans), num_data_bytes(spans)
        if start == self._start and self._data.numel() == num_bytes:
            return self._data
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.path.unlink(missing_ok=True)
        with self.path.open("x+b") as file:
            # Room that is promised now: a page that is missing later would end the rank with SIGBUS.
            os.posix_fallocate(file.fileno(), 0, len(start) + num_bytes)
            file.write(start)
            file.flush()
            memory = mmap.mmap(file.fileno(), len(start) + num_bytes)
        if num_bytes:
            self._data = torch.frombuffer(memory, dtype=torch.uint8, offset=len(start), count=num_bytes)
        self._start = start
        return self._data


@dataclass(frozen=True, kw_only=True)
class Seal:
    """What a rank has copied, written when the copy is whole."""

    number: int  # of the copy; first, since the launcher reads no more of it (`sealed.number_of`)
    step: int
    layout: str
    size: int  # of the world: so many seals make a copy whole
    checksum: int
    spans: Mapping[str, Any]
    pieces: Mapping[str, Any]
    skeleton: Any

    @staticmethod
    def of(image: Image, step: int, world: World, *, number: int) -> "Seal":
        """Of what this rank has just copied."""
        return Seal(
            number=number,
            step=step,
            layout=str(world.layout),
            size=world.size,
            checksum=checksum(image.data),
            spans={key: list(vars(span).values()) for key, span in image.spans.items()},
            pieces={key: list(vars(piece).values()) for key, piece in image.pieces.items()},
            skeleton=image.skeleton,
        )

    @staticmethod
    def read(path: Path) -> "Seal | None":
        """That of a file; None where it has none, or one that is none."""
        try:
            return Seal(**json.loads(seal_of(path).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def to_bytes(self) -> bytes:
        """As it lies beside the file."""
        return json.dumps(vars(self), separators=(",", ":")).encode()

    def image(self, data: Tensor) -> Image:
        """What the file holds."""
        spans = {key: Span(code, tuple(shape), a, b) for key, (code, shape, a, b) in self.spans.items()}
        pieces = {key: Piece(name, tuple(shape), tuple(at)) for key, (name, shape, at) in self.pieces.items()}
        return Image(self.skeleton, pieces, spans, data)


def checksum(data: Tensor) -> int:
    """The sum of its words: a copy that is half of one step and half of another has another one."""
    whole = data.numel() // _WORD * _WORD
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum(dtype=torch.int64))
