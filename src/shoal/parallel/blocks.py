"""The repeated blocks of any module: what is sharded, recomputed and compiled one by one.

A decoder has one list of them, `blocks.0 .. blocks.11`; token and position tables, the last norm and the head belong to
none. An encoder-decoder has two, `encoder.layers.*` and `decoder.layers.*`, and both count.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from shoal.errors import JobError, nearest

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[str]:
    """The names of the model's repeated blocks, in the order of its modules; none inside another.

    A block is a child of a list (ModuleList, Sequential, ModuleDict) that has its like beside it: a twin, of the same
    class and parameter shapes; or one of the same class (a residual block that widens). Where all that are alike by
    class alone hold twins, as the stages of a pyramid do, the twins are the blocks. The model may say otherwise with
    a method `blocks()` that returns names of its modules.

    Raises:
        JobError: `blocks()` names what is no module, or one inside another.
    """
    told = getattr(model, "blocks", None)  # optional, and in many models the list of blocks itself
    if callable(told) and not isinstance(told, nn.Module):
        return _checked(model, told)
    blocks = _blocks(model, "")
    return [name for name, _ in model.named_modules() if name in blocks]  # a shared module once, under one name


def _checked(model: nn.Module, told: Callable[[], Any]) -> list[str]:
    names, modules = list(told()), dict(model.named_modules())
    for name in names:
        if name not in modules or not name:
            raise JobError(f"{type(model).__name__}.blocks() names {name!r}, no module in it.{nearest(name, modules)}")
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise JobError(f"{type(model).__name__}.blocks() names {name!r}, which is inside {outer!r}. Name one.")
    return names


def _blocks(module: nn.Module, name: str) -> dict[str, bool]:
    """The names of the blocks inside a module; True for a twin."""
    children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
    inside = {path: _blocks(child, path) for path, child in children.items()}
    found: dict[str, bool] = {}
    if isinstance(module, _LISTS):
        found = dict.fromkeys((path for group in _groups(children, _shapes) for path in group), True)
        for group in _groups(children, _kind):
            rest = [path for path in group if path not in found]
            are_stages = all(any(inside[path].values()) for path in rest)
            found |= {} if are_stages else dict.fromkeys(rest, False)
    chosen = [{path: found[path]} if path in found else inside[path] for path in children]
    return {path: is_twin for blocks in chosen for path, is_twin in blocks.items()}


def _groups(children: Mapping[str, nn.Module], key: Callable[[nn.Module], Any]) -> list[list[str]]:
    """The children that have an equal key (not None) beside them."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for path, child in children.items():
        groups[key(child)].append(path)
    return [group for found, group in groups.items() if found is not None and len(group) > 1]


def _shapes(module: nn.Module) -> object:
    shapes = tuple((name, param.shape) for name, param in module.named_parameters())
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))  # scripted ones show it so alone
    can_be_called = owner is not nn.Module  # a plain ModuleList cannot
    return (type(module), shapes) if shapes and can_be_called else None


def _kind(module: nn.Module) -> object:
    """Of a layer or a plain list the class says little: two Linears of other widths are not alike."""
    plain = type(module) in _LISTS or not any(module.children())
    return None if plain or _shapes(module) is None else type(module)


def listed(names: Sequence[str]) -> str:
    """`token, blocks.0 to blocks.5, norm`: numbered runs are drawn together."""
    runs: list[list[str]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        before, _, last = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        if runs and stem and number.isdigit() and before == stem and last.isdigit() and int(number) == int(last) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
