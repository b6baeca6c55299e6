"""Take weights from plain PyTorch into a placed model: each rank maps the files and reads its own slices.

Taken are a `.safetensors` or `.pt` file, a folder of `*.safetensors` (with an index, as Hugging Face writes them, or
without), and a run or one checkpoint of it.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.manifest import MANIFEST_NAME
from shoal.checkpoint.pack import Leaf, in_pairs
from shoal.checkpoint.read import newest_good, read_manifest
from shoal.checkpoint.shelf import list_checkpoints
from shoal.checkpoint.slices import Slices
from shoal.checkpoint.tensorfile import MAX_HEADER_BYTES, PREFIX_BYTES, Span, dtype_of, num_data_bytes, parse_header
from shoal.errors import CheckpointError
from shoal.parallel.parts import Part, cut, local_of, parts_of
from shoal.world import World

_TORCH_FILES = (".pt", ".pth", ".bin")
_INDEX = "*.safetensors.index.json"
_SHOWN = 3


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file, and how to get a part of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Part], Tensor]


@dataclass(frozen=True)
class Loaded:
    """What was taken, and which dtypes were converted on the way."""

    path: Path
    num_tensors: int
    converted: dict[tuple[torch.dtype, torch.dtype], int]

    def __str__(self) -> str:
        notes = [f", {count} of them from {was} to {now}" for (was, now), count in self.converted.items()]
        return f"{self.num_tensors} tensors from {self.path}{''.join(notes)}".replace("torch.", "")


def load_weights(path: Path, model: nn.Module, world: World | None = None) -> Loaded:
    """Fill a model, placed or not, with the weights of a file or folder; each rank reads what it holds of them.

    Of tied names one is enough; if there are several, they must be equal. Floating-point dtypes are converted to the
    model's. Plain files have no checksums: what they hold is taken as it is.

    Args:
        world: where several ranks call this, so that of a run they all take the same checkpoint.

    Raises:
        CheckpointError: missing, unexpected or misshapen tensors, by name; or nothing that can be read. Nothing was
            changed then.
    """
    stored, parts = _open(path, world), parts_of(model)
    tied: dict[int, list[str]] = {}
    own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    for name, value in own.items():
        tied.setdefault(id(value), []).append(name)
    _check_names(path, set(stored), list(tied.values()))
    _check_kinds(path, stored, own, parts)
    sources = {names[0]: [name for name in names if name in stored] for names in tied.values()}
    for first, *others in sources.values():
        _check_equal(path, stored, parts, first, others)
    converted: dict[tuple[torch.dtype, torch.dtype], int] = {}
    with torch.no_grad():
        for name, (source, *_) in sources.items():
            local_of(own[name].detach()).copy_(stored[source].read(parts[name]))
            change = stored[source].dtype, own[name].dtype
            if change[0] != change[1]:
                converted[change] = converted.get(change, 0) + 1
    return Loaded(path, len(sources), converted)


def _check_names(path: Path, stored: set[str], tied: list[list[str]]) -> None:
    known = {name for names in tied for name in names}
    missing = [names[0] for names in tied if stored.isdisjoint(names)]
    extra = sorted(stored - known)
    if missing or extra:
        lines = [*_listed("lacks", missing, stored), *_listed("has what the model lacks:", extra, known)]
        raise CheckpointError(f"{path} does not fit the model, which has {len(tied)} tensors. " + " ".join(lines))


def _listed(what: str, names: list[str], known: Iterable[str]) -> list[str]:
    """`It lacks 5: 'a', 'b' (near: 'model.b'), 'c', ...`"""
    if not names:
        return []
    shown = []
    for name in names[:_SHOWN]:
        near = difflib.get_close_matches(name, known, n=1)
        shown.append(f"{name!r} (near: {near[0]!r})" if near else repr(name))
    more = ", ..." if len(names) > _SHOWN else ""
    return [f"It {what} {len(names)}: {', '.join(shown)}{more}."]


def _check_kinds(
    path: Path, stored: Mapping[str, _Stored], own: Mapping[str, Tensor], parts: Mapping[str, Part]
) -> None:
    wrong = []
    for name in stored:
        found, shape, dtype = stored[name], parts[name].shape, own[name].dtype
        converts = found.dtype.is_floating_point and dtype.is_floating_point
        if found.shape != tuple(shape) or (found.dtype != dtype and not converts):
            wrong.append(f"{name} is {list(found.shape)} {found.dtype} there, {list(shape)} {dtype} in the model")
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(wrong[:_SHOWN])}{more}.")


def _check_equal(
    path: Path, stored: Mapping[str, _Stored], parts: Mapping[str, Part], first: str, others: list[str]
) -> None:
    for other in others:
        if not torch.equal(stored[first].read(parts[first]), stored[other].read(parts[first])):
            raise CheckpointError(f"{path} has two values for {first} and {other}, which are one tensor in the model.")


def _open(path: Path, world: World | None) -> dict[str, _Stored]:
    if (path / MANIFEST_NAME).exists() or (path / "checkpoints").is_dir() or list_checkpoints(path):
        return _open_checkpoint(path, world)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"there are no weights at {path}: it does not exist.")
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix in _TORCH_FILES:
        return _open_torch(path)
    raise CheckpointError(
        f"{path} ends in {path.suffix!r}; weights are read from .safetensors, {', '.join(_TORCH_FILES)}, "
        "a folder of .safetensors, or a run."
    )


def _open_checkpoint(path: Path, world: World | None) -> dict[str, _Stored]:
    found, skipped = newest_good(path, world)
    if found is None:
        raise CheckpointError(f"no good checkpoint in {path}." + "".join(f"\n  {why}" for why in skipped))
    manifest = read_manifest(found.path)
    slices, tree = Slices(found.path, manifest), manifest.outline()

    def stored(leaf: Leaf) -> _Stored:
        entry = manifest.tensors[leaf.name]
        dtype = dtype_of(entry.dtype)
        if not leaf.complex:
            return _Stored(entry.shape, dtype, lambda part: slices.read(leaf.name, part))
        read = lambda part: torch.view_as_complex(slices.read(leaf.name, in_pairs(part)))  # noqa: E731 (as above)
        return _Stored(entry.shape[:-1], dtype.to_complex(), read)

    return {name: stored(leaf) for name, leaf in tree["model"].items() if isinstance(leaf, Leaf) and not leaf.numpy}


def _open_folder(path: Path) -> dict[str, _Stored]:
    indexes, files = sorted(path.glob(_INDEX)), sorted(path.glob("*.safetensors"))
    if len(indexes) > 1:
        raise CheckpointError(f"{path} has {len(indexes)} indexes; name one file, or keep one model in the folder.")
    if indexes:
        return _open_indexed(path, indexes[0])
    if not files:
        raise CheckpointError(f"{path} is a folder without .safetensors; name a file in it, or a run.")
    stored: dict[str, _Stored] = {}
    for file in files:
        for name, tensor in _open_safetensors(file).items():
            if name in stored:
                raise CheckpointError(f"{path} holds {name!r} in two files, and has no index that says which is meant.")
            stored[name] = tensor
    return stored


def _open_indexed(path: Path, index: Path) -> dict[str, _Stored]:
    try:
        places = json.loads(index.read_text())["weight_map"]
        files = {file: _open_safetensors(path / Path(file).name) for file in sorted(set(places.values()))}
        return {name: files[file][name] for name, file in places.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"names the tensor {error} in a file that does not hold it" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{index} cannot be followed: {what}.") from error


def _open_safetensors(path: Path) -> dict[str, _Stored]:
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(PREFIX_BYTES), "little")
            text = file.read(min(length, num_bytes, MAX_HEADER_BYTES))
        spans = parse_header(text)
        if PREFIX_BYTES + length + num_data_bytes(spans) != num_bytes:
            raise CheckpointError(f"it has {num_bytes} bytes, and its header says otherwise: it is cut off or damaged.")
        memory = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
    data = memory[PREFIX_BYTES + length :]

    def stored(span: Span) -> _Stored:
        return _Stored(span.shape, dtype_of(span.dtype), lambda part: cut(_view(data, span), part))

    return {name: stored(span) for name, span in spans.items()}


def _view(data: Tensor, span: Span) -> Tensor:
    raw, dtype = data[span.start : span.stop], dtype_of(span.dtype)
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()  # written without padding: a view must begin at a multiple of its width
    return raw.view(dtype).view(span.shape)


def _open_torch(path: Path) -> dict[str, _Stored]:
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a file that is no such file makes the unpickler raise
        raise CheckpointError(
            f"{path} is no file of torch.save that can be read safely and in parts ({str(error).splitlines()[0]}). "
            "Save the state dict anew: torch.save(model.state_dict(), path)."
        ) from error
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        keys = ", ".join(map(str, state))[:200] if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            f"{path} holds no state dict, but: {keys}. Save it alone: torch.save(model.state_dict(), path)."
        )
    return {str(name): _stored_tensor(value) for name, value in state.items()}


def _stored_tensor(tensor: Tensor) -> _Stored:
    return _Stored(tuple(tensor.shape), tensor.dtype, lambda part: cut(tensor, part))
