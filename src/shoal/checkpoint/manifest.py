"""What a checkpoint holds: one JSON file, written last, that covers every byte of all others and of itself.

Each tensor has a global shape and one or more slices, each in some file: a whole tensor is one slice at
offset 0, a tensor that four ranks hold in parts is four. The checksum in the last line covers all bytes
before it, and a reader demands the very bytes that a writer would write: no flipped bit, blank or repeated
key goes unseen. What one rank has written it tells in the same form; rank 0 joins these.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.checkpoint.pack import Leaf, Skeleton, merge, outline, pack, unpack
from shoal.checkpoint.tensorfile import PREFIX_BYTES, blocks_of, dtype_of, num_bytes_of
from shoal.errors import CheckpointError

FORMAT = 1
MANIFEST_NAME = "manifest.json"
_KIND = "shoal checkpoint"
_START = f'{{"kind":"{_KIND}"'.encode()
# One path component, no leading dot: never absolute, never `..`, never hidden.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A box of one tensor, under one key of one file; `offset` is its first corner in the global tensor.

    `sha256` has one checksum for each of `blocks_of` it, or one for all of it.
    """

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    sha256: tuple[str, ...]

    def blocks(self, dtype: str) -> list[tuple[int, int, str]]:
        """The rows (start, stop) of the slice that each checksum covers, and the checksum."""
        if len(self.sha256) == 1:
            return [(0, self.shape[0] if self.shape else 1, self.sha256[0])]
        rows = blocks_of(dtype, self.shape)
        return [(start, stop, digest) for (start, stop), digest in zip(rows, self.sha256, strict=True)]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor: its global shape, and the slices that tile it."""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file beside the manifest; the hash covers length prefix and header, the slices cover the rest."""

    num_bytes: int
    header_sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole index of a checkpoint; `job` is the identity that a resume compares."""

    step: int
    layout: str
    job: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    skeleton: Skeleton = None
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """The one canonical form: a top-level field a line, checksum last."""
        body = b"{" + ",\n".join(f'"{name}":{_dump(value)}' for name, value in self._fields()).encode()
        return body + _seal(body)

    def _fields(self) -> Iterator[tuple[str, Any]]:
        tensors, job = pack(self.job)
        if tensors:
            raise CheckpointError(
                f"the job's identity holds a tensor at {next(iter(tensors))!r}; it holds plain values."
            )
        yield "kind", _KIND
        yield "format", self.format
        yield "step", self.step
        yield "layout", self.layout
        yield "job", job
        yield "versions", self.versions
        yield "files", {name: vars(entry) for name, entry in self.files.items()}
        yield "tensors", {name: _tensor_json(entry) for name, entry in self.tensors.items()}
        yield "tree", self.skeleton

    def outline(self) -> Any:
        """The saved tree, with a `Leaf` in the place of each tensor.

        Raises:
            CheckpointError: the tree cannot be, or does not fit the tensors.
        """
        return outline(self.skeleton, check=self._check_leaf)

    def _check_leaf(self, leaf: Leaf) -> None:
        entry = self.tensors[leaf.name]
        pairs = entry.shape[-1:] == (2,) and dtype_of(entry.dtype).is_floating_point
        if leaf.complex and not pairs:
            raise CheckpointError(f"tensor {leaf.name!r} holds no pairs of reals, and is said to be complex.")

    @classmethod
    def from_bytes(cls, raw: bytes, *, whole: bool = True) -> "Manifest":
        """Read and check a manifest: its checksum first, then its form, then every field.

        Args:
            whole: it is of a whole checkpoint, not of what one rank has written.

        Raises:
            CheckpointError: foreign, damaged, from a newer version, or with values that cannot be.
        """
        if not raw.startswith(_START):
            raise CheckpointError("is no manifest of shoal, or its first bytes are damaged.")
        body = raw[: -len(_seal(b""))]
        if raw != body + _seal(body):
            raise CheckpointError("is damaged: its bytes do not match its checksum.")
        manifest = _parse(raw)
        check_places(manifest)
        if whole:
            check_tilings(manifest)
        return manifest


def join(parts: Sequence[Manifest]) -> Manifest:
    """The manifest of a checkpoint from those of all ranks that wrote, rank 0's first.

    Raises:
        CheckpointError: what the ranks hold does not make up whole tensors.
    """
    whole = parts[0]
    for part in parts[1:]:
        tensors = dict(whole.tensors)
        for name, entry in part.tensors.items():
            tensors[name] = _join_slices(name, tensors[name], entry) if name in tensors else entry
        skeleton = merge(whole.skeleton, part.skeleton)
        whole = replace(whole, files={**whole.files, **part.files}, tensors=tensors, skeleton=skeleton)
    check_places(whole)
    check_tilings(whole)
    whole.outline()
    return whole


def _join_slices(name: str, ours: TensorEntry, theirs: TensorEntry) -> TensorEntry:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        shown = f"{ours.dtype} {list(ours.shape)} and {theirs.dtype} {list(theirs.shape)}"
        raise CheckpointError(f"tensor {name!r} is {shown} on different ranks.")
    slices = sorted((*ours.slices, *theirs.slices), key=lambda part: part.offset)
    return replace(ours, slices=tuple(slices))


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _seal(body: bytes) -> bytes:
    return f',\n"sha256":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def _tensor_json(entry: TensorEntry) -> dict[str, Any]:
    return {**vars(entry), "slices": [_slice_json(part) for part in entry.slices]}


def _slice_json(part: Slice) -> dict[str, Any]:
    return {**vars(part), "sha256": part.sha256[0] if len(part.sha256) == 1 else part.sha256}


def _parse(raw: bytes) -> Manifest:
    try:
        fields = json.loads(raw)
        if fields["format"] != FORMAT:
            raise CheckpointError(
                f"has format {fields['format']!r}; this version of shoal reads format {FORMAT}. "
                "Use the version that wrote it."
            )
        manifest = Manifest(
            step=_count(fields["step"]),
            layout=_text(fields["layout"]),
            job=_mapping(unpack(fields["job"], {})),
            versions={name: _text(version) for name, version in fields["versions"].items()},
            files={name: _parse_file(entry) for name, entry in fields["files"].items()},
            tensors={name: _parse_tensor(entry) for name, entry in fields["tensors"].items()},
            skeleton=fields["tree"],
        )
        if manifest.to_bytes() != raw:
            raise CheckpointError("is not in the form that shoal writes (blanks, order or repeated keys).")
        return manifest
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"has a field that cannot be read ({type(error).__name__}: {error}).") from error


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{str(value)[:40]!r} is no mapping")
    return value


def _parse_file(entry: Mapping[str, Any]) -> FileEntry:
    return FileEntry(num_bytes=_count(entry["num_bytes"]), header_sha256=_digest(entry["header_sha256"]))


def _parse_tensor(entry: Mapping[str, Any]) -> TensorEntry:
    slices = tuple(_parse_slice(part) for part in entry["slices"])
    return TensorEntry(dtype=_text(entry["dtype"]), shape=_shape(entry["shape"]), slices=slices)


def _parse_slice(part: Mapping[str, Any]) -> Slice:
    return Slice(
        file=_text(part["file"]),
        key=_text(part["key"]),
        offset=_shape(part["offset"]),
        shape=_shape(part["shape"]),
        sha256=_digests(part["sha256"]),
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _digest(value: Any) -> str:
    if not _SHA256.fullmatch(_text(value)):
        raise ValueError(f"{value!r} is no sha256")
    return str(value)


def _digests(value: Any) -> tuple[str, ...]:
    return tuple(map(_digest, value)) if isinstance(value, list) else (_digest(value),)


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no shape")
    shape = tuple(_count(size) for size in value)
    if math.prod(filter(None, shape)) >= 2**63:
        raise ValueError(f"{value!r} is no shape of a tensor")
    return shape


def check_places(manifest: Manifest) -> None:
    """What a hostile or buggy writer could have sealed: names, sizes, checksums, two slices at one place."""
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"names the file {name!r}; a file lies in the checkpoint itself, by a plain name.")
    places = set()
    rest = {name: entry.num_bytes - PREFIX_BYTES for name, entry in manifest.files.items()}
    for name, entry in manifest.tensors.items():
        for part in entry.slices:
            if part.file not in manifest.files:
                raise CheckpointError(f"puts tensor {name!r} into {part.file!r}, a file that it does not list.")
            if (part.file, part.key) in places:
                raise CheckpointError(f"uses {part.key!r} of {part.file} for two tensors.")
            places.add((part.file, part.key))
            rest[part.file] -= num_bytes_of(entry.dtype, part.shape)
            if rest[part.file] < 0:
                raise CheckpointError(
                    f"puts more into {part.file} than its {manifest.files[part.file].num_bytes} bytes."
                )
            if len(part.sha256) not in (1, len(blocks_of(entry.dtype, part.shape))):
                raise CheckpointError(f"has {len(part.sha256)} checksums for {part.key!r} of {part.file}.")


def check_tilings(manifest: Manifest) -> None:
    """Every tensor is there, each element once."""
    for name, entry in manifest.tensors.items():
        check_tiling(name, entry)


def check_tiling(name: str, entry: TensorEntry) -> None:
    """Slices cover each element once: inside the tensor, pairwise apart, as many elements as it has."""
    held = 0
    for part in entry.slices:
        ends = [offset + size for offset, size in zip(part.offset, part.shape, strict=False)]
        ranks = {len(part.offset), len(part.shape), len(entry.shape)}
        if len(ranks) != 1 or any(end > size for end, size in zip(ends, entry.shape, strict=True)):
            raise CheckpointError(f"has a slice of tensor {name!r} that does not lie inside shape {list(entry.shape)}.")
        held += num_bytes_of(entry.dtype, part.shape)
    if not entry.slices or held != num_bytes_of(entry.dtype, entry.shape) or _any_overlap(entry.slices):
        raise CheckpointError(f"has slices of tensor {name!r} that do not tile its shape {list(entry.shape)}.")


def _any_overlap(slices: tuple[Slice, ...]) -> bool:
    """A sweep along dim 0: shards of rows meet only their neighbour, so thousands of them stay cheap."""
    filled = [part for part in slices if math.prod(part.shape)]
    filled.sort(key=lambda part: part.offset)
    for i, part in enumerate(filled):
        if not part.shape:
            return len(filled) > 1
        end = part.offset[0] + part.shape[0]
        rest = itertools.takewhile(lambda other: other.offset[0] < end, filled[i + 1 :])  # noqa: B023 (used at once)
        if any(_overlap(part, other) for other in rest):
            return True
    return False


def _overlap(a: Slice, b: Slice) -> bool:
    starts = [max(pair) for pair in zip(a.offset, b.offset, strict=True)]
    ends_a = [offset + size for offset, size in zip(a.offset, a.shape, strict=True)]
    ends_b = [offset + size for offset, size in zip(b.offset, b.shape, strict=True)]
    return all(start < min(ends) for start, *ends in zip(starts, ends_a, ends_b, strict=True))
