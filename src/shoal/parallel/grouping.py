"""Which parameters are cut, and which are gathered together: a block's own, or with all that is outside of blocks.

A parameter in two places (tied) must be whole in both, so it goes with the root, which is whole all along; where only
blocks share it, those blocks go with the root too.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from shoal.parallel.blocks import find_blocks


@dataclass(frozen=True)
class Grouping:
    """How the parameters of a model are grouped.

    Attributes:
        blocks: modules that are gathered one by one, by name; each has parameters of its own.
        with_root: parameters inside of them that go with the root.
        whole: parameters that are not cut, by name: those without rows, or of another dtype than their group, which
            shares one buffer.
    """

    blocks: dict[str, nn.Module]
    with_root: frozenset[nn.Parameter]
    whole: dict[str, nn.Parameter]

    @staticmethod
    def of(model: nn.Module) -> "Grouping":
        """The grouping by the model's repeated blocks."""
        blocks = {name: model.get_submodule(name) for name in find_blocks(model)}
        users = _users(model, blocks)
        while lonely := [own for own in users.values() if len(own) > 1 and "" not in own]:
            blocks = {name: block for name, block in blocks.items() if not any(name in own for own in lonely)}
            users = _users(model, blocks)
        groups: dict[str, list[nn.Parameter]] = defaultdict(list)
        for param, own in users.items():
            groups["" if "" in own else min(own)].append(param)
        whole = {param for group in groups.values() for param in _left_whole(group)}
        return Grouping(
            blocks={name: block for name, block in blocks.items() if set(groups[name]) - whole},
            with_root=frozenset(param for param, own in users.items() if len(own) > 1),
            whole={name: param for name, param in model.named_parameters() if param in whole},
        )


def _users(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[nn.Parameter, set[str]]:
    """The names of the blocks that use each parameter; an empty name for all that is outside of them."""
    users: dict[nn.Parameter, set[str]] = defaultdict(set)
    for name, block in blocks.items():
        for param in block.parameters():
            users[param].add(name)
    for param in _outside(model, set(blocks.values())):
        users[param].add("")
    return users


def _outside(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in blocks:
            yield from _outside(child, blocks)


def _left_whole(group: list[nn.Parameter]) -> Iterator[nn.Parameter]:
    """What cannot share a buffer of rows with the rest of its group."""
    num_values = Counter[object]()
    for param in group:
        if param.requires_grad and not param.is_complex():  # no collective of rows takes complex numbers
            num_values[param.dtype] += param.numel()
    usual = max(num_values, key=num_values.__getitem__, default=None)
    for param in group:
        is_odd = param.is_complex() or (param.requires_grad and param.dtype != usual)
        if is_odd or param.dim() == 0 or param.numel() == 0:
            yield param
