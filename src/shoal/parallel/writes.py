"""Which memory an operation writes into, as its schema says: also where no version tells (`x.data.mul_`)."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def memory_of(tensor: Tensor) -> int:
    """Where its numbers are or would be: views share it."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def written_by(func: Any, args: Any, kwargs: Any) -> set[int]:
    """The memory of what an operation below autograd writes into; not of what it only reads."""
    if not func._schema.is_mutable:
        return set()
    found: set[int] = set()
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found |= {memory_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
    return found
