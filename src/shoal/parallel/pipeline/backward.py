"""Backward of one micro-batch in one stage: whole, or the gradients of what it received before those of its weights."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    reverse_closure,
    stage_backward_input,
    stage_backward_weight,
)

from shoal.errors import JobError

Used = Sequence[tuple[Tensor, Tensor]]  # outputs, each with its gradient


def whole(used: Used) -> None:
    """All gradients at once."""
    if used:
        torch.autograd.backward([tensor for tensor, _ in used], [grad for _, grad in used])


def first_half(used: Used, received: list[Any], params: Callable[[], list[nn.Parameter]]) -> Callable[[], Any]:
    """The gradients of what was received, into their `grad`. Returns the other half, which is to be called later.

    All is done in the first half where a parameter comes in at several places of a stage (a bare parameter between
    blocks, a block that is called twice): what leads from one place to the next would run, and be freed, twice. And
    where something that leaves is made of parameters alone, which torch's first half would not come by.
    """
    if not received:
        return lambda: whole(used)
    if not _can_be_split([tensor for tensor, _ in used], received, params()):
        whole(used)
        return lambda: None
    # torch cuts the graph behind these tensors in place, which it cannot do to a view.
    ends = [tensor.clone() for tensor, _ in used]
    with _halved():
        _, groups = stage_backward_input(ends, [grad for _, grad in used], received, iter(params()))
    return lambda: _second_half(groups, params())


@contextlib.contextmanager
def _halved() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        why = str(error.__cause__ or error).partition("\n")[0]
        raise JobError(
            f"this schedule runs a backward in two halves, and one of this model's cannot be halved ({why}). Something "
            "in it runs a backward of its own (a reentrant checkpoint, a function that writes gradients itself). Take "
            "a schedule that runs it whole: 1f1b, gpipe, interleaved."
        ) from error


def _second_half(groups: list[dict[str, Any]], params: list[nn.Parameter]) -> None:
    """The gradients of the weights. A hook of the user's on a tensor is called in both halves, and counts in one."""
    kept = []
    for group in groups:
        for node, grads in zip(group["intermediates"], group.get("grads", ()), strict=False):
            kept.append(node.register_prehook(lambda _, grads=grads: grads))
    with _halved():
        stage_backward_weight(iter(params), groups)
    for handle in kept:
        handle.remove()


def _can_be_split(outputs: list[Tensor], received: list[Tensor], params: list[nn.Parameter]) -> bool:
    """Whether each parameter meets what depends on the received at one node of the graph, and nowhere else."""
    ends, begins = _nodes(outputs), _nodes(received)
    graph = construct_reverse_graph(ends)
    depends_on_received, _ = reverse_closure(begins, set(), graph)
    if not depends_on_received.issuperset(ends):
        return False
    return all(len(group["intermediates"]) == 1 for group in get_param_groups(begins, _nodes(params), graph))


def _nodes(tensors: Sequence[Tensor]) -> list[Node]:
    nodes = map(_get_grad_fn_or_grad_acc, tensors)
    return [node for node in nodes if node is not None]
