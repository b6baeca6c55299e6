"""Read the slices of a checkpoint, whole or in part; nothing is believed before its checksum.

Checksums cover blocks of rows. A rank reads the blocks that hold what it needs, and no others; here of a slice of
four rows in two blocks, saved under fsdp2, of which a rank of tp2 needs the left half:

    x x . .  |  one block: read into scratch memory and checked,
    x x . .  |  then its left half goes to its place
    x x . .  |
    x x . .  |  the other block
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.manifest import FileEntry, Manifest, Slice
from shoal.checkpoint.tensorfile import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Span,
    dtype_of,
    memory_of,
    num_bytes_of,
    num_data_bytes,
    parse_header,
)
from shoal.errors import CheckpointError
from shoal.parallel.parts import Box, Part

_READ_BYTES = 4 << 20  # hashed while still in cache


@dataclass(frozen=True)
class _Block:
    """What one checksum covers: rows of a slice, and where they lie in the file."""

    rows: range
    offset: int
    num_bytes: int
    sha256: str


class Slices:
    """The slices of one checkpoint, on the disk.

    Memory is taken for what is asked for, and for one block; the manifest's sizes have been compared with the files'.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._headers: dict[str, tuple[int, dict[str, Span]]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._places: dict[str, dict[str, tuple[str, Slice]]] = {name: {} for name in manifest.files}
        for name, entry in manifest.tensors.items():
            for held in entry.slices:
                self._places[held.file][held.key] = name, held

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """A tensor, or a part of it.

        Raises:
            CheckpointError: damage, by file and tensor; or a file that cannot be read.
        """
        entry = self._manifest.tensors[name]
        part = part or Part.whole(entry.shape)
        needed = [(held, moves) for held in entry.slices if (moves := _moves(held, part))]
        for held, _ in needed:
            self._header(held.file)  # all are checked before memory is taken
        local = torch.empty(part.local_shape, dtype=dtype_of(entry.dtype), device="cpu")
        for held, moves in needed:
            self._read_slice(name, held, local.reshape(local.shape or (1,)), moves)
        return local

    def check(self, rank: int = 0, size: int = 1) -> list[str]:
        """What is wrong with the files; of `size` readers each checks a run of all bytes."""
        problems: list[str] = []
        before, total = 0, sum(entry.num_bytes for entry in self._manifest.files.values())
        first, last = total * rank // size, total * (rank + 1) // size
        for file, entry in self._manifest.files.items():
            if before < last and before + entry.num_bytes > first:
                problems += self._check_file(file, range(first - before, last - before))
            before += entry.num_bytes
        return problems

    def _check_file(self, file: str, mine: range) -> Iterator[str]:
        """One line for each slice that has a bad block among those that begin in `mine`."""
        try:
            spans = self._header(file)[1]
            with self._opened(file) as descriptor:
                for key in spans:
                    name, held = self._places[file][key]
                    own = [block for block in self._blocks(name, held) if block.offset in mine]
                    if not all(self._fill(descriptor, self._scratch_of(block), block) for block in own):
                        yield f"{file}: tensor {name!r} does not match its checksum"
        except CheckpointError as error:
            yield str(error)

    def _read_slice(self, name: str, held: Slice, local: Tensor, moves: list[Box]) -> None:
        with self._opened(held.file) as descriptor:
            for block in self._blocks(name, held):
                inside = [move for move in (_in_rows(move, block.rows) for move in moves) if move]
                if inside and not self._read_block(descriptor, block, held, local, inside):
                    raise CheckpointError(f"tensor {name!r} does not match its checksum")

    def _read_block(self, descriptor: int, block: _Block, held: Slice, local: Tensor, moves: list[Box]) -> bool:
        shape = (len(block.rows), *held.shape[1:])
        target = local[moves[0].local_index()]
        if target.shape == shape and target.is_contiguous():  # all of it goes to one place
            return self._fill(descriptor, target.view(-1).view(torch.uint8), block)
        raw = self._scratch_of(block)
        if not self._fill(descriptor, raw, block):
            return False
        rows = raw.view(local.dtype).view(shape)
        for move in moves:
            local[move.local_index()] = rows[move.whole_index()]
        return True

    def _blocks(self, name: str, held: Slice) -> list[_Block]:
        dtype = self._manifest.tensors[name].dtype
        start, spans = self._header(held.file)
        start, row_bytes = start + spans[held.key].start, num_bytes_of(dtype, held.shape[1:])
        return [
            _Block(range(first, last), start + first * row_bytes, (last - first) * row_bytes, digest)
            for first, last, digest in held.blocks(dtype)
        ]

    def _scratch_of(self, block: _Block) -> Tensor:
        if self._scratch.numel() < block.num_bytes:
            self._scratch = torch.empty(block.num_bytes, dtype=torch.uint8, device="cpu")
        return self._scratch[: block.num_bytes]

    def _fill(self, descriptor: int, raw: Tensor, block: _Block) -> bool:
        """Read a block, a piece at a time; whether it matches its checksum."""
        memory, digest = memory_of(raw), hashlib.sha256()
        for start in range(0, block.num_bytes, _READ_BYTES):
            piece = memory[start : start + _READ_BYTES]
            if os.preadv(descriptor, [piece], block.offset + start) != len(piece):
                raise CheckpointError("shrank while it was read.")
            digest.update(piece)
        return digest.hexdigest() == block.sha256

    @contextmanager
    def _opened(self, file: str) -> Iterator[int]:
        """A descriptor; what is wrong while it is open is told with the file's name."""
        try:
            descriptor = os.open(self._path / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be opened: {error.strerror or error}") from error
        try:
            yield descriptor
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from error
        finally:
            os.close(descriptor)

    def _header(self, file: str) -> tuple[int, dict[str, Span]]:
        """Where the data of a file begin, and its spans: those of the manifest."""
        if file not in self._headers:
            entry = self._manifest.files[file]
            with self._opened(file) as descriptor:
                start, spans = read_header(descriptor, entry, os.fstat(descriptor).st_size)
                self._check_spans(spans, self._places[file])
                if start + num_data_bytes(spans) != entry.num_bytes:
                    raise CheckpointError("the header does not list the tensors of the manifest.")
            self._headers[file] = start, spans
        return self._headers[file]

    def _check_spans(self, spans: dict[str, Span], places: dict[str, tuple[str, Slice]]) -> None:
        if set(spans) != set(places):
            raise CheckpointError("the header does not list the tensors of the manifest.")
        for key, span in spans.items():
            name, held = places[key]
            if (span.dtype, span.shape) != (self._manifest.tensors[name].dtype, held.shape):
                raise CheckpointError(f"tensor {name!r}: the header and the manifest differ in dtype or shape.")


def read_header(descriptor: int, entry: FileEntry, num_bytes: int) -> tuple[int, dict[str, Span]]:
    """Where the data begin, and the spans; the hash is compared before anything is parsed.

    Raises:
        CheckpointError: damage.
    """
    prefix = os.pread(descriptor, PREFIX_BYTES, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < PREFIX_BYTES or length > min(num_bytes - PREFIX_BYTES, MAX_HEADER_BYTES):
        raise CheckpointError("the header is damaged: its length cannot be.")
    text = os.pread(descriptor, length, PREFIX_BYTES)
    if hashlib.sha256(prefix + text).hexdigest() != entry.header_sha256:
        raise CheckpointError("the header is damaged: it does not match its checksum.")
    return PREFIX_BYTES + length, parse_header(text)


def _moves(held: Slice, part: Part) -> list[Box]:
    """What of a slice goes into a part: boxes whose `whole` is a place in the slice. A 0-dim tensor is one row."""
    boxes = []
    for box in part.boxes:
        start = [max(pair) for pair in zip(held.offset, box.whole, strict=True)]
        ends = zip(held.offset, held.shape, box.whole, box.size, strict=True)
        size = [min(a + n, b + m) - at for (a, n, b, m), at in zip(ends, start, strict=True)]
        if all(n > 0 for n in size):
            local = [to + at - begin for to, at, begin in zip(box.local, start, box.whole, strict=True)]
            inside = [at - begin for at, begin in zip(start, held.offset, strict=True)]
            boxes.append(Box(tuple(local) or (0,), tuple(inside) or (0,), tuple(size) or (1,)))
    return boxes


def _in_rows(move: Box, rows: range) -> Box | None:
    """What of a move lies in these rows of the slice, counted from the first of them."""
    first, last = max(move.whole[0], rows.start), min(move.whole[0] + move.size[0], rows.stop)
    if first >= last:
        return None
    local = (move.local[0] + first - move.whole[0], *move.local[1:])
    return Box(local, (first - rows.start, *move.whole[1:]), (last - first, *move.size[1:]))
