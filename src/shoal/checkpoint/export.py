"""Hand the weights of a checkpoint to plain PyTorch: the keys of the user's own `module.state_dict()`.

Tensor by tensor, so that what no host can hold in memory is exported on any host that has the disk for it.
"""

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.pack import Leaf, leaves_of, unpack
from shoal.checkpoint.read import newest_good, read_manifest
from shoal.checkpoint.shelf import Found, list_checkpoints, make_folder, reason, sync_folder, write_file
from shoal.checkpoint.slices import Slices
from shoal.checkpoint.tensorfile import CODES, Span, dtype_of, header_bytes, memory_of, num_data_bytes, plan_file
from shoal.errors import CheckpointError

_SUFFIXES = (".safetensors", ".pt")


@dataclass(frozen=True)
class Exported:
    """What was written where, and the newer checkpoints that were passed over, each with its reason."""

    path: Path
    step: int
    num_tensors: int
    num_bytes: int
    skipped: tuple[str, ...]


def export(source: Path, to: Path, *, force: bool = False) -> Exported:
    """Write the model of a checkpoint, or of the newest good one of a run, as `.safetensors` or `.pt`.

    Buffers and tied weights are there under every name that `module.state_dict()` has. A `.pt` loads with
    `weights_only=True`. The file appears whole or not at all.

    Raises:
        CheckpointError: no good checkpoint, a suffix that is not known, a file that exists, no space.
    """
    if to.suffix not in _SUFFIXES:
        raise CheckpointError(f"{to} ends in {to.suffix!r}; export writes {' or '.join(_SUFFIXES)}.")
    if to.exists() and not force:
        raise CheckpointError(f"{to} exists. Choose another name, or overwrite it with --force.")
    found, skipped = _open(source)
    weights = _Weights.of(found.path)
    temporary = to.with_name(f".{to.name}.tmp-{secrets.token_hex(6)}")
    try:
        make_folder(to.parent)
        write = weights.write_safetensors if to.suffix == ".safetensors" else weights.write_pt
        write(temporary)
        num_bytes = temporary.stat().st_size
        os.replace(temporary, to)
        sync_folder(to.parent)
    except OSError as error:
        raise CheckpointError(f"{to} was not written: {reason(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(to, found.step, len(weights.state), num_bytes, tuple(skipped))


def _open(source: Path) -> tuple[Found, list[str]]:
    found, skipped = newest_good(source)
    if found is None:
        seen = "; ".join(skipped).rstrip(".") or "there is none in it"
        raise CheckpointError(_why_empty(source) or f"{source} has no good checkpoint to export: {seen}.")
    return found, skipped


def _why_empty(source: Path) -> str:
    """What stands there instead of a run that has saved; empty for a folder with checkpoints, or of another kind."""
    if not source.is_dir():
        what = "is a file" if source.exists() else "is not there"
        return f"{source} {what}. Name a run's folder, such as runs/digits, or one checkpoint of it."
    is_run = any((source / name).exists() for name in ("checkpoints", "logs", "run.json"))
    if not is_run or list_checkpoints(source / "checkpoints"):
        return ""
    return (
        f"{source} is the folder of a run that has saved no checkpoint. Train in it (shoal train JOB --run {source}; "
        "--save-every N saves before the end), or name another run."
    )


@dataclass(frozen=True)
class _Weights:
    """The model in a checkpoint: its state dict with a `Leaf` for each tensor, and where those are read from."""

    state: dict[str, Any]
    manifest: Manifest
    slices: Slices

    @staticmethod
    def of(path: Path) -> "_Weights":
        manifest = read_manifest(path)
        tree = manifest.outline()
        if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
            raise CheckpointError(f"{path} holds no model.")
        return _Weights(dict(tree["model"]), manifest, Slices(path, manifest))

    def write_safetensors(self, path: Path) -> None:
        """Under every name of the state dict, each tensor read when its turn comes."""
        for name, value in self.state.items():
            if not isinstance(value, Leaf) or value.numpy or self._dtype(value) not in CODES:
                what = self._dtype(value) if isinstance(value, Leaf) and not value.numpy else _kind(value)
                raise CheckpointError(f"{name} is {what}, which safetensors cannot hold; export to a .pt file.")
        spans = plan_file({name: self._empty(leaf) for name, leaf in self.state.items()})
        # The metadata tell other libraries that the names and layouts are PyTorch's.
        header = header_bytes(spans, {"format": "pt"})
        write_file(path, self._stream(header, [self.state[name].name for name in spans]))

    def write_pt(self, path: Path) -> None:
        """With tied weights tied. torch.save wants all tensors at once: it gets them in a file, not in memory."""
        for name, value in self.state.items():
            if any(leaf.numpy for leaf in leaves_of(value)):
                raise CheckpointError(f"{name} is a numpy value, which no .pt file can hold that loads safely.")
        spans = plan_file({leaf.name: self._empty(Leaf(leaf.name)) for leaf in leaves_of(self.state)})
        beside = path.with_name(f"{path.name}.data")
        try:
            write_file(beside, self._stream(b"", list(spans)))
            tensors = dict.fromkeys(self.manifest.tensors) | _mapped(beside, spans)
            with path.open("xb") as file:
                torch.save(dict(unpack(self.manifest.skeleton, tensors)["model"]), file)
                file.flush()
                os.fsync(file.fileno())
        finally:
            beside.unlink(missing_ok=True)

    def _dtype(self, leaf: Leaf) -> torch.dtype:
        dtype = dtype_of(self.manifest.tensors[leaf.name].dtype)
        return dtype.to_complex() if leaf.complex else dtype

    def _empty(self, leaf: Leaf) -> Tensor:
        shape = self.manifest.tensors[leaf.name].shape
        return torch.empty(shape[:-1] if leaf.complex else shape, dtype=self._dtype(leaf), device="meta")

    def _stream(self, header: bytes, names: Iterable[str]) -> Iterator[memoryview]:
        yield memoryview(header)
        for name in names:
            yield memory_of(self.slices.read(name).reshape(-1).view(torch.uint8))


def _kind(value: Any) -> str:
    return "a numpy value" if isinstance(value, Leaf) else type(value).__name__


def _mapped(path: Path, spans: Mapping[str, Span]) -> dict[str, Tensor | None]:
    """The tensors in a file of bare data, each of its own storage, since torch.save writes storages."""
    memory: Any = np.memmap(path, np.uint8, "c") if num_data_bytes(spans) else np.empty(0, np.uint8)
    return {
        name: torch.from_numpy(memory[span.start : span.stop]).view(dtype_of(span.dtype)).view(span.shape)
        for name, span in spans.items()
    }
