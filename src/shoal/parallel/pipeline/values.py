"""Tensors as a walk sees them: what is in a tree of them, and what each carries.

A value is numbered in its own `__dict__`, by each walk anew.
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map_only

from shoal.parallel.writes import memory_of

NUMBER = "_shoal_value"  # of a tensor: which value of the program it is
ELSEWHERE = "_shoal_elsewhere"  # of a tensor: it is a shape, and its numbers are in another stage
SIDE = "_shoal_side"  # of a tensor: the atom that keeps it as an attribute
AWAY = "_shoal_away"  # of a tensor without elements: the name of the one that other stages have
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_MARKS = frozenset((NUMBER, SIDE, AWAY))
# Functions that may draw random numbers; one too many does no harm.
_DRAWS = re.compile(
    "dropout|rand|bernoulli|normal|uniform|multinomial|attention|gumbel|exponential|geometric|poisson|rrelu|cauchy|"
    "fractional"
)


def is_followed(leaf: Any) -> bool:
    """Whether a walk must see what is done with it."""
    if type(leaf) in _PLAIN:
        return False
    return not _MARKS.isdisjoint(getattr(leaf, "__dict__", ())) or isinstance(leaf, nn.Parameter)


def leaves_in(args: Any, kwargs: Any) -> list[Any]:
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    for leaf in leaves:
        if type(leaf) not in _PLAIN and not isinstance(leaf, Tensor):
            return tree_leaves(leaves)
    return leaves


@functools.lru_cache(maxsize=1024)
def may_draw(func: Any) -> bool:
    """Whether a function may take from a stream of random numbers."""
    return bool(_DRAWS.search(name_of(func)))


def tensors_in(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def mapped(convert: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """As torch's `tree_map_only` of tensors; in what calls are mostly made of many times as quick."""
    if isinstance(tree, Tensor):
        return convert(tree)
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if kind is tuple or kind is list:
        return kind([mapped(convert, leaf) for leaf in tree])
    if kind is dict:
        return {key: mapped(convert, leaf) for key, leaf in tree.items()}
    if dataclasses.is_dataclass(kind) and kind not in SUPPORTED_NODES:
        made = copy.copy(tree)
        for each in dataclasses.fields(kind):
            object.__setattr__(made, each.name, mapped(convert, getattr(tree, each.name)))
        return made
    return tree_map_only(Tensor, convert, tree)


def number_of(tensor: Tensor) -> int | None:
    return tensor.__dict__.get(NUMBER)


def name_of(func: Any) -> str:
    return str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))


def versions_of(tensors: list[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def changed_of(tensors: list[Tensor], versions: list[int]) -> list[int]:
    """The places of those with another version than before; of several in one memory the first: a view's base."""
    now = versions_of(tensors)
    first: dict[int, int] = {}  # by memory
    for place, (before, after) in enumerate(zip(versions, now, strict=True)):
        if before != after:
            first.setdefault(memory_of(tensors[place]), place)
    return list(first.values())


def made_by(out: Any, changed: list[Tensor]) -> list[Tensor]:
    """The tensors that a function has made or changed, each once."""
    found = [t for t in tensors_in(out) if not isinstance(t, nn.Parameter)] + changed
    return list({id(t): t for t in found}.values())


def uses_of(tensors: list[Tensor]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(n for n in map(number_of, tensors) if n is not None))
