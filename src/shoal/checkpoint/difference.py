"""What two checkpoints hold that is not the same: job, step, and tensor by tensor."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.read import identity_difference, newest_good, read_manifest
from shoal.checkpoint.slices import Slices
from shoal.errors import CheckpointError
from shoal.parallel.parts import Part


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Of one tensor that both have, in the same shape.

    Attributes:
        relative: the largest difference, over the largest value of the first.
        first: where it is largest.
    """

    name: str
    absolute: float
    relative: float
    first: tuple[int, ...]


@dataclass(kw_only=True)
class Difference:
    """Of two checkpoints.

    Attributes:
        facts: lines about step, job and layout; a layout changes where a tensor lies, and no value.
        only: names that one of them has, or has in another shape or dtype.
        tensors: those that differ, the most first.
        num_equal: tensors that are equal to the bit.
    """

    paths: tuple[Path, Path]
    facts: list[str] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    num_equal: int = 0

    @property
    def is_same(self) -> bool:
        """Every tensor is equal to the bit, and neither has more than the other."""
        return not self.only and not self.tensors


def compare(first: Path, second: Path) -> Difference:
    """Compare two checkpoints, or the newest good ones of two runs; a tensor of each is in memory at a time.

    Raises:
        CheckpointError: a folder without a good checkpoint, or a damaged tensor.
    """
    paths = _chosen(first), _chosen(second)
    ours, theirs = (read_manifest(path) for path in paths)
    found = Difference(paths=paths)
    if ours.step != theirs.step:
        found.facts.append(f"step: {ours.step} and {theirs.step}")
    found.facts += identity_difference(ours.job, theirs.job)
    slices = [Slices(path, manifest) for path, manifest in zip(paths, (ours, theirs), strict=True)]
    for name in dict.fromkeys((*ours.tensors, *theirs.tensors)):
        odd = _odd(name, ours, theirs)
        if odd:
            found.only.append(odd)
            continue
        part = Part.whole(ours.tensors[name].shape)
        difference = _difference(name, *(each.read(name, part) for each in slices))
        if difference is None:
            found.num_equal += 1
        else:
            found.tensors.append(difference)
    found.tensors.sort(key=lambda tensor: -tensor.relative)
    return found


def _chosen(path: Path) -> Path:
    good, skipped = newest_good(path)
    if good is None:
        why = f": {skipped[0]}" if skipped else ""
        raise CheckpointError(f"{path} holds no good checkpoint{why}. Name a run's folder, or one checkpoint.")
    return good.path


def _odd(name: str, ours: Manifest, theirs: Manifest) -> str:
    if name not in theirs.tensors:
        return f"{name}: in the first alone"
    if name not in ours.tensors:
        return f"{name}: in the second alone"
    a, b = ours.tensors[name], theirs.tensors[name]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{name}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    return ""


def _difference(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> TensorDifference | None:
    if torch.equal(ours, theirs):
        return None
    kind = torch.complex128 if ours.is_complex() else torch.float64
    a, b = ours.to(kind), theirs.to(kind)
    apart = (a - b).abs()
    apart[(a == b) | (a.isnan() & b.isnan())] = 0.0  # infinities and NaN in both are no difference
    if not apart.any():
        return None
    place = int(apart.nan_to_num(torch.inf).argmax())
    largest = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max())
    absolute = float(apart.flatten()[place])
    first = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), apart.shape)) if apart.dim() else ()
    return TensorDifference(name=name, absolute=absolute, relative=absolute / (largest or 1.0), first=first)
