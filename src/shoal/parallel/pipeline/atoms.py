"""The atoms of a model: the modules that a pipeline runs whole, in one stage.

They are the repeated blocks, and beside them the largest modules that hold no block: tables, norms, the head. A model
without blocks is taken apart down to its layers, and so are the dearest atoms of one that has too few for the stages.
"""

from collections.abc import Sequence

from torch import nn

from shoal.errors import JobError, LayoutError, nearest
from shoal.layout import Layout
from shoal.parallel.blocks import find_blocks

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_atoms(model: nn.Module, least: int, stages: Sequence[Sequence[str]] = ()) -> list[str]:
    """The names of the atoms, in the order of the model's modules; none inside another.

    Args:
        least: as many at least, where the model can be taken apart so far.
        stages: the modules of each stage, where the job or the model says them.

    Raises:
        JobError: `stages` names what is no module, or one inside another.
    """
    if stages:
        return _stated(model, stages)
    blocks = set(find_blocks(model))
    atoms = _beside(model, "", blocks)
    while atoms and len(atoms) < least:
        dearest = max(atoms, key=lambda name: _weight(model, name) if _parts(model, name) else -1)
        parts = _parts(model, dearest)
        if not parts:
            break
        place = atoms.index(dearest)
        atoms[place : place + 1] = parts
    return atoms


def split_as_told(model: nn.Module, order: Sequence[str], layout: Layout) -> dict[str, int]:
    """The stage of every atom, where the layout names the blocks with which stages begin.

    Args:
        order: the atoms that are called.

    Raises:
        LayoutError: it names a block that is not there, or not called.
    """
    blocks, cuts = find_blocks(model), layout.split
    if cuts[-1] >= len(blocks):
        raise LayoutError(
            f"{layout}: split names block {cuts[-1]}, and the model has {len(blocks)} blocks, 0 to {len(blocks) - 1}."
        )
    if unused := next((blocks[cut] for cut in cuts if blocks[cut] not in order), ""):
        raise LayoutError(f"{layout}: split names {unused}, which the model does not call.")
    begins = [order.index(blocks[cut]) for cut in cuts]
    return {atom: sum(place >= begin for begin in begins) for place, atom in enumerate(order)}


def _stated(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[str]:
    modules = dict(model.named_modules())
    names = [name for stage in stages for name in stage]
    for name in names:
        if name not in modules or not name:
            raise JobError(f"stages() names {name!r}, no module in the model.{nearest(name, modules)}")
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None or names.count(name) > 1:
            raise JobError(f"stages() names {name!r} {'inside ' + repr(outer) if outer else 'twice'}. Name it once.")
    return names


def _beside(module: nn.Module, name: str, blocks: set[str]) -> list[str]:
    """The atoms inside of a module that is none itself."""
    found = []
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        inside = [block for block in blocks if block.startswith(f"{path}.")]
        if path in blocks:
            found.append(path)
        elif inside or (isinstance(child, _LISTS) and _has_tensors(child)):
            found += _beside(child, path, blocks)
        elif _has_tensors(child):
            found.append(path)
    return list(dict.fromkeys(found))


def _has_tensors(module: nn.Module) -> bool:
    """What it computes belongs to one stage; tables of positions, which are not saved, every stage makes for itself."""
    return bool(module.state_dict(keep_vars=True))


def _parts(model: nn.Module, name: str) -> list[str]:
    module = model.get_submodule(name)
    if any(True for _ in module.parameters(recurse=False)):
        return []
    parts = _beside(module, name, set())
    return parts if len(parts) > 1 or (parts and _parts(model, parts[0])) else []


def _weight(model: nn.Module, name: str) -> int:
    return sum(param.numel() for param in model.get_submodule(name).parameters())
