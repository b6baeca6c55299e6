"""Write a checkpoint: files under a temporary name, manifest last, all on the disk, then one rename."""

import errno
import hashlib
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.fence import Fence
from shoal.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, Slice, TensorEntry, join
from shoal.checkpoint.shelf import (
    FolderLock,
    list_checkpoints,
    make_folder,
    publish,
    reason,
    remove_leftovers,
    sync_folder,
    write_file,
)
from shoal.checkpoint.snapshot import HostBuffer, Image
from shoal.checkpoint.tensorfile import Span, blocks_of, header_bytes, memory_of
from shoal.checkpoint.together import GIVEN_UP, Patience, Slot, discard, hear, open_slot, tell, tell_failure
from shoal.errors import CheckpointError
from shoal.units import show_bytes

# Manifest, folder and file system blocks: a state that fits by less than this is not going to fit.
_MARGIN_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def versions() -> dict[str, str]:
    """What a person needs to know to read a checkpoint years later."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("shoal", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def new_header(step: int, job: Mapping[str, Any], layout: str) -> Manifest:
    """A manifest without tensors yet; an identity that cannot be stored is refused here.

    Raises:
        CheckpointError: a value in `job` that is not plain.
    """
    header = Manifest(step=step, layout=layout, job=dict(job), versions=versions())
    header.to_bytes()
    return header


def write(folder: Path, tree: object, *, step: int, job: Mapping[str, Any], layout: str) -> Path:
    """Write one checkpoint and return when it is on the disk.

    Not for a folder that a `Writer` of this process holds. Returns the path of the committed `step_N`.

    Raises:
        CheckpointError: not storable, not writable, or another process writes there.
    """
    header = new_header(step, job, layout)
    lock = open_folder(folder)
    try:
        image = HostBuffer().take(tree)
        return commit(open_slot(folder, step), image, header)
    except OSError as error:
        raise CheckpointError(failure(folder, step, error)) from error
    finally:
        lock.close()


def open_folder(folder: Path, *, wants_lock: bool = True) -> FolderLock:
    """Create and lock the folder of a run's checkpoints, and clear it of what dead writers left.

    Args:
        wants_lock: False where a host that is lost may still hold it: its number is no longer the newest (`fence`).

    Raises:
        CheckpointError: it cannot be written, or another process writes there.
    """
    try:
        make_folder(folder)
        lock = FolderLock(folder, is_wanted=wants_lock)
        if lock.is_held:
            remove_leftovers(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {reason(error)}") from error
    return lock


def commit(
    slot: Slot,
    image: Image,
    header: Manifest,
    others: Sequence[int] = (),
    patience: Patience | None = None,
    fence: Fence | None = None,
) -> Path:
    """On rank 0: write the own file, wait for those of the others, give the whole its name.

    Nothing half-done is ever found under it.

    Raises:
        OSError: whatever the disk or another rank says; the temporary folder is gone then, older checkpoints stand.
        CheckpointError: what the ranks have written is not one state.
    """
    try:
        own = write_own(slot, 0, image, header)
        manifest = join([own, *hear(slot, others, patience or Patience())])
        write_file(slot.temporary / MANIFEST_NAME, [memoryview(manifest.to_bytes())])
        sync_folder(slot.temporary)
        publish(slot.temporary, slot.final, fence)
    except CheckpointError:
        discard(slot)
        raise
    except OSError as error:
        discard(slot)
        raise _with_numbers(error, slot, image) from error
    return slot.final


def hand_over(slot: Slot, rank: int, image: Image, header: Manifest) -> None:
    """On another rank: write the own file, and tell rank 0.

    Raises:
        OSError: whatever the disk says; rank 0 hears it, and gives the checkpoint up. Or it has done so before.
    """
    try:
        tell(slot, rank, write_own(slot, rank, image, header))
    except FileNotFoundError as error:
        raise OSError(errno.EIO, GIVEN_UP) from error
    except OSError as error:
        told = _with_numbers(error, slot, image)
        tell_failure(slot, rank, reason(told))
        raise told from error


def write_own(slot: Slot, rank: int, image: Image, header: Manifest) -> Manifest:
    """Write the file of one rank, if it has anything to write; the manifest of what is in it.

    Raises:
        OSError: whatever the disk says.
    """
    if rank and not image.spans:
        return replace(header, skeleton=image.skeleton)
    if shutil.disk_usage(slot.final.parent).free < image.num_bytes + _MARGIN_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write_file(slot.path_of(rank, ".safetensors"), [memoryview(header_bytes(image.spans)), memory_of(image.data)])
    return own_manifest(header, rank, image)


def own_manifest(header: Manifest, rank: int, image: Image) -> Manifest:
    """The manifest of what one rank has written."""
    if rank and not image.spans:
        return replace(header, skeleton=image.skeleton)
    name, start = f"rank_{rank:05d}.safetensors", header_bytes(image.spans)
    entry = FileEntry(num_bytes=len(start) + image.num_bytes, header_sha256=hashlib.sha256(start).hexdigest())
    return replace(header, files={name: entry}, tensors=_index(name, image), skeleton=image.skeleton)


def _with_numbers(error: OSError, slot: Slot, image: Image) -> OSError:
    """Say how much was needed, where that is the trouble."""
    if error.errno not in _FULL:
        return error
    needs, free = show_bytes(image.num_bytes), show_bytes(shutil.disk_usage(slot.final.parent).free)
    return OSError(error.errno, f"{reason(error)} (needs {needs}, {free} free)")


def _index(file: str, image: Image) -> dict[str, TensorEntry]:
    """The tensors of an image, each with the slices that this file holds."""
    tensors: dict[str, TensorEntry] = {}
    for key, span in image.spans.items():
        piece = image.pieces[key]
        part = Slice(file=file, key=key, offset=piece.offset, shape=span.shape, sha256=_digests(image, span))
        before = tensors[piece.name].slices if piece.name in tensors else ()
        tensors[piece.name] = TensorEntry(dtype=span.dtype, shape=piece.shape, slices=(*before, part))
    return tensors


def _digests(image: Image, span: Span) -> tuple[str, ...]:
    memory, (rows, *_) = memory_of(image.data)[span.start : span.stop], (*span.shape, 1)
    row_bytes = len(memory) // max(1, rows)
    return tuple(
        hashlib.sha256(memory[start * row_bytes : stop * row_bytes]).hexdigest()
        for start, stop in blocks_of(span.dtype, span.shape)
    )


def failure(folder: Path, step: int, error: OSError) -> str:
    """What did not happen, why, and what stands: for the person who watches the run."""
    text = f"checkpoint of step {step} was not written: {reason(error)}"
    try:
        older = [found.step for found in list_checkpoints(folder) if found.step != step]
    except OSError:
        return f"{text}; the folder {folder} cannot be read"
    return f"{text}; " + (f"the checkpoint of step {older[0]} stands" if older else "no older one exists")
