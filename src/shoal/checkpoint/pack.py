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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.checkpoint.tensorfile import CODES
from shoal.errors import CheckpointError

Skeleton = Any  # what json.loads can return

# Cycles and runaway nesting end here, well before Python's own stack does.
_MAX_DEPTH = 100
_JSON_INT_BITS = 63
_RESERVED_NAMES = ("", "__metadata__")  # the second is a keyword of the safetensors header
_HEX = re.compile(r"-?0x[0-9a-f]+")


def pack(tree: object) -> tuple[dict[str, Tensor], Skeleton]:
    """Split a tree into named tensors and a JSON skeleton that says where they go.

    A tensor is named by its path (`optimizer.state.blocks.0.weight.exp_avg`). Tensors are not copied, only
    detached; two that are the same memory get one name. A parameter comes back as a plain tensor on the CPU.

    Raises:
        CheckpointError: a value that cannot be stored, with its path in the tree.
    """
    packer = _Packer()
    skeleton = packer.encode(tree, "", 0)
    return packer.tensors, skeleton


def unpack(skeleton: Skeleton, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the tree that `pack` took apart; tied tensors are one object again.

    Raises:
        CheckpointError: a skeleton that `pack` cannot have made.
    """
    return _decode(skeleton, tensors, 0)


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name_of_memory: dict[tuple[object, ...], str] = {}

    def encode(self, value: object, path: str, depth: int) -> Skeleton:
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{path[:80]}...: nested more than {_MAX_DEPTH} deep, or containing itself.")
        if isinstance(value, np.ndarray | np.generic):
            return self._encode_numpy(value, path)
        if isinstance(value, Tensor):
            return self.encode_tensor(value, path)
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

    def encode_tensor(self, tensor: Tensor, path: str, *, numpy: str | None = None) -> Skeleton:
        _check_tensor(tensor, path)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        node: dict[str, object] = {"tensor": ""}
        if tensor.is_complex():
            # safetensors knows no complex128: both are stored as pairs of reals.
            tensor, node["complex"] = torch.view_as_real(tensor), True
        if tensor.dtype not in CODES:
            raise CheckpointError(f"{path or 'the state'}: tensors of {tensor.dtype} cannot be stored.")
        if numpy is not None:
            node["numpy"] = numpy
        node["tensor"] = self._store(tensor, path)
        return node

    def _store(self, tensor: Tensor, path: str) -> str:
        # self.tensors keeps every tensor alive, so no address is used twice while we pack.
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in self._name_of_memory:
            return self._name_of_memory[memory]
        name = self._free_name(path)
        self.tensors[name] = tensor
        self._name_of_memory[memory] = name
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


def _decode(node: Skeleton, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"the skeleton is nested more than {_MAX_DEPTH} deep.")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [_decode(item, tensors, depth + 1) for item in node]
    tag = next(iter(node), None) if isinstance(node, dict) else None
    decoder = _DECODERS.get(tag) if isinstance(tag, str) else None
    if decoder is None or (len(node) != 1 and tag != "tensor"):
        raise CheckpointError(f"the skeleton holds {str(node)[:80]!r}, which is no known value.")
    try:
        return decoder(node, tensors, depth)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, struct.error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the skeleton holds a broken {tag!r}: {str(node)[:80]!r}.") from error


def _decode_pairs(pairs: Any, tensors: Mapping[str, Tensor], depth: int) -> Iterator[tuple[str | int, Any]]:
    for key, value in pairs:
        key = _decode(key, tensors, depth + 1)
        if type(key) not in (str, int):
            raise CheckpointError(f"the skeleton has the key {key!r}; keys are str or int.")
        yield key, _decode(value, tensors, depth + 1)


def _decode_dict(node: Any, tensors: Mapping[str, Tensor], depth: int) -> dict[str, Any]:
    return {key: _decode(value, tensors, depth + 1) for key, value in node["dict"].items()}


def _decode_int(node: Any, tensors: Mapping[str, Tensor], depth: int) -> int:
    if not _HEX.fullmatch(node["int"]):
        raise ValueError
    return int(node["int"], 16)


def _decode_tensor(node: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if set(node) - {"tensor", "complex", "numpy"}:
        raise ValueError
    tensor = tensors[node["tensor"]]
    if node.get("complex"):
        # A view made twice of tied memory is two objects; the memory stays one.
        tensor = torch.view_as_complex(tensor)
    if "numpy" not in node:
        return tensor
    return tensor.numpy()[()] if node["numpy"] == "scalar" else tensor.numpy()


_DECODERS: dict[str, Callable[[Any, Mapping[str, Tensor], int], Any]] = {
    "dict": _decode_dict,
    "pairs": lambda node, tensors, depth: dict(_decode_pairs(node["pairs"], tensors, depth)),
    "ordered": lambda node, tensors, depth: OrderedDict(_decode_pairs(node["ordered"], tensors, depth)),
    "counter": lambda node, tensors, depth: Counter(dict(_decode_pairs(node["counter"], tensors, depth))),
    "tuple": lambda node, tensors, depth: tuple(_decode(node["tuple"], tensors, depth + 1)),
    "size": lambda node, tensors, depth: torch.Size(_decode(node["size"], tensors, depth + 1)),
    "bytes": lambda node, tensors, depth: base64.b64decode(node["bytes"], validate=True),
    "int": _decode_int,
    "float": lambda node, tensors, depth: struct.unpack(">d", bytes.fromhex(node["float"]))[0],
    "str": lambda node, tensors, depth: bytes.fromhex(node["str"]).decode("utf-8", "surrogatepass"),
    "tensor": _decode_tensor,
}
