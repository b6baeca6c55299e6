"""A parameter that is read outside of its block, where it lies in shards: what to say in place of torch's message.

torch complains of an operation on a plain tensor and a DTensor, and names neither the parameter nor the line.
"""

import ast
import contextlib
import linecache
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import JobError
from shoal.parallel.parts import is_sharded
from shoal.parallel.swap import become

_COMPLAINT = "mixed torch.Tensor and DTensor"


def explain_reads(model: nn.Module, blocks: Mapping[str, str]) -> None:
    """Let the forward of a model in shards say which parameter was read where it is not whole.

    Args:
        blocks: the block of each parameter that is in one, by name.
    """
    model.__dict__["_shoal_blocks"] = blocks
    become(model, _Explained)


class _Explained:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]  # of the class that it is mixed into
        except RuntimeError as error:
            if _COMPLAINT not in str(error):
                raise
            frame, code = _failed(error)
            raise JobError(_lesson(self, next(_in_code(self, code, frame), ""), f"`{code}`")) from error
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and is_sharded(leaf):
                raise JobError(_lesson(self, next(_behind(self, leaf), ""), "for an output of the model"))
        return output


def _lesson(model: Any, name: str, where: str) -> str:
    block = model.__dict__["_shoal_blocks"].get(name, "its block")
    return (
        f"{name or 'a parameter'} is read outside of the forward of {block}: {where}. With shards it is whole only "
        f"while {block} runs; at other times each rank has its own rows. Let the module that reads it hold it, too "
        "(`self.tied = self.blocks[0].up.weight` in its __init__): what several modules hold is whole in all of the "
        "forward. Or let the block return what is needed of it, or take dpN."
    )


def _failed(error: RuntimeError) -> tuple[FrameType, str]:
    """Where the user's code stood, and what it computed there."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = traceback.extract_tb(error.__traceback__)
    frame, at = [pair for pair in zip(frames, lines, strict=True) if "/torch/" not in pair[1].filename][-1]
    first, last = at.lineno or 0, at.end_lineno or 0
    text = [linecache.getline(at.filename, number).encode() for number in range(first, last + 1)]
    if text:
        text[-1] = text[-1][: at.end_colno]  # in bytes
        text[0] = text[0][at.colno :]
    return frame, b" ".join(line.strip() for line in text).decode()


def _in_code(model: Any, code: str, frame: FrameType) -> Iterator[str]:
    """The parameters that an expression reads: the attributes in it, as far as nothing need be called for them."""
    names = {param.to_local().data_ptr(): n for n, param in model.named_parameters() if is_sharded(param)}
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(code, mode="eval")):
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not _calls(node):
                for tensor in _tensors_of(node, frame):
                    if is_sharded(tensor) and (memory := tensor.to_local().data_ptr()) in names:  # a view's, too
                        yield names[memory]


def _calls(node: ast.expr) -> bool:
    return any(isinstance(below, ast.Call | ast.Await | ast.NamedExpr) for below in ast.walk(node))


def _tensors_of(node: ast.expr, frame: FrameType) -> list[Tensor]:
    """The tensor that it stands for, or the parameters of the layer."""
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), frame.f_globals, frame.f_locals)
    except Exception:  # a part of an expression may not stand by itself; an error is being told already
        return []
    if isinstance(value, nn.Module):
        return [] if any(value.children()) else list(value.parameters(recurse=False))
    return [value] if isinstance(value, Tensor) else []


def _behind(model: Any, tensor: Tensor) -> Iterator[str]:
    """The parameters that a result was computed from."""
    names = {id(param): name for name, param in model.named_parameters()}
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only the nodes that add to a gradient have it
        if id(leaf) in names:
            yield names[id(leaf)]
        nodes += [before for before, _ in node.next_functions]
