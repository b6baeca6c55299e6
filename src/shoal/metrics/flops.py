"""FLOPs that really ran, counted on the user's own module while one step of it runs.

The mode sees every operation below autograd, so the backward pass and any module are counted without hooks,
and it runs each operation as it is: numbers do not change.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

CONVENTION = (
    "model FLOPs of the optimizer step, forward and backward, all micro-batches: 2 per multiply-add of "
    "matrix products, convolutions, attention and recurrent layers; causal attention counted in full; "
    "recomputation, pointwise operations and the optimizer not counted"
)

Formula = Callable[..., int]

aten = torch.ops.aten


@dataclass
class FlopCount:
    """FLOPs of this process: `model` by operation, `recomputed` by checkpointing, and what has no formula."""

    by_operation: Counter[str] = field(default_factory=Counter)
    recomputed: int = 0
    uncounted: set[str] = field(default_factory=set)

    @property
    def model(self) -> int:
        """FLOPs that the model needs: the numerator of MFU."""
        return sum(self.by_operation.values())

    @property
    def hardware(self) -> int:
        """FLOPs that ran, with those that activation checkpointing ran again: the numerator of HFU.

        The scores that a flash attention kernel forms again inside its own backward are not among them.
        """
        return self.model + self.recomputed


@contextmanager
def count_flops() -> Iterator[FlopCount]:
    """Counts what runs inside the block, forward and backward, on this process; see `CONVENTION`.

    Run uncompiled code in it. Threads that the block starts are not seen, except autograd's own.
    """
    count = FlopCount()
    with FlopMode(count):
        yield count


class FlopMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook has no types
    """Adds to a count; see `count_flops`."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch wraps the handler below in a function that imports torch._dynamo, one second

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # or a compiled region refuses to run here

    def __init__(self, count: FlopCount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor has its constructor
        self._count = count
        self._is_dry = _makes_fake_tensors()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Wrappers (DTensor, nested tensors) carry logical sizes; they unwrap to the local operation.
        if any(_unwraps(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if packet_of(func) in _COMPOSITES:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        formula = _FORMULAS.get(packet_of(func))
        out = func(*args, **kwargs)
        if _is_fake(out) and not self._is_dry:
            return out  # DTensor tries global shapes on fake tensors before its first real operation
        if formula is not None:
            self._add(_name(func), formula, args, kwargs, out)
        elif namespace_of(func) not in _SILENT_NAMESPACES:
            self._count.uncounted.add(_name(func))
        return out

    def _add(self, name: str, formula: Formula, args: Any, kwargs: Any, out: Any) -> None:
        try:
            flops = int(formula(*args, **kwargs, out_val=out))
        except (AssertionError, AttributeError, IndexError, TypeError, ValueError):
            # A count must never end a training; an operation called as its formula does not know is reported.
            self._count.uncounted.add(name)
            return
        if _is_recomputation():
            self._count.recomputed += flops
        else:
            self._count.by_operation[name] += flops


# Where autograd is off (inference mode, inside a tensor wrapper), these arrive whole and not as their parts.
_COMPOSITES = {
    aten.linear, aten.matmul, aten.einsum, aten.tensordot, aten.scaled_dot_product_attention,
    aten.conv1d, aten.conv2d, aten.conv3d,
    aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d,
    aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu,
}  # fmt: skip

# torch's own operations without a formula are pointwise or move data; a custom kernel may be anything.
_SILENT_NAMESPACES = {
    "aten",
    "prim",
    "prims",
    "c10d",
    "_c10d_functional",
    "fsdp",
    "profiler",
    "inductor",
    "higher_order",
}


def packet_of(func: Any) -> Any:
    """The operation, without the overload."""
    return getattr(func, "_overloadpacket", func)  # a higher-order operator has no overloads


def _name(func: Any) -> str:
    return str(packet_of(func))


def namespace_of(func: Any) -> str:
    """aten, c10d, ..."""
    namespace: str = getattr(func, "namespace", "higher_order")
    return namespace


def _makes_fake_tensors() -> bool:
    return _is_fake(torch.empty(0))


def _is_fake(out: Any) -> bool:
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return type(first).__name__ == "FakeTensor"


def _unwraps(kind: type) -> bool:
    own_dispatch = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    return own_dispatch and kind.__name__ not in ("FakeTensor", "FunctionalTensor")


def _is_recomputation() -> bool:
    """Whether activation checkpointing is running a forward again: its frame is below, and grad mode is on.

    The backward nodes proper run with grad mode off; those of `create_graph=True` have no such frame below.
    """
    if not torch.is_grad_enabled():
        return False
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("unpack_hook", "backward") and code.co_filename.endswith("utils/checkpoint.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]  # the outermost frame has none
    return False


def _num_stored(operand: Tensor) -> int:
    if operand.layout is torch.strided:
        return operand.numel()
    values = operand._values() if operand.layout is torch.sparse_coo else operand.values()
    return values.numel()


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Matrix products, batched too; of a sparse operand only what is stored is multiplied."""
    if b.layout is not torch.strided:
        return 2 * _num_stored(b) * a.shape[-2]
    return 2 * _num_stored(a) * b.shape[-1]


def _product_and_sum(_: Tensor, a: Tensor, b: Tensor, **__: Any) -> int:
    return _product(a, b)


def _matrix_vector(a: Tensor, _: Tensor, **__: Any) -> int:
    return 2 * a.numel()


def _matrix_vector_and_sum(_: Tensor, a: Tensor, __: Tensor, **___: Any) -> int:
    return 2 * a.numel()


def _grouped_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Each row meets one expert's matrix, wherever the group borders lie."""
    if a.dim() == 3 and b.dim() == 2:
        return 2 * a.shape[-2] * b.numel()
    return 2 * a.numel() * b.shape[-1]


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """Once the forward for each gradient asked for, groups respected (torch's formula multiplies by them)."""
    transposed, (for_input, for_weight, _bias) = rest[4], rest[7]
    positions = prod((x if transposed else grad).shape[2:]) * x.shape[0]
    return 2 * positions * weight.numel() * (int(for_input) + int(for_weight))


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Queries by keys, then scores by values; heads of keys and values may be fewer (grouped queries)."""
    return 2 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> int:
    """Four products; the fifth of torch's formula forms the scores again, which the model does not need."""
    return 2 * _attention(q, k, v)


def _without_fifth_product(formula: Formula) -> Formula:
    def of_model(*args: Any, **kwargs: Any) -> int:
        return formula(*args, **kwargs) * 4 // 5

    return of_model


def _mkldnn_rnn(x: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * prod(x.shape[:-1]) * (input_weight.numel() + hidden_weight.numel())


def _mkldnn_rnn_backward(*args: Any, **_: Any) -> int:
    return 2 * _mkldnn_rnn(*args)


def _fused_rnn(x: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """Every weight matrix of every layer and direction, once per time step and sample."""
    return 2 * prod(x.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _fused_rnn_backward(*args: Any, **_: Any) -> int:
    return 2 * _fused_rnn(*args)


_FORMULAS: dict[Any, Formula] = {
    **flop_registry,
    aten.mm: _product,
    aten.bmm: _product,
    aten.addmm: _product_and_sum,
    aten.baddbmm: _product_and_sum,
    aten.addbmm: _product_and_sum,
    aten._sparse_addmm: _product_and_sum,
    aten._addmm_activation: _product_and_sum,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.addmv: _matrix_vector_and_sum,
    aten._grouped_mm: _grouped_product,
    aten._scaled_grouped_mm: _grouped_product,
    aten.convolution_backward: _convolution_backward,
    aten.mkldnn_rnn_layer: _mkldnn_rnn,
    aten.mkldnn_rnn_layer_backward: _mkldnn_rnn_backward,
    aten._cudnn_rnn: _fused_rnn,
    aten._cudnn_rnn_backward: _fused_rnn_backward,
    aten.miopen_rnn: _fused_rnn,
    aten.miopen_rnn_backward: _fused_rnn_backward,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    aten._flash_attention_backward: _without_fifth_product(flop_registry[aten._flash_attention_backward]),
    aten._efficient_attention_backward: _without_fifth_product(flop_registry[aten._efficient_attention_backward]),
}
