"""What must be the same on every rank of a call: operation, reduction, root, dtypes and shapes, never the values."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Of each method of a process group: which argument has the same shapes on all ranks; None: none has to. Of a
# gather only the root has outputs, of a scatter inputs; what all_to_all sends to each may differ by rank.
_SAME: Mapping[str, int | None] = {
    "_allgather_base": 0,
    "_reduce_scatter_base": 1,
    "all_gather_single": 0,
    "all_gather_single_coalesced": 0,
    "allgather": 0,
    "allgather_coalesced": 0,
    "allgather_into_tensor_coalesced": 0,
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "broadcast": 0,
    "gather": 1,
    "reduce": 0,
    "reduce_scatter": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter_single_coalesced": 1,
    "reduce_scatter_tensor_coalesced": 1,
    "scatter": 0,
}
_REDUCES = frozenset(name for name in _SAME if "reduce" in name)
_ROOTED = frozenset({"broadcast", "gather", "reduce", "scatter"})
_ONLY_DTYPE = frozenset({"all_to_all_single", "alltoall", "alltoall_base"})
_TO_ONE = frozenset({"send", "recv"})


Signature = tuple[Any, ...]  # operation, reduction, root, shapes


def signature_of(method: str, operation: str) -> Callable[[Sequence[Any], Mapping[str, Any]], Signature]:
    """What tells the signature of a call from the arguments of that method of a process group."""
    at = _SAME.get(method)
    if at is None:
        return _without_shapes(method, operation)
    reduces, is_rooted = method in _REDUCES, method in _ROOTED

    def told(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        given = args[at]
        shapes = _shapes(given[0] if type(given) is list and len(given) == 1 else given)
        if not reduces and not is_rooted:
            return operation, None, None, shapes
        # By name: who calls a group's method directly may give other arguments, or none.
        reduction = getattr(args[-1], "reduceOp", None) if reduces else None
        root = getattr(args[-1], "rootRank", None) if is_rooted else None
        return operation, None if reduction is None else reduction.op, root, shapes

    return told


def _without_shapes(method: str, operation: str) -> Callable[[Sequence[Any], Mapping[str, Any]], Signature]:
    def told(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        if method in _ONLY_DTYPE:
            return operation, None, None, _first(args[0]).dtype
        if method in _TO_ONE:
            tensor = _first(args[0])
            return "send and recv", None, None, (tensor.dtype, tensor.numel())  # both ends say the same
        return operation, None, None, None

    return told


def _shapes(given: Any) -> Any:
    """Of a tensor its dtype and shape; of a list those of the first and last, and how many there are."""
    if not isinstance(given, list | tuple):
        return given.dtype, given.shape
    if len(given) == 1:
        return _shapes(given[0])
    return len(given), *(_shapes(one) for one in (*given[:1], *given[-1:]))


def _first(given: Any) -> "Tensor":
    found: Tensor = given[0] if isinstance(given, list | tuple) else given
    return found


def describe(signature: Signature) -> str:
    """`all_reduce sum float32 (3, 4)`."""
    operation, reduction, root, shapes = signature
    words = [operation]
    if reduction is not None:
        words.append(str(reduction).rpartition(".")[2].lower())
    if root is not None:
        words.append(f"root {root}")
    if shapes is not None:
        words.append(_in_words(shapes))
    return " ".join(words)


def _in_words(shapes: Any) -> str:
    if not isinstance(shapes, tuple):
        return str(shapes).removeprefix("torch.")
    if isinstance(shapes[0], int):
        if not shapes[0]:
            return "of nothing"
        first, last = (_in_words(shape) for shape in shapes[1:])
        return f"{shapes[0]} x {first}" if first == last else f"{shapes[0]} of {first} to {last}"
    dtype, size = shapes
    name = str(dtype).removeprefix("torch.")
    return f"{name} x{size}" if isinstance(size, int) else f"{name} ({', '.join(map(str, size))})"
