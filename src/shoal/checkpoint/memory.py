"""Copies of the state in shared memory, which outlive the ranks that made them.

/dev/shm/shoal-memory-../
    generation_0/
        rank_00000.even             what rank 0 writes of the state: the safetensors file of a checkpoint, mapped
        rank_00000.even.seal        of which step it is, and its checksum; gone while the data change
        rank_00000.odd, ...         the copy before, or after: one of the two is always whole
    step_000123/                    a copy that all ranks had sealed, made a checkpoint when ranks start again

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
from shoal.checkpoint.manifest import MANIFEST_NAME, Manifest, join
from shoal.checkpoint.shelf import Found, list_checkpoints, name_of, step_in, write_file
from shoal.checkpoint.snapshot import HostBuffer, Image
from shoal.checkpoint.tensorfile import Span, header_bytes, num_data_bytes
from shoal.checkpoint.write import own_manifest, versions
from shoal.mesh import Mesh
from shoal.world import World

_SLOTS = ("even", "odd")
_WORD = 8  # bytes that the checksum takes at once


class SharedCopies:
    """The copies of one rank, double-buffered."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder = folder / f"generation_{world.place.generation}"
        self._folder.mkdir(exist_ok=True)
        self._above, self._world, self._count = folder, world, 0
        self._files = [_File(self._folder / f"rank_{world.rank:05d}.{slot}") for slot in _SLOTS]
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
        _write_whole(file.seal, _Seal.of(image, step, self._world).to_bytes())
        self._count += 1
        if self._count == len(_SLOTS) + 1:  # all ranks have sealed one of this generation
            self._remove_older()
        return image.num_bytes

    def forget(self) -> None:
        """Free what this rank holds."""
        for file in self._files:
            file.seal.unlink(missing_ok=True)
            file.path.unlink(missing_ok=True)

    def _remove_older(self) -> None:
        if self._world.rank == 0:
            for path in self._above.glob("*_*"):
                if path != self._folder:
                    shutil.rmtree(path, ignore_errors=True)


class _File:
    """A file of a checkpoint in shared memory, mapped; `hold` makes room for what is to be copied."""

    def __init__(self, path: Path) -> None:
        self.path, self.seal = path, path.with_suffix(f"{path.suffix}.seal")
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
class _Seal:
    """What a rank has copied, written when the copy is whole."""

    step: int
    layout: str
    size: int  # of the world: so many seals make a copy whole
    checksum: int
    spans: Mapping[str, Any]
    pieces: Mapping[str, Any]
    skeleton: Any

    @staticmethod
    def of(image: Image, step: int, world: World) -> "_Seal":
        return _Seal(
            step=step,
            layout=str(world.layout),
            size=world.size,
            checksum=_checksum(image.data),
            spans={key: list(vars(span).values()) for key, span in image.spans.items()},
            pieces={key: list(vars(piece).values()) for key, piece in image.pieces.items()},
            skeleton=image.skeleton,
        )

    def to_bytes(self) -> bytes:
        return json.dumps(vars(self), separators=(",", ":")).encode()

    def image(self, data: Tensor) -> Image:
        spans = {key: Span(code, tuple(shape), a, b) for key, (code, shape, a, b) in self.spans.items()}
        pieces = {key: Piece(name, tuple(shape), tuple(at)) for key, (name, shape, at) in self.pieces.items()}
        return Image(self.skeleton, pieces, spans, data)


def _checksum(data: Tensor) -> int:
    """The sum of its words: a copy that is half of one step and half of another has another one."""
    whole = data.numel() // _WORD * _WORD
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum(dtype=torch.int64))


def _write_whole(path: Path, text: bytes) -> None:
    partial = path.with_name(f"{path.name}.part")
    partial.write_bytes(text)
    os.rename(partial, path)


def recover(folder: Path, world: World, job: Mapping[str, Any]) -> Found | None:
    """The newest copy that is whole, as a checkpoint; collective. The ranks share out the work, whatever their number.

    Args:
        job: the identity of the run, as in its checkpoints.
    """
    chosen: list[str] = json.loads(world.decide(lambda: json.dumps(_newest(folder))))
    made = ""
    if len(chosen) > 1:
        target = folder / f"{chosen[0]}.part"
        told = {}
        for number in range(world.rank, len(chosen) - 1, world.size):
            told[number] = _as_file(Path(chosen[1 + number]), target, number, job)
        rows = {int(k): text for row in world.gather_text(json.dumps(told)) for k, text in json.loads(row).items()}
        made = world.decide(lambda: _join(target, [rows[number] for number in sorted(rows)]))
    elif chosen:
        made = chosen[0]
    return Found(step_in(Path(made).name) or 0, Path(made)) if made else None


def _newest(folder: Path) -> list[str]:
    """The name that the checkpoint will have, and the files that make it up; one that is made already, alone."""
    whole: dict[tuple[int, str], list[str]] = {}
    for first in folder.glob("generation_*/rank_00000.*.seal"):
        if (seal := _read(first)) is None:
            continue
        names = [first.with_name(first.name.replace("00000", f"{rank:05d}")) for rank in range(seal.size)]
        others = [_one_of_step(name, seal.step) for name in names]
        if all(others):
            whole[seal.step, name_of(seal.step)] = [str(other) for other in others]
    for found in list_checkpoints(folder):
        whole.setdefault((found.step, str(found.path)), [])
    if not whole:
        return []
    (_, name), files = max(whole.items(), key=lambda item: (item[0][0], not item[1]))
    if files:
        target = folder / f"{name}.part"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
    return [name, *files]


def _one_of_step(seal: Path, step: int) -> Path | None:
    """Of the two files of a rank that of this step: ranks that took a copy less or more have it in the other one."""
    for slot in _SLOTS:
        path = seal.with_name(f"{seal.name.split('.')[0]}.{slot}.seal")
        found = _read(path)
        if found is not None and found.step == step:
            return path
    return None


def _read(path: Path) -> _Seal | None:
    try:
        return _Seal(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _as_file(seal_path: Path, target: Path, number: int, job: Mapping[str, Any]) -> str:
    """Make a rank's copy a file of the checkpoint, without a copy; its manifest, or nothing where it is torn."""
    seal, path = _read(seal_path), seal_path.with_suffix("")
    if seal is None:
        return ""
    header = Manifest(step=seal.step, layout=seal.layout, job=dict(job), versions=versions())
    image = seal.image(torch.empty(0, dtype=torch.uint8, device="cpu"))
    if image.spans:
        start = header_bytes(image.spans)
        raw = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        image = seal.image(raw[len(start) :])
        if bytes(raw[: len(start)].numpy()) != start or _checksum(image.data) != seal.checksum:
            return ""
        os.link(path, target / f"rank_{number:05d}.safetensors")
    elif seal.checksum:
        return ""
    return own_manifest(header, number, image).to_bytes().decode()


def _join(target: Path, parts: list[str]) -> str:
    """On rank 0; the path, or nothing where a part is torn."""
    if not all(parts):
        shutil.rmtree(target, ignore_errors=True)
        return ""
    whole = join([Manifest.from_bytes(part.encode(), whole=False) for part in parts])
    write_file(target / MANIFEST_NAME, [memoryview(whole.to_bytes())])
    final = target.with_suffix("")
    os.rename(target, final)
    return str(final)
