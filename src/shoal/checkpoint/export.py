"""Hand the weights of a checkpoint to plain PyTorch: the keys of the user's own `module.state_dict()`."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.read import Checkpoint, newest_good
from shoal.checkpoint.shelf import make_folder, sync_folder
from shoal.checkpoint.tensorfile import CODES, header_bytes, memory_of, plan_file
from shoal.checkpoint.write import reason, write_file
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
    checkpoint, skipped = _open(source)
    state = _model_of(checkpoint)
    temporary = to.with_name(f".{to.name}.tmp-{secrets.token_hex(6)}")
    try:
        make_folder(to.parent)
        _write(temporary, to.suffix, state)
        num_bytes = temporary.stat().st_size
        os.replace(temporary, to)
        sync_folder(to.parent)
    except OSError as error:
        raise CheckpointError(f"{to} was not written: {reason(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(to, checkpoint.step, len(state), num_bytes, tuple(skipped))


def _open(source: Path) -> tuple[Checkpoint, list[str]]:
    checkpoint, skipped = newest_good(source)
    if checkpoint is None:
        found = "; ".join(skipped) or "there is none"
        raise CheckpointError(f"{source} has no good checkpoint to export: {found}.")
    return checkpoint, skipped


def _model_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    state = checkpoint.tree.get("model") if isinstance(checkpoint.tree, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{checkpoint.path} holds no model.")
    return state


def _write(path: Path, suffix: str, state: Mapping[str, Any]) -> None:
    if suffix == ".safetensors":
        _write_safetensors(path, state)
        return
    for name, value in state.items():
        if isinstance(value, np.ndarray | np.generic):
            raise CheckpointError(f"{name} is a numpy value, which no .pt file can hold that loads safely.")
    with path.open("xb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def _write_safetensors(path: Path, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dtype not in CODES:
            what = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"{name} is {what}, which safetensors cannot hold; export to a .pt file.")
    spans = plan_file(state)
    # The metadata tell other libraries that the names and layouts are PyTorch's.
    header = header_bytes(spans, {"format": "pt"})
    data = [state[name].reshape(-1).view(torch.uint8) for name in spans if state[name].numel()]
    write_file(path, [memoryview(header), *map(memory_of, data)])
