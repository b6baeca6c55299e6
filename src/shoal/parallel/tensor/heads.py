"""Sizes that code spells out, inside the cut part of a model: `x.view(b, t, self.heads, -1)`, `qkv.split(width)`.

The code names sizes of the whole model, and the tensor is a rank's part. `Watch` notes, while the whole part runs
once, what each such call did; `Narrow` puts the rank's own sizes in their place. A call is known by its place in the
code, so batch, length and the number of layers may change. What `Narrow` guesses is checked against the whole run
by whoever uses it; a guess that is wrong never reaches a training.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.parallel.tensor.units import Units

Site = tuple[CodeType, int]
Shape = tuple[int, ...]

_RESHAPES: set[Any] = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten, Tensor.expand}
_SPLITS: set[Any] = {Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes}
_BETWEEN = ("torch/overrides.py", "torch/_tensor.py", "torch/functional.py")  # they only pass the call on


def _site() -> Site:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back
    assert frame is not None
    return frame.f_code, frame.f_lasti


@dataclass
class Seen:
    """What each call did in the run of the whole: input shape, and output shape or the sizes of the pieces."""

    reshapes: dict[Site, list[tuple[Shape, Shape]]] = field(default_factory=lambda: defaultdict(list))
    splits: dict[Site, list[tuple[int, Shape]]] = field(default_factory=lambda: defaultdict(list))

    def places(self) -> set[Site]:
        """Where in the code the calls are."""
        return {*self.reshapes, *self.splits}

    def head_counts(self, widths: Sequence[int]) -> list[int]:
        """Numbers of equal units into which the code cuts features of these widths, the likeliest first."""
        found: list[int] = []
        leading: list[int] = []
        for before, after in (pair for pairs in self.reshapes.values() for pair in pairs):
            for ins, outs in matched(before, after):
                if len(ins) == 1 and len(outs) > 1 and before[ins[0]] in widths:
                    sizes = [after[dim] for dim in outs]
                    found += sizes
                    leading.append(sizes[1] if sizes[0] == 3 and len(sizes) > 2 else sizes[0])
        likely = [gcd(*leading)] if leading else []
        return list(dict.fromkeys([*likely, *sorted(set(found))]))

    def fused(self, width: int) -> list[tuple[int, ...]]:
        """Ways in which the code may take features of this width apart, not at all among them."""
        ways = [sizes for pairs in self.splits.values() for whole, sizes in pairs if whole == width] + [(width,)]
        for before, after in (pair for pairs in self.reshapes.values() for pair in pairs):
            for ins, outs in matched(before, after):
                if len(ins) == 1 and before[ins[0]] == width and len(outs) > 1 and after[outs[0]] in (2, 3):
                    ways.append((width // after[outs[0]],) * after[outs[0]])
        return list(dict.fromkeys(ways))


class Watch(TorchFunctionMode):
    """Notes the calls that spell sizes out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _tensor_first(args, kwargs)
        out = func(*args, **kwargs)
        if func in _RESHAPES:
            self.seen.reshapes[_site()].append((tuple(args[0].shape), tuple(out.shape)))
        elif func in _SPLITS or func in (Tensor.chunk, torch.chunk):
            dim = _dim_of(args, kwargs)
            self.seen.splits[_site()].append((args[0].shape[dim], tuple(piece.shape[dim] for piece in out)))
        return out


@dataclass(frozen=True)
class Rule:
    """What a reshape does to a cut dim.

    Attributes:
        position: of the output dim that is cut.
        merged: the input dims that become that one alone; empty where one becomes several.
        known_by: dim and size by which a cut input is told from a whole one, where the size does not vary.
    """

    position: int
    merged: tuple[int, ...]
    known_by: tuple[int, int] | None

    def applies(self, shape: Shape) -> bool:
        """Whether an input of this shape is the cut one."""
        return self.known_by is None or (self.known_by[0] < len(shape) and shape[self.known_by[0]] == self.known_by[1])


@dataclass
class Rules:
    """The rules of all calls, for one rank."""

    units: Units
    rank: int
    reshapes: dict[Site, list[Rule]] = field(default_factory=dict)
    splits: set[Site] = field(default_factory=set)
    whole: set[Site] = field(default_factory=set)  # reshapes that tensors which are not cut pass too

    @property
    def is_needed(self) -> bool:
        return bool(self.reshapes or self.splits)


class Narrow(TorchFunctionMode):
    """Runs the code of the whole on a rank's part; with `seen` it learns the rules on the way."""

    def __init__(self, rules: Rules, seen: Seen | None = None, choice: int = 0) -> None:
        super().__init__()
        self._rules, self._seen, self._choice = rules, seen, choice
        self._calls: dict[Site, int] = defaultdict(int)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _tensor_first(args, kwargs)
        if func in _RESHAPES:
            args, kwargs = self._reshape(func, _site(), args, kwargs)
        elif func in _SPLITS:
            args, kwargs = self._split(_site(), args, kwargs)
        return func(*args, **kwargs)

    def _reshape(self, func: Any, site: Site, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tensor = args[0]
        if self._seen is not None:
            self._learn(site, tuple(tensor.shape), spreads=func is Tensor.expand)
        rules = self._rules.reshapes.get(site, ())
        alike = len({rule.position for rule in rules}) == 1 and site not in self._rules.whole
        for rule in rules:
            if alike or rule.applies(tuple(tensor.shape)):
                return self._narrowed(func, args, kwargs, rule)
        return args, kwargs

    def _learn(self, site: Site, local: Shape, *, spreads: bool) -> None:
        assert self._seen is not None
        pairs = self._seen.reshapes.get(site, [])
        index = self._calls[site]
        self._calls[site] += 1
        if index >= len(pairs) or len(pairs[index][0]) != len(local):
            return
        whole, after = pairs[index]
        cut = [dim for dim in range(len(local)) if local[dim] != whole[dim]]
        if not cut:
            self._rules.whole.add(site)
        if len(cut) != 1:
            return
        shift = len(after) - len(whole)
        pairs_of_dims = [([d], [d + shift]) for d in range(len(whole))] if spreads else matched(whole, after)
        for ins, outs in pairs_of_dims:
            if cut[0] in ins and outs:
                position = self._pick(outs, after)
                known = whole[cut[0]] % self._rules.units.count == 0
                rule = Rule(
                    position,
                    tuple(ins) if len(outs) == 1 else (),
                    (cut[0], local[cut[0]]) if known else None,
                )
                rules = self._rules.reshapes.setdefault(site, [])
                if rule not in rules:
                    rules.append(rule)

    def _pick(self, outs: Sequence[int], after: Shape) -> int:
        count = self._rules.units.count
        fitting = [dim for dim in outs if after[dim] > 1 and after[dim] % count == 0] or list(outs)
        return fitting[min(self._choice, len(fitting) - 1)]

    def _narrowed(self, func: Any, args: Any, kwargs: Any, rule: Rule) -> tuple[Any, Any]:
        tensor = args[0]
        if func in (Tensor.unflatten, torch.unflatten):
            dim, sizes = kwargs.get("dim", args[1] if len(args) > 1 else 0), kwargs.get("sizes", args[-1])
            return (tensor, dim, self._replaced(tensor, sizes, rule.position - dim % tensor.dim(), rule)), {}
        shape = kwargs.get("shape", kwargs.get("size", args[1:]))
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return args, kwargs  # view(dtype)
        sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape)
        if func is Tensor.expand:
            sizes[rule.position] = -1  # as it is
            return (tensor, sizes), {}
        return (tensor, self._replaced(tensor, sizes, rule.position, rule)), {}

    def _replaced(self, tensor: Tensor, shape: Sequence[int], position: int, rule: Rule) -> list[int]:
        sizes, count = list(shape), self._rules.units.count
        if not 0 <= position < len(sizes) or sizes[position] == -1:
            return sizes
        if rule.merged:
            sizes[position] = prod(tensor.shape[dim] for dim in rule.merged)
        elif -1 not in sizes:
            sizes[position] = -1
        elif sizes[position] % count == 0:  # heads, or heads times the batch
            sizes[position] = self._rules.units.local(sizes[position], self._rules.rank)
        return sizes

    def _split(self, site: Site, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dim, tensor = _dim_of(args, kwargs), args[0]
        seen = self._seen.splits.get(site, ()) if self._seen is not None else ()
        if any(whole != tensor.shape[dim] for whole, _ in seen):
            self._rules.splits.add(site)
        sizes = kwargs.get("split_size", kwargs.get("split_size_or_sections", args[1] if len(args) > 1 else None))
        if site not in self._rules.splits or sizes is None:
            return args, kwargs
        units, rank = self._rules.units, self._rules.rank
        listed = [sizes] if isinstance(sizes, int) else list(sizes)
        if any(size % units.count for size in listed):
            return args, kwargs
        local = [units.local(size, rank) for size in listed]
        if (sum(local) if not isinstance(sizes, int) else local[0]) > tensor.shape[dim]:
            return args, kwargs
        return (tensor, local[0] if isinstance(sizes, int) else local, dim), {}


def _tensor_first(args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The same call with its tensor by position: `torch.reshape(input=x, shape=...)`."""
    named = dict(kwargs or {})
    first = next((name for name in ("input", "tensor") if name in named), None)
    return (args, named) if args or first is None else ((named.pop(first),), named)


def _dim_of(args: Any, kwargs: Any) -> int:
    return int(kwargs.get("dim", args[2] if len(args) > 2 else 0))


def matched(before: Shape, after: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of dims, in and out, that hold the same number of elements: (6, 64) -> (6, 4, 16) is
    ([0], [0]), ([1], [1, 2])."""
    i = j = 0
    while i < len(before) or j < len(after):
        ins, outs = [], []
        if i < len(before):
            ins, i = [i], i + 1
        if j < len(after):
            outs, j = [j], j + 1
        while prod(before[k] for k in ins) != prod(after[k] for k in outs):
            if prod(before[k] for k in ins) < prod(after[k] for k in outs):
                if i >= len(before):
                    return
                ins, i = [*ins, i], i + 1
            else:
                if j >= len(after):
                    return
                outs, j = [*outs, j], j + 1
        yield ins, outs
