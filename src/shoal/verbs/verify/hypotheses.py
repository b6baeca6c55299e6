"""What a wrong tensor is: pure tests of one guess after the other, on numbers alone."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.verbs.verify.compare import distance

SAME = 1e-8  # a guess holds: far above rounding, far below what a wrong guess leaves


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the numbers of a layout are, to find them again in a ratio.

    Attributes:
        sizes: of the axes above 1, outermost first.
        micro: micro-batches per rank and step.
        stages: of a pipeline; more than the size of pp where a rank has several.
        coordinates: of each rank, by axis.
        count: what the global loss is divided by.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    micro: int = 1
    stages: int = 1
    coordinates: Sequence[Mapping[str, int]] = ()
    count: float | None = None

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def num_data(self) -> int:
        return math.prod(n for axis, n in self.sizes.items() if axis in ("dp", "fsdp"))

    def axis_sets(self) -> Iterator[tuple[str, ...]]:
        """One axis, then two, and so on."""
        for number in range(1, len(self.sizes) + 1):
            yield from itertools.combinations(self.sizes, number)


def ratio_and_cosine(found: Tensor, reference: Tensor) -> tuple[float, float]:
    """How long and how parallel: (found . reference) / |reference|^2, and the cosine between the two."""
    if found.shape != reference.shape:
        return math.nan, math.nan
    a, b = found.double().flatten(), reference.double().flatten()
    product, lengths = float(a @ b), float(a.norm()) * float(b.norm())
    square = float(b @ b)
    return (product / square if square else math.nan), (product / lengths if lengths else math.nan)


def ratio_of(found: float, reference: float) -> float:
    """nan where there is none."""
    return found / reference if reference else math.nan


def same(a: float, b: float) -> bool:
    """Two ratios are one."""
    return math.isclose(a, b, rel_tol=SAME)


def amount(ratio: float) -> str:
    """`half of`, `twice`, `0.875 times`."""
    words = {0.5: "half of", 2.0: "twice", 1 / 3: "a third of", 0.25: "a quarter of", -1.0: "minus"}
    return next((word for value, word in words.items() if same(ratio, value)), f"{ratio:.6g} times")


def reasons(ratio: float, setting: Setting) -> list[str]:
    """Which numbers of the layout and the batch the ratio is."""
    sizes = {" x ".join(axes): math.prod(setting.sizes[axis] for axis in axes) for axes in setting.axis_sets()}
    more = [over for over, size in sizes.items() if same(ratio, size)]
    less = [over for over, size in sizes.items() if same(ratio, 1 / size)]
    found = [f"it is summed over {', or over '.join(more)} once too often, or not divided by its size"] if more else []
    if less:
        found.append(f"a sum over {', or over '.join(less)} is missing, or it is divided by its size once too often")
    if setting.num_ranks != setting.num_data and same(ratio, setting.num_ranks / setting.num_data):
        found.append("the number of processes stands where the size of the data axes belongs")
    if setting.stages != setting.sizes.get("pp", 1) and same(ratio, setting.stages):
        found.append(f"it is summed over the {setting.stages} stages once too often")
    if setting.stages != setting.sizes.get("pp", 1) and same(ratio, 1 / setting.stages):
        found.append(f"it is divided by the number of stages, {setting.stages}")
    if setting.micro > 1 and same(ratio, setting.micro):
        found.append("micro-batches are summed where they are averaged")
    if setting.micro > 1 and same(ratio, 1 / setting.micro):
        found.append("it is divided by the number of micro-batches once too often")
    return found + _of_count(ratio, setting)


def _of_count(ratio: float, setting: Setting) -> list[str]:
    count = setting.count
    if not count or count == 1:
        return []
    found = []
    if same(ratio, count):
        found.append("it is the sum, not the mean")
    elif same(ratio, count / setting.num_data):
        found.append("it is the mean of the ranks' sums, not the mean over all")
    if same(ratio, 1 / count):
        found.append("it is divided by the count twice")
    return found


def missing_reduction(
    versions: Sequence[Tensor], reference: Tensor, setting: Setting, holders: Sequence[int] = ()
) -> str:
    """Whether the ranks' own values, added up or averaged over some axes, are the reference; empty where not.

    Args:
        holders: the coordinates on pp of those that have one of their own; all, where it is left out.
    """
    if len(versions) != setting.num_ranks or len({tuple(v.shape) for v in versions}) > 1:
        return ""
    for axes in setting.axis_sets():
        groups = [[r for r in group if _holds(r, setting, holders)] for group in groups_of(setting, axes)]
        groups = [group for group in groups if group]
        if len(groups[0]) < 2:
            continue
        sums = [sum((versions[rank].double() for rank in group[1:]), versions[group[0]].double()) for group in groups]
        size = len(groups[0])
        for word, divisor in (("sum", 1), ("mean", size)):
            if all(distance(total / divisor, reference.double()) < SAME for total in sums):
                return f"a {word} over {' x '.join(axes)} is missing"
    return ""


def _holds(rank: int, setting: Setting, holders: Sequence[int]) -> bool:
    return not holders or setting.coordinates[rank].get("pp", 0) in holders


def groups_of(setting: Setting, axes: tuple[str, ...]) -> list[list[int]]:
    """The ranks that differ on these axes alone."""
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, place in enumerate(setting.coordinates):
        rest = tuple((axis, index) for axis, index in place.items() if axis not in axes)
        groups.setdefault(rest, []).append(rank)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What one micro-batch of one data rank adds to a gradient, and to the count."""

    data_rank: int
    micro: int
    gradient: Tensor
    count: float


def of_portions(found: Tensor, portions: Sequence[Portion]) -> str:
    """Whether a gradient is made of the parts of the batch in a wrong way; empty where not."""
    if not portions or any(portion.gradient.shape != found.shape for portion in portions):
        return ""
    ranks, micros = ({p.data_rank for p in portions}, {p.micro for p in portions})
    total = _sum(portions)
    for rank in ranks if len(ranks) > 1 else ():
        own = _sum([p for p in portions if p.data_rank == rank])
        if _is_along(found, own):
            return f"it is that of the samples of data rank {rank} alone"
        if len(ranks) > 2 and _is_along(found, total - own):
            return f"the share of data rank {rank} is left out"
    for micro in micros if len(micros) > 1 else ():
        own = _sum([p for p in portions if p.micro == micro])
        if _is_along(found, own):
            return f"it is that of micro-batch {micro + 1} of {len(micros)} alone: the others are lost"
        if len(micros) > 2 and _is_along(found, total - own):
            return f"that of micro-batch {micro + 1} of {len(micros)} is left out"
    for parts in (ranks, [(p.data_rank, p.micro) for p in portions]):
        means = _mean_of_means(portions, by_rank=parts is ranks)
        if means is not None and _is_along(found, means):
            whose = "ranks'" if parts is ranks else "micro-batches'"
            return f"it is the mean of the {whose} means, which weighs those with few samples or tokens too much"
    return ""


def _sum(portions: Sequence[Portion]) -> Tensor:
    return torch.stack([p.gradient.double() for p in portions]).sum(0)


def _mean_of_means(portions: Sequence[Portion], *, by_rank: bool) -> Tensor | None:
    groups: dict[Any, list[Portion]] = {}
    for portion in portions:
        groups.setdefault(portion.data_rank if by_rank else (portion.data_rank, portion.micro), []).append(portion)
    counts = [sum(p.count for p in group) for group in groups.values()]
    if len(set(counts)) < 2 or 0 in counts:
        return None
    return torch.stack([_sum(g) / count for g, count in zip(groups.values(), counts, strict=True)]).sum(0)


def _is_along(found: Tensor, direction: Tensor) -> bool:
    ratio, cosine = ratio_and_cosine(found, direction)
    return ratio > 0 and 1 - cosine < SAME and distance(found.double(), ratio * direction) < SAME


def is_scaled(found: Tensor, reference: Tensor) -> float | None:
    """The factor, where the one is the other times a factor."""
    ratio, _ = ratio_and_cosine(found, reference)
    scaled = ratio * reference.double() if math.isfinite(ratio) and ratio else None
    return ratio if scaled is not None and distance(found.double(), scaled) < SAME else None


def is_reordered(found: Tensor, reference: Tensor) -> bool:
    """The right values in the wrong places."""
    if found.shape != reference.shape or found.numel() < 2:
        return False
    ours, theirs = (t.double().flatten().sort().values for t in (found, reference))
    return distance(ours, theirs) < SAME


def bias_count(found: Tensor, reference: Tensor, bias: Tensor) -> float | None:
    """How often a bias is in an output that should hold it once; None where the two differ by something else."""
    if found.shape != reference.shape or found.dim() < 2:
        return None
    for dim in (found.dim() - 1, 1):
        if found.shape[dim] != bias.numel():
            continue
        shape = [1] * found.dim()
        shape[dim] = -1
        apart = found.double() - reference.double()
        ratio, _ = ratio_and_cosine(apart, bias.double().view(shape).expand_as(apart))
        if math.isfinite(ratio) and abs(ratio) > SAME:
            expected = ratio * bias.double().view(shape).expand_as(apart)
            if distance(apart, expected) < SAME:
                return ratio + 1
    return None


def is_normalised_alone(found: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """A BatchNorm's output whose own samples have the mean and the spread that the global batch should have."""
    if found.dim() < 2 or found.numel() // found.shape[1] < 2:
        return False
    dims = [d for d in range(found.dim()) if d != 1]
    mean, spread = found.double().mean(dims), found.double().var(dims, unbiased=False).sqrt()
    centre = torch.zeros_like(mean) if bias is None else bias.double()
    size = torch.ones_like(mean) if weight is None else weight.double().abs()
    return bool(((mean - centre).abs() < 1e-6).all()) and bool(((spread - size).abs() < 1e-2 * size).all())
