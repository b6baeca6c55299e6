"""A dry run: a layout is built on shapes alone (torch's fake tensors), and what is computed has no numbers.

Whoever would read numbers on the host asks here whether there are any. A world may be fake and its tensors real: then
one rank computes for real, and the others are only made up.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only


class _Shapes(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's own hook has no types
    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shapes":
        return self  # every shape refers to it, and whoever copies a model would copy all that it knows


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Within: tensors are shapes. Open the world before it: its groups and meshes are real."""
    with warnings.catch_warnings():
        # torch asks so whether there is memory to copy, and there is none.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with _Shapes(allow_non_fake_inputs=True):
            yield


def dry_mode() -> FakeTensorMode | None:
    """The mode under which this code runs, where it runs dry."""
    mode: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode


def is_dry() -> bool:
    """Whether what is made here has no numbers."""
    return dry_mode() is not None


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor can be read: it is no shape, and not on `meta`."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def as_shapes(tree: Any) -> Any:
    """The same without numbers, in a dry run."""
    mode = dry_mode()
    assert mode is not None, "shapes are of a dry run"
    return tree_map_only(Tensor, mode.from_tensor, tree)


@contextlib.contextmanager
def numbers() -> Iterator[None]:
    """Within: tensors are real even in a dry run. Data are read so, as any user's code may look at them."""
    with unset_fake_temporarily():
        yield


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; of shapes nothing else is known than that they are of one shape."""
    if not (has_numbers(a) and has_numbers(b)):
        return a.shape == b.shape
    with numbers():
        return torch.equal(a, b)


def convert(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """`model._apply`, which torch cannot do to a shape that anybody refers to; shared ones stay shared."""
    if not any(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers())):
        model._apply(change)  # type: ignore[no-untyped-call]
        return
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}  # with the one that it is made of, so that its id stays its own
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in made:
                with torch.no_grad():
                    changed = change(param)
                own = param if changed is param else nn.Parameter(changed, requires_grad=param.requires_grad)
                own.__dict__.update(param.__dict__)
                made[id(param)] = (param, own)
            module._parameters[name] = made[id(param)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
