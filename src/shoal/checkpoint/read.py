"""Read checkpoints: find the newest good one, and load of it what this rank needs."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from shoal.checkpoint.pack import unpack
from shoal.checkpoint.shelf import Found, list_checkpoints, step_in
from shoal.checkpoint.slices import Slices, read_header
from shoal.errors import CheckpointError
from shoal.parallel.parts import Part
from shoal.world import World

_MAX_MANIFEST_BYTES = 1 << 30
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Checkpoint:
    """What was read of a checkpoint; its tensors are on the CPU, whatever device they were saved from."""

    path: Path
    step: int
    manifest: Manifest
    tree: Any


def read(path: Path, plan: Mapping[str, Part | None] | None = None) -> Checkpoint:
    """Load a checkpoint folder, or this rank's part of it. Every block that is read is verified.

    Args:
        plan: by the name of the tensor in the checkpoint, the part to load of it, or None for a tensor that is not
            needed (None in the tree, too); whole where it is silent.

    Raises:
        CheckpointError: foreign, damaged (naming file and tensor), or unreadable.
    """
    manifest = read_manifest(path)
    problems = _listing_problems(path, manifest)
    if not problems:
        tensors = _read_tensors(Slices(path, manifest), manifest, plan or {}, problems)
    if problems:
        raise CheckpointError(_damage(path, problems))
    try:
        return Checkpoint(path, manifest.step, manifest, unpack(manifest.skeleton, tensors))
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged: {MANIFEST_NAME}: {error}") from error


def _read_tensors(
    slices: Slices, manifest: Manifest, plan: Mapping[str, Part | None], problems: list[str]
) -> dict[str, Tensor | None]:
    tensors: dict[str, Tensor | None] = {}
    for name in manifest.tensors:
        try:
            part = plan.get(name, Part.whole(manifest.tensors[name].shape))
            tensors[name] = None if part is None else slices.read(name, part)
        except CheckpointError as error:
            problems += [text for text in [str(error)] if text not in problems]  # a bad header is that of many
    return tensors


def verify(path: Path, *, rank: int = 0, size: int = 1) -> list[str]:
    """What is wrong with a checkpoint folder, by file and tensor; nothing when it is good.

    Files that are missing, foreign or of a wrong length are told before any is read. Where `size` ranks share the
    work, together they have read every byte.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = _listing_problems(path, manifest)
    if problems:
        return problems
    try:
        manifest.outline()
    except CheckpointError as error:
        return [f"{MANIFEST_NAME}: {error}"]
    return Slices(path, manifest).check(rank, size)


def newest_good(folder: Path, world: World | None = None) -> tuple[Found | None, list[str]]:
    """The newest checkpoint that verifies, and a line for each newer or foreign thing that was passed over.

    Args:
        folder: the folder of the checkpoints, the run folder above it, or one checkpoint.
        world: called on every rank, which share the reading; rank 0 says what is there.

    Raises:
        CheckpointError: a rank does not see what rank 0 sees.
    """
    together = world if world is not None and world.kind == "real" else None
    if together is None:
        choices, skipped = _choices(folder)
    else:
        choices, skipped = json.loads(together.decide(lambda: json.dumps(_choices(folder))))
    for text in choices:
        path = Path(text)
        problems = verify(path) if together is None else _verify_together(path, together)
        if not problems:
            return Found(read_manifest(path).step, path), skipped
        skipped.append(_damage(path, problems))
    return None, skipped


def _choices(folder: Path) -> tuple[list[str], list[str]]:
    """Committed checkpoints, newest first, and a line for each foreign thing beside them."""
    if (folder / MANIFEST_NAME).exists():
        return [str(folder)], []
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    foreign = [f"{path} is foreign: {reason}" for path, reason in _foreign(folder)]
    return [str(found.path) for found in list_checkpoints(folder)], foreign


def _verify_together(path: Path, world: World) -> list[str]:
    try:
        seen = hashlib.sha256((path / MANIFEST_NAME).read_bytes()).hexdigest()
    except OSError as error:
        seen = error.strerror or str(error)
    told = json.dumps([seen, verify(path, rank=world.rank, size=world.size)])
    rows = [json.loads(row) for row in world.gather_text(told)]
    for rank, (sees, _) in enumerate(rows):
        if sees != rows[0][0]:
            raise CheckpointError(
                f"rank {rank} does not see {path / MANIFEST_NAME} as rank 0 does ({sees}). A run folder must lie where "
                "every host sees it, at the same path."
            )
    return list(dict.fromkeys(problem for _, problems in rows for problem in problems))


def _damage(path: Path, problems: list[str]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] if str(path) in problems[0] else f"{path} is damaged: {problems[0]}{more}"


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
            data_start, spans = read_header(file.fileno(), entry, num_bytes)
    except (OSError, CheckpointError):
        return ""
    lost = (key for key, span in spans.items() if data_start + span.stop > num_bytes)
    return "".join(f", cut within tensor {key!r}" for key in list(lost)[:1])


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
