"""Which tensors of a model a rank holds, and what stands in the place of those that it does not."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.errors import JobError
from shoal.parallel.pipeline.values import AWAY, leaves_in, name_of
from shoal.parallel.pipeline.walk import check_is_here
from shoal.parallel.writes import memory_of

_GRADIENTS = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))


def check(model: nn.Module) -> None:
    """Whether its tensors can be held apart.

    Raises:
        JobError: and why not.
    """
    _check_memory(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise JobError(
                f"{name or 'the model'} is compiled by torch.jit, and a pipeline cannot look into it. Give it the "
                "module itself, or take a layout without pp."
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise JobError(
                f"{name or 'the model'} has a state of its own beside its tensors (get_extra_state), and in a pipeline "
                "only one rank would have it right. Keep it in a buffer, or take a layout without pp."
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise JobError(
                f"{name} has sparse gradients (sparse=True), which a pipeline does not add up. Take dpN, or "
                "sparse=False."
            )


def _check_memory(model: nn.Module) -> None:
    """Two parameters that share memory are one, whatever they are called."""
    seen: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.device.type == "meta" or not param.numel():
            continue
        first, other = seen.setdefault(memory_of(param), (name, param))
        if other is not param:
            raise JobError(
                f"{first} and {name} are two parameters in one memory, and in a pipeline they would be in two. Let "
                "both modules have the same nn.Parameter (b.weight = a.weight), or let one have a copy."
            )


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, under each of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def names_below(model: nn.Module, atom: str) -> list[str]:
    """The names of all tensors in a module."""
    return [f"{atom}.{name}" for name, _ in named_tensors(model.get_submodule(atom))]


def emptied(tensor: Tensor, name: str, whole: Sequence[int]) -> Tensor:
    """No rows of the whole tensor, whatever tensor parallelism has left of it here."""
    empty: Tensor = tensor.detach().new_empty((0, *whole[1:]))
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        empty.__dict__.update(tensor.__dict__)  # what a job wrote on it
    empty.__dict__[AWAY] = name
    return empty


class Guard(TorchFunctionMode):
    """Around a loss: what it reads is here, and it asks for no gradient of its own.

    A job may keep its model, and its loss read weights of other stages, which are empty here.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GRADIENTS:
            raise JobError(
                f"the loss calls torch.autograd.{func.__name__}, and in a pipeline the last stage has a part of the "
                "graph alone. Take a layout without pp."
            )
        for leaf in leaves_in(args, kwargs):
            if isinstance(leaf, Tensor) and AWAY in leaf.__dict__:
                check_is_here([leaf], f"the loss ({name_of(func)})")
        return func(*args, **kwargs)


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """In the place of the tensor of that name."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    (module._parameters if key in module._parameters else module._buffers)[key] = tensor  # type: ignore[assignment]
