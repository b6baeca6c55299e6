"""float64 throughout: a model that casts to float32 in its own code computes that part in float64 too.

Norms and routers of many models do so for the sake of half precision. In a float64 run, whose purpose is to compare
numbers to the last digits, each such cast would bring back rounding of 1e-7, and a router would amplify it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}


class Widened(TorchFunctionMode):
    """Within: whoever asks for a narrower floating-point type gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        if any(arg in _NARROW for arg in args if isinstance(arg, torch.dtype)):
            args = tuple(_wide(arg) for arg in args)
        if kwargs and isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs = kwargs | {"dtype": _wide(kwargs["dtype"])}
        return func(*args, **(kwargs or {}))


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
