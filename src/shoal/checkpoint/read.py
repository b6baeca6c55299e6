"""Read checkpoints: nothing is believed before its checksum, nothing allocated before its size is known."""

import hashlib
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, Slice
from shoal.checkpoint.pack import unpack
from shoal.checkpoint.shelf import list_checkpoints, step_in
from shoal.checkpoint.tensorfile import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Span,
    dtype_of,
    memory_of,
    parse_header,
)
from shoal.errors import CheckpointError

_READ_BYTES = 4 << 20  # hashed while still in cache
_MAX_MANIFEST_BYTES = 1 << 30
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; its tensors are on the CPU, whatever device they were saved from."""

    path: Path
    step: int
    manifest: Manifest
    tree: Any


@dataclass(frozen=True)
class _Place:
    """A slice, and the tensor that it belongs to."""

    name: str
    dtype: str
    part: Slice


def read(path: Path) -> Checkpoint:
    """Load one checkpoint folder, verifying every byte of it.

    Raises:
        CheckpointError: foreign, damaged (naming file and tensor), or unreadable.
    """
    found = _load(path)
    if isinstance(found, Checkpoint):
        return found
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise CheckpointError(f"{path} is damaged: {found[0]}{more}")


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint folder, by file and tensor; nothing when it is good.

    Files that are missing, foreign or of a wrong length are told before any is read.
    """
    try:
        found = _load(path)
    except CheckpointError as error:
        return [str(error)]
    return [] if isinstance(found, Checkpoint) else found


def _load(path: Path) -> Checkpoint | list[str]:
    """The checkpoint, or all that is wrong with its files."""
    manifest = read_manifest(path)
    problems = _listing_problems(path, manifest)
    tensors = _assemble(path, manifest, problems) if not problems else {}
    if problems:
        return problems
    try:
        return Checkpoint(path, manifest.step, manifest, unpack(manifest.skeleton, tensors))
    except CheckpointError as error:
        return [f"{MANIFEST_NAME}: {error}"]


def newest_good(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and a line for each newer or foreign thing that was passed over.

    `folder` is the folder of the checkpoints, the run folder above it, or one checkpoint.
    """
    if (folder / MANIFEST_NAME).exists():
        return _try(folder, [])
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    skipped = [f"{path} is foreign: {reason}" for path, reason in _foreign(folder)]
    for found in list_checkpoints(folder):
        checkpoint, skipped = _try(found.path, skipped)
        if checkpoint is not None:
            return checkpoint, skipped
    return None, skipped


def _try(path: Path, skipped: list[str]) -> tuple[Checkpoint | None, list[str]]:
    try:
        return read(path), skipped
    except CheckpointError as error:
        return None, [*skipped, str(error)]


def looks_complete(path: Path) -> bool:
    """A quick look without reading the tensors: a sealed manifest, and all its files in their full length."""
    try:
        return not _listing_problems(path, read_manifest(path))
    except CheckpointError:
        return False


def read_manifest(path: Path) -> Manifest:
    """The verified manifest of a checkpoint folder.

    Raises:
        CheckpointError: no checkpoint of shoal, or a manifest that is damaged.
    """
    try:
        if not (path / MANIFEST_NAME).is_file() or (path / MANIFEST_NAME).is_symlink():
            raise CheckpointError(f"{path} is no checkpoint of shoal: {_what_is(path)}")
        if (path / MANIFEST_NAME).stat().st_size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path / MANIFEST_NAME} is larger than any manifest.")
        manifest = Manifest.from_bytes((path / MANIFEST_NAME).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path / MANIFEST_NAME} {error}") from error
    if step_in(path.name) not in (None, manifest.step):
        raise CheckpointError(f"{path / MANIFEST_NAME} is of step {manifest.step}: it belongs to another checkpoint.")
    return manifest


def _what_is(path: Path) -> str:
    if not path.exists():
        return "it does not exist."
    if path.is_file():
        is_pickle = path.suffix in _PICKLES
        return "a pickle, which shoal never reads." if is_pickle else "it is a file; a checkpoint is a folder."
    if (path / ".metadata").exists() or any(path.glob("*.distcp")):
        return "a folder of torch.distributed.checkpoint, which is read by unpickling."
    return f"it has no {MANIFEST_NAME}."


def _foreign(folder: Path) -> Iterator[tuple[Path, str]]:
    """What a person might have expected to be resumed from."""
    if (folder / ".metadata").exists() or any(folder.glob("*.distcp")):
        yield folder, _what_is(folder)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_ours = path.name.startswith(".") or path.suffix == ".distcp" or path.name.startswith("step_")
        if not is_ours:
            yield path, _what_is(path)


def _listing_problems(path: Path, manifest: Manifest) -> list[str]:
    """Files that are missing, too many, no files, or of another length."""
    try:
        entries = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(path)}
    except OSError as error:
        return [f"{path} cannot be listed: {error.strerror or error}"]
    entries.pop(MANIFEST_NAME, None)
    problems = [f"{name}: is not of this checkpoint" for name in sorted(set(entries) - set(manifest.files))]
    problems += [f"{name}: is missing" for name in sorted(set(manifest.files) - set(entries))]
    for name in sorted(set(entries) & set(manifest.files)):
        if not stat.S_ISREG(entries[name].st_mode):
            problems.append(f"{name}: is no regular file")
        elif entries[name].st_size != manifest.files[name].num_bytes:
            cut = _cut_tensor(path / name, manifest.files[name], entries[name].st_size)
            problems.append(
                f"{name}: has {entries[name].st_size} bytes instead of {manifest.files[name].num_bytes}{cut}"
            )
    return problems


def _cut_tensor(path: Path, entry: FileEntry, num_bytes: int) -> str:
    """The first tensor that a truncated file lacks, where its header still tells."""
    try:
        with path.open("rb") as file:
            data_start, spans = _read_header(file.fileno(), entry, num_bytes)
    except (OSError, CheckpointError):
        return ""
    lost = (key for key, span in spans.items() if data_start + span.stop > num_bytes)
    return "".join(f", cut within tensor {key!r}" for key in list(lost)[:1])


def _read_header(descriptor: int, entry: FileEntry, num_bytes: int) -> tuple[int, dict[str, Span]]:
    """Where the data begin, and the spans; the hash is compared before anything is parsed."""
    prefix = os.pread(descriptor, PREFIX_BYTES, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < PREFIX_BYTES or length > min(num_bytes - PREFIX_BYTES, MAX_HEADER_BYTES):
        raise CheckpointError("the header is damaged: its length cannot be.")
    text = os.pread(descriptor, length, PREFIX_BYTES)
    if hashlib.sha256(prefix + text).hexdigest() != entry.header_sha256:
        raise CheckpointError("the header is damaged: it does not match its checksum.")
    return PREFIX_BYTES + length, parse_header(text)


def _read_slices(path: Path, manifest: Manifest, problems: list[str]) -> Iterator[tuple[_Place, Tensor]]:
    """The good slices of all files; each bad one adds a line to `problems`."""
    places: dict[str, dict[str, _Place]] = {name: {} for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for part in tensor.slices:
            places[part.file][part.key] = _Place(name, tensor.dtype, part)
    for file, entry in manifest.files.items():
        try:
            descriptor = os.open(path / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            problems.append(f"{file}: cannot be opened: {error.strerror or error}")
            continue
        try:
            yield from _read_file(descriptor, file, entry, places[file], problems)
        except (OSError, CheckpointError) as error:
            problems.append(f"{file}: {error}")
        finally:
            os.close(descriptor)


def _read_file(
    descriptor: int, file: str, entry: FileEntry, places: dict[str, _Place], problems: list[str]
) -> Iterator[tuple[_Place, Tensor]]:
    num_bytes = os.fstat(descriptor).st_size
    data_start, spans = _read_header(descriptor, entry, num_bytes)
    end = data_start + max((span.stop for span in spans.values()), default=0)
    if set(spans) != set(places) or end != entry.num_bytes:
        raise CheckpointError("the header does not list the tensors of the manifest.")
    for key, span in spans.items():
        place = places[key]
        if (span.dtype, span.shape) != (place.dtype, place.part.shape):
            raise CheckpointError(f"tensor {place.name!r}: the header and the manifest differ in dtype or shape.")
        if data_start + span.stop > num_bytes:
            problems.append(f"{file}: tensor {place.name!r} is cut off")
            continue
        data = torch.empty(span.stop - span.start, dtype=torch.uint8, device="cpu")
        if _read_into(descriptor, memory_of(data), data_start + span.start) != place.part.sha256:
            problems.append(f"{file}: tensor {place.name!r} does not match its checksum")
        else:
            yield place, data.view(dtype_of(span.dtype)).view(span.shape)


def _read_into(descriptor: int, memory: memoryview, offset: int) -> str:
    """Fill the memory and return its hash, a piece at a time."""
    digest = hashlib.sha256()
    for start in range(0, len(memory), _READ_BYTES):
        piece = memory[start : start + _READ_BYTES]
        if os.preadv(descriptor, [piece], offset + start) != len(piece):
            raise CheckpointError("shrank while it was read.")
        digest.update(piece)
    return digest.hexdigest()


def _assemble(path: Path, manifest: Manifest, problems: list[str]) -> dict[str, Tensor]:
    """Global tensors from their slices. They tile it, so it is no larger than the files that hold it."""
    tensors: dict[str, Tensor] = {}
    for place, data in _read_slices(path, manifest, problems):
        entry = manifest.tensors[place.name]
        if len(entry.slices) == 1:
            tensors[place.name] = data
            continue
        if place.name not in tensors:
            tensors[place.name] = torch.empty(entry.shape, dtype=data.dtype, device="cpu")
        box = tuple(slice(o, o + n) for o, n in zip(place.part.offset, place.part.shape, strict=True))
        tensors[place.name][box] = data
    return tensors


def identity_difference(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """The fields in which two jobs differ, one line each: `lr: saved 0.001, now 0.003`."""
    return list(_differences(saved, current, ""))


def _differences(saved: dict[str, Any], current: dict[str, Any], prefix: str) -> Iterator[str]:
    for key in [*saved, *(key for key in current if key not in saved)]:
        name = f"{prefix}{key}"
        if key not in current:
            yield f"{name}: saved {saved[key]!r}, now absent"
        elif key not in saved:
            yield f"{name}: not saved, now {current[key]!r}"
        elif isinstance(saved[key], dict) and isinstance(current[key], dict):
            yield from _differences(saved[key], current[key], f"{name}.")
        elif not _same(saved[key], current[key]):
            yield f"{name}: saved {saved[key]!r}, now {current[key]!r}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)
