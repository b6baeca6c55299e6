"""Write a checkpoint: files under a temporary name, manifest last, all on the disk, then one rename."""

import errno
import hashlib
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, Slice, TensorEntry
from shoal.checkpoint.shelf import (
    FolderLock,
    list_checkpoints,
    make_folder,
    name_of,
    publish,
    remove_leftovers,
    sync_folder,
    temporary_of,
)
from shoal.checkpoint.snapshot import HostBuffer, Image
from shoal.checkpoint.tensorfile import header_bytes, memory_of
from shoal.errors import CheckpointError
from shoal.units import show_bytes

# Later one per rank; until then one rank holds all there is.
_FILE_NAME = "rank_00000.safetensors"
_WRITE_BYTES = 16 << 20
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
        return commit(folder, HostBuffer().take(tree), header)
    except OSError as error:
        raise CheckpointError(failure(folder, step, error)) from error
    finally:
        lock.close()


def open_folder(folder: Path) -> FolderLock:
    """Create and lock the folder of a run's checkpoints, and clear it of what dead writers left.

    Raises:
        CheckpointError: it cannot be written, or another process writes there.
    """
    try:
        make_folder(folder)
        lock = FolderLock(folder)
        if lock.is_held:
            remove_leftovers(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {reason(error)}") from error
    return lock


def commit(folder: Path, image: Image, header: Manifest) -> Path:
    """Write an image beside its final name, then give it that name; nothing half-done is ever found under it.

    Raises:
        OSError: whatever the disk says; the temporary folder is gone then, older checkpoints stand.
    """
    if shutil.disk_usage(folder).free < image.num_bytes + _MARGIN_BYTES:
        raise _with_numbers(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder, image)
    final = folder / name_of(header.step)
    temporary = temporary_of(final)
    try:
        os.mkdir(temporary)
        entries = _write_tensors(temporary / _FILE_NAME, image)
        manifest = _index(header, image, entries)
        write_file(temporary / MANIFEST_NAME, [memoryview(manifest.to_bytes())])
        sync_folder(temporary)
        publish(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _with_numbers(error, folder, image) from error
    return final


def _with_numbers(error: OSError, folder: Path, image: Image) -> OSError:
    """Say how much was needed, where that is the trouble."""
    if error.errno not in _FULL:
        return error
    needs, free = show_bytes(image.num_bytes), show_bytes(shutil.disk_usage(folder).free)
    return OSError(error.errno, f"{reason(error)} (needs {needs}, {free} free)")


def _write_tensors(path: Path, image: Image) -> FileEntry:
    header = header_bytes(image.spans)
    write_file(path, [memoryview(header), memory_of(image.data)])
    return FileEntry(num_bytes=len(header) + image.num_bytes, header_sha256=hashlib.sha256(header).hexdigest())


def _index(header: Manifest, image: Image, entry: FileEntry) -> Manifest:
    """The manifest of a state that one rank holds whole: each tensor one slice at offset 0."""
    memory = memory_of(image.data)
    tensors = {}
    for name, span in image.spans.items():
        digest = hashlib.sha256(memory[span.start : span.stop]).hexdigest()
        part = Slice(file=_FILE_NAME, key=name, offset=(0,) * len(span.shape), shape=span.shape, sha256=digest)
        tensors[name] = TensorEntry(dtype=span.dtype, shape=span.shape, slices=(part,))
    return replace(header, files={_FILE_NAME: entry}, tensors=tensors, skeleton=image.skeleton)


def write_file(path: Path, parts: list[memoryview]) -> None:
    """All bytes on the disk. os.write lets go of the GIL; it may write less than it was given."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            while part:
                part = part[os.write(descriptor, part[:_WRITE_BYTES]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """`No space left on device`, without number and path."""
    return error.strerror or str(error)


def failure(folder: Path, step: int, error: OSError) -> str:
    """What did not happen, why, and what stands: for the person who watches the run."""
    text = f"checkpoint of step {step} was not written: {reason(error)}"
    try:
        older = [found.step for found in list_checkpoints(folder) if found.step != step]
    except OSError:
        return f"{text}; the folder {folder} cannot be read"
    return f"{text}; " + (f"the checkpoint of step {older[0]} stands" if older else "no older one exists")
