"""Recompute: a block keeps its inputs alone and runs its forward a second time in backward; memory for FLOPs.

    none        everything is kept
    block       inputs of each repeated block; its forward runs twice
    selective   inputs, and the outputs of matrix products and attention; only what is cheap runs twice

The second run sees the same random numbers, and leaves buffers (the running statistics of a BatchNorm) as they are.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.errors import LayoutError
from shoal.parallel.swap import become

# What costs FLOPs to run again: kept.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def recompute_blocks(model: nn.Module, blocks: list[str], how: str) -> None:
    """Let each block run again in backward; `how` is `block` or `selective`.

    Raises:
        LayoutError: the model has no repeated blocks.
    """
    if not blocks:
        raise LayoutError(
            f"recompute={how} works on repeated blocks, and {type(model).__name__} has none (like modules in a "
            "ModuleList or Sequential). Give it a method blocks() that returns names of modules, or drop recompute."
        )
    for module in model.modules():
        config: Any = getattr(module, "config", None)  # Hugging Face's blocks fill a cache: twice, here
        if getattr(config, "use_cache", False):
            config.use_cache = False
    for name in blocks:
        block = model.get_submodule(name)
        block.__dict__["_shoal_recompute"] = how
        become(block, _Recomputed)


class _Recomputed:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        run = super().forward  # type: ignore[misc]  # of the class that this one is mixed into
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        contexts = functools.partial(_contexts, module, self.__dict__["_shoal_recompute"])
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(module: nn.Module, how: str) -> tuple[Any, Any]:
    """Around the first run, and around the second."""
    again = _as_before(module, _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    if how == "block":
        return contextlib.nullcontext(), again
    first, second = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return first, _both(again, second)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


@contextlib.contextmanager
def _as_before(module: nn.Module, modes: Sequence[Any]) -> Iterator[None]:
    """The modes of the first run (checkpoint brings back autocast and random numbers itself), no trace on buffers."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
