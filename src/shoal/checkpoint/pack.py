"""A tree of plain values and tensors <-> named tensors and a JSON skeleton, exact in both directions.

The skeleton is JSON. What JSON has itself (null, true, numbers, strings, lists) stands for itself; all else
is an object with one tag: `dict`, `pairs`, `ordered`, `counter`, `tuple`, `size`, `bytes`, `int`, `float`,
`str`, `tensor`. Nothing is ever imported or called by name when a skeleton is read, unlike a pickle.
"""

import base64
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.checkpoint.tensorfile import CODES
from shoal.errors import CheckpointError
from shoal.parallel.parts import Box, Part

Skeleton = Any  # what json.loads can return

# Cycles and runaway nesting end here, well before Python's own stack does.
_MAX_DEPTH = 100
_JSON_INT_BITS = 63
_RESERVED_NAMES = ("", "__metadata__")  # the second is a keyword of the safetensors header
_HEX = re.compile(r"-?0x[0-9a-f]+")


@dataclass(frozen=True, eq=False)
class Shard:
    """A leaf of a tree: what this rank holds of a tensor that ranks hold in parts. Tied names share one object."""

    local: Tensor
    part: Part


@dataclass(frozen=True)
class Leaf:
    """Where a skeleton puts a tensor, and what it is seen as there."""

    name: str
    complex: bool = False
    numpy: str | None = None


def pack(tree: object) -> tuple[dict[str, Tensor | Shard], Skeleton]:
    """Split a tree into named tensors and a JSON skeleton that says where they go.

    A tensor is named by its path (`optimizer.state.blocks.0.weight.exp_avg`). Tensors are not copied, only
    detached; two that are the same memory get one name. A parameter comes back as a plain tensor on the CPU.
    Skeletons do not tell shards from whole tensors: that of a sharded state is that of the whole one.

    Raises:
        CheckpointError: a value that cannot be stored, with its path in the tree.
    """
    packer = _Packer()
    skeleton = packer.encode(tree, "", 0)
    return packer.tensors, skeleton


def unpack(skeleton: Skeleton, tensors: Mapping[str, Tensor | None]) -> Any:
    """Rebuild the tree that `pack` took apart; tied tensors are one object again. None stays None.

    Raises:
        CheckpointError: a skeleton that `pack` cannot have made.
    """
    return _decode(skeleton, lambda leaf: _seen_as(leaf, tensors[leaf.name]), 0)


def outline(skeleton: Skeleton, *, check: Callable[[Leaf], None] = lambda leaf: None) -> Any:
    """The tree with a `Leaf` in the place of each tensor; `check` may refuse one.

    Raises:
        CheckpointError: a skeleton that `pack` cannot have made.
    """

    def keep(leaf: Leaf) -> Leaf:
        check(leaf)
        return leaf

    return _decode(skeleton, keep, 0)


def leaves_of(tree: Any) -> Iterator[Leaf]:
    """The leaves in an outline, or in a part of one."""
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves_of(value)


def merge(first: Skeleton, second: Skeleton) -> Skeleton:
    """The skeleton of a state of which two ranks know parts: the keys of both; where values differ, the first's."""
    if not (isinstance(first, dict) and isinstance(second, dict) and "dict" in first and "dict" in second):
        return first
    ours, theirs = first["dict"], second["dict"]
    both = {key: merge(value, theirs[key]) if key in theirs else value for key, value in ours.items()}
    return {"dict": {**both, **{key: value for key, value in theirs.items() if key not in ours}}}


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor | Shard] = {}
        self._name_of_tied: dict[object, str] = {}

    def encode(self, value: object, path: str, depth: int) -> Skeleton:
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{path[:80]}...: nested more than {_MAX_DEPTH} deep, or containing itself.")
        if isinstance(value, np.ndarray | np.generic):
            return self._encode_numpy(value, path)
        if isinstance(value, Tensor):
            return self.encode_tensor(value, path)
        if isinstance(value, Shard):
            return self.encode_tensor(value.local, path, shard=value)
        encoder = _ENCODERS.get(type(value))
        if encoder is None:
            raise CheckpointError(f"{path or 'the state'}: {_describe(value)} cannot be stored. {_STORABLE}")
        return encoder(self, value, path, depth)

    def encode_items(self, values: Iterable[object], path: str, depth: int) -> list[Skeleton]:
        return [self.encode(value, f"{path}[{i}]", depth + 1) for i, value in enumerate(values)]

    def encode_pairs(self, mapping: Mapping[Any, object], path: str, depth: int) -> Iterator[list[Skeleton]]:
        for key, value in mapping.items():
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"{path or 'the state'}: the key {key!r} is {_describe(key)}; keys are str or int."
                )
            yield [self.encode(key, path, depth + 1), self.encode(value, _join(path, key), depth + 1)]

    def encode_tensor(
        self, tensor: Tensor, path: str, *, numpy: str | None = None, shard: Shard | None = None
    ) -> Skeleton:
        _check_tensor(tensor, path)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        part = None if shard is None else shard.part
        node: dict[str, object] = {"tensor": ""}
        if tensor.is_complex():
            # safetensors knows no complex128: both are stored as pairs of reals.
            tensor, node["complex"] = torch.view_as_real(tensor), True
            part = part and in_pairs(part)
        if tensor.dtype not in CODES:
            raise CheckpointError(f"{path or 'the state'}: tensors of {tensor.dtype} cannot be stored.")
        if numpy is not None:
            node["numpy"] = numpy
        stored = tensor if part is None else Shard(tensor, part)
        # Of a shard its object says what is tied, since every rank must find the same ties, even one with no rows.
        node["tensor"] = self._store(stored, path, tie=_memory(tensor) if shard is None else shard)
        return node

    def _store(self, stored: Tensor | Shard, path: str, *, tie: object) -> str:
        if tie in self._name_of_tied:
            return self._name_of_tied[tie]
        name = self._free_name(path)
        self.tensors[name] = stored
        if tie is not None:
            self._name_of_tied[tie] = name
        return name

    def _free_name(self, path: str) -> str:
        path = path.encode("utf-8", "backslashreplace").decode()
        name, count = path, 1
        while name in self.tensors or name in _RESERVED_NAMES:
            count += 1
            name = f"{path}#{count}"
        return name

    def _encode_numpy(self, value: np.ndarray[Any, Any] | np.generic, path: str) -> Skeleton:
        # np.array, not ascontiguousarray: that one turns 0-dim into 1-dim. Negative strides are no tensor.
        array = np.array(value, order="C")
        if array.dtype.kind not in "biufc" or array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
            raise CheckpointError(f"{path or 'the state'}: numpy values of {array.dtype} cannot be stored.")
        if not array.dtype.isnative:
            raise CheckpointError(f"{path or 'the state'}: numpy values in foreign byte order cannot be stored.")
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return self.encode_tensor(torch.from_numpy(array), path, numpy=kind)


def _memory(tensor: Tensor) -> tuple[object, ...] | None:
    """What two names of one tensor share. The packer keeps every tensor alive, so no address is used twice."""
    if not tensor.numel():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def in_pairs(part: Part) -> Part:
    """The part of a complex tensor, as the part of its pairs of reals."""
    boxes = tuple(Box((*box.local, 0), (*box.whole, 0), (*box.size, 2)) for box in part.boxes)
    return replace(part, shape=(*part.shape, 2), boxes=boxes)


def _check_tensor(tensor: Tensor, path: str) -> None:
    """Only plain, dense tensors with values have bytes to store."""
    reason = None
    if type(tensor) not in (Tensor, nn.Parameter):
        reason = f"a {type(tensor).__name__} cannot be stored as it is; give its local plain tensor"
    elif tensor.layout is not torch.strided:
        reason = f"a sparse tensor ({tensor.layout}) cannot be stored; give it as to_dense()"
    elif tensor.is_quantized:
        reason = "a quantized tensor cannot be stored; give its int_repr(), scale and zero point"
    elif tensor.is_meta:
        reason = "a tensor on the meta device has no values"
    if reason:
        raise CheckpointError(f"{path or 'the state'}: {reason}.")


def _join(path: str, key: str | int) -> str:
    return f"{path}.{key}" if path else str(key)


_STORABLE = (
    "Stored are dict, list, tuple, None, bool, int, float, str, bytes, tensors and numpy arrays of them; "
    "no code, no objects, since reading these back would mean running what a file says."
)


def _describe(value: object) -> str:
    if callable(value) and not isinstance(value, type) and hasattr(value, "__qualname__"):
        return "a function"  # lambdas, methods and builtins alike: one word for people
    return f"a value of type {type(value).__module__}.{type(value).__qualname__}"


def _is_text(value: str) -> bool:
    """Lone surrogates are legal in str but would come back from JSON joined."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _encode_str(_: _Packer, value: Any, path: str, depth: int) -> Skeleton:
    return value if _is_text(value) else {"str": value.encode("utf-8", "surrogatepass").hex()}


def _encode_int(_: _Packer, value: Any, path: str, depth: int) -> Skeleton:
    return value if value.bit_length() <= _JSON_INT_BITS else {"int": hex(value)}


def _encode_float(_: _Packer, value: Any, path: str, depth: int) -> Skeleton:
    # JSON has no inf and nan; the bits also keep the payload of a nan. repr() of the others is exact.
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


def _encode_dict(packer: _Packer, value: Any, path: str, depth: int) -> Skeleton:
    pairs = list(packer.encode_pairs(value, path, depth))
    if all(type(key) is str for key, _ in pairs):
        return {"dict": dict(pairs)}
    return {"pairs": pairs}


_ENCODERS: dict[type, Callable[[_Packer, Any, str, int], Skeleton]] = {
    type(None): lambda packer, value, path, depth: None,
    bool: lambda packer, value, path, depth: value,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: lambda packer, value, path, depth: {"bytes": base64.b64encode(value).decode()},
    list: lambda packer, value, path, depth: packer.encode_items(value, path, depth),
    tuple: lambda packer, value, path, depth: {"tuple": packer.encode_items(value, path, depth)},
    torch.Size: lambda packer, value, path, depth: {"size": packer.encode_items(value, path, depth)},
    dict: _encode_dict,
    OrderedDict: lambda packer, value, path, depth: {"ordered": list(packer.encode_pairs(value, path, depth))},
    # MultiStepLR keeps its milestones in a Counter and calls elements() on it.
    Counter: lambda packer, value, path, depth: {"counter": list(packer.encode_pairs(value, path, depth))},
}


_Make = Callable[[Leaf], Any]


def _decode(node: Skeleton, make: _Make, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"the skeleton is nested more than {_MAX_DEPTH} deep.")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [_decode(item, make, depth + 1) for item in node]
    tag = next(iter(node), None) if isinstance(node, dict) else None
    decoder = _DECODERS.get(tag) if isinstance(tag, str) else None
    if decoder is None or (len(node) != 1 and tag != "tensor"):
        raise CheckpointError(f"the skeleton holds {str(node)[:80]!r}, which is no known value.")
    try:
        return decoder(node, make, depth)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, struct.error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the skeleton holds a broken {tag!r}: {str(node)[:80]!r}.") from error


def _decode_pairs(pairs: Any, make: _Make, depth: int) -> Iterator[tuple[str | int, Any]]:
    for key, value in pairs:
        key = _decode(key, make, depth + 1)
        if type(key) not in (str, int):
            raise CheckpointError(f"the skeleton has the key {key!r}; keys are str or int.")
        yield key, _decode(value, make, depth + 1)


def _decode_dict(node: Any, make: _Make, depth: int) -> dict[str, Any]:
    return {key: _decode(value, make, depth + 1) for key, value in node["dict"].items()}


def _decode_int(node: Any, make: _Make, depth: int) -> int:
    if not _HEX.fullmatch(node["int"]):
        raise ValueError
    return int(node["int"], 16)


def _decode_tensor(node: Any, make: _Make, depth: int) -> Any:
    if set(node) - {"tensor", "complex", "numpy"}:
        raise ValueError
    return make(Leaf(node["tensor"], bool(node.get("complex")), node.get("numpy")))


def _seen_as(leaf: Leaf, tensor: Tensor | None) -> Any:
    if tensor is not None and leaf.complex:
        # A view made twice of tied memory is two objects; the memory stays one.
        tensor = torch.view_as_complex(tensor)
    if tensor is None or leaf.numpy is None:
        return tensor
    return tensor.numpy()[()] if leaf.numpy == "scalar" else tensor.numpy()


_DECODERS: dict[str, Callable[[Any, _Make, int], Any]] = {
    "dict": _decode_dict,
    "pairs": lambda node, make, depth: dict(_decode_pairs(node["pairs"], make, depth)),
    "ordered": lambda node, make, depth: OrderedDict(_decode_pairs(node["ordered"], make, depth)),
    "counter": lambda node, make, depth: Counter(dict(_decode_pairs(node["counter"], make, depth))),
    "tuple": lambda node, make, depth: tuple(_decode(node["tuple"], make, depth + 1)),
    "size": lambda node, make, depth: torch.Size(_decode(node["size"], make, depth + 1)),
    "bytes": lambda node, make, depth: base64.b64decode(node["bytes"], validate=True),
    "int": _decode_int,
    "float": lambda node, make, depth: struct.unpack(">d", bytes.fromhex(node["float"]))[0],
    "str": lambda node, make, depth: bytes.fromhex(node["str"]).decode("utf-8", "surrogatepass"),
    "tensor": _decode_tensor,
}
