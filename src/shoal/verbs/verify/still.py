"""A forward without dropout: its draws differ between layouts by design, so no two could be compared."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_RATES = ("p", "dropout", "dropout_p")  # what torch calls the share of zeros
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_WITH_DROPOUT = (_ATTENTION, torch.nn.functional.multi_head_attention_forward)


class Still(TorchFunctionMode):
    """While it is entered, no torch function drops anything; `silenced` names those that would have."""

    def __init__(self) -> None:
        super().__init__()
        self.silenced: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.backward and len(args) == 1 and all(v is None or v is False for v in named.values()):
            with self:
                return _backward(args[0])
        if func in _WITH_DROPOUT or "dropout" in _name(func):
            args, named = self._silence(func, args, named)
        return func(*args, **named)

    def _silence(
        self, func: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        at = _rate_of(func)
        if at is None:
            return args, named
        position, name, default = at
        given = args[position] if position < len(args) else named.get(name, default)
        if given:
            self.silenced.add(f"{_name(func)} (p={given:g})")
        if position < len(args):
            return (*args[:position], 0.0, *args[position + 1 :]), named
        return args, named | {name: 0.0}


def _backward(loss: Tensor) -> None:
    """`loss.backward()` of a scalar, with this mode still on: a function that is overridden runs with it off, and
    activations that are computed again in backward would drop. Torch has no public way to it."""
    engine: Any = torch.autograd.Variable._execution_engine
    ones = torch.ones_like(loss, memory_format=torch.preserve_format)
    engine.run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", ""))  # descriptors of attributes have none


@cache
def _rate_of(func: Callable[..., Any]) -> tuple[int, str, float] | None:
    """Position, name and default of the argument that is the share of zeros."""
    if func is _ATTENTION:
        return 4, "dropout_p", 0.0  # a builtin, whose signature python cannot read
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except ValueError:
        return 1, "p", 0.5  # torch.dropout(input, p, train) and its kin
    for position, parameter in enumerate(parameters):
        if parameter.name in _RATES:
            return position, parameter.name, 0.0 if parameter.default is parameter.empty else parameter.default
    return None


def without_dropout(model: nn.Module) -> list[str]:
    """Sets the rate of torch's recurrent modules to 0, which drop inside of one function; their names."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.RNNBase) and m.dropout]
    for _, module in found:
        module.dropout = 0.0
    return [f"{name} (a recurrent layer)" for name, _ in found]
