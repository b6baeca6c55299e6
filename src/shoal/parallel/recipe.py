"""Building a model without its weights: what its constructors do to each parameter is written down, and done later.

    with Recipes() as recipes:
        model = make()                       # parameters are on `meta`; nothing was drawn
    recipes.value("blocks.3.up.weight", seed)    # this one, alone, as large as it is

A parameter is drawn from (seed, its name) alone, so it is the same whoever else is built, in every layout; and never
more than one whole parameter is in memory. Buffers are built as ever: they are small, and may be computed from all.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.errors import JobError

_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a property made in C


@dataclass(frozen=True)
class _Line:
    """One operation on tensors that are not there: its inputs and outputs as numbers of tensors."""

    func: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    outputs: tuple[int, ...]
    root: int  # the parameter (or tensor) whose memory the output shares


@dataclass(frozen=True)
class _Ref:
    number: int


_current: ContextVar["Recipes | None"] = ContextVar("shoal_recipes", default=None)


class Recipes:
    """The lines of all constructors, by parameter."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._numbers: dict[int, int] = {}
        self._pieces: dict[Any, int] = {}
        self._alive: list[Tensor] = []  # an id belongs to a tensor as long as that lives
        self._roots: dict[int, int] = {}
        self._given: dict[int, Tensor] = {}
        self._names: dict[str, int] = {}

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around the construction of a model."""
        hook = register_module_parameter_registration_hook(self._on_register)  # type: ignore[arg-type]
        before = {name: init for name, init in vars(nn.init).items() if name.endswith("_") and callable(init)}
        vars(nn.init).update({name: _as_one(init) for name, init in before.items()})
        token = _current.set(self)
        try:
            with _LooksPresent(), _Writer(self):
                yield
        finally:
            _current.reset(token)
            vars(nn.init).update(before)
            hook.remove()

    def know(self, model: nn.Module) -> None:
        """Which recipe is whose."""
        self._names = {name: self._number(param) for name, param in model.named_parameters(remove_duplicate=False)}

    def value(self, name: str, seed: Callable[[str], None]) -> Tensor:
        """The whole parameter, on the CPU; `seed` starts the random numbers for a name.

        Raises:
            JobError: its constructor read values that are not there yet.
        """
        number = self._names[name]
        seed(min(other for other, same in self._names.items() if same == number))
        return self._cook(number)

    def _cook(self, number: int) -> Tensor:
        """Run the lines that write into one root, in their order, and what they read before."""
        lines, needed = [], {number}
        for line in reversed(self._lines):
            if line.root in needed:
                lines.append(line)
                needed |= {self._roots[read] for read in line.reads}
        made: dict[int, Tensor] = {root: self._given[root].clone() for root in needed if root in self._given}
        with torch.no_grad():
            for line in reversed(lines):
                args, kwargs = _filled((line.args, line.kwargs), made)
                out = line.func(*args, **kwargs)
                made |= zip(line.outputs, [o for o in tree_leaves(out) if isinstance(o, Tensor)], strict=False)
        return made[number]

    def _on_register(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or _is_absent(param) or isinstance(param, nn.parameter.UninitializedParameter):
            return None
        absent = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        number = self._number(absent)
        self._roots[number] = number
        self._given[number] = param.detach()  # memory that nobody has written to yet costs nothing
        return absent

    def _number(self, tensor: Tensor) -> int:
        """One for each tensor; two objects that are the same piece of memory, as a Parameter and its data, have one."""
        if id(tensor) not in self._numbers:
            piece = (tensor.untyped_storage()._cdata, tensor.shape, tensor.stride(), tensor.storage_offset())
            self._numbers[id(tensor)] = self._pieces.setdefault(piece, len(self._pieces))
            self._alive.append(tensor)
        return self._numbers[id(tensor)]

    def _write(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and _is_absent(t)]
        reads = frozenset(self._number(t) for t in given)
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        numbers = tuple(self._number(t) for t in outs)
        root = next((self._roots[self._number(t)] for t in given if _shares(t, outs)), numbers[0] if numbers else -1)
        for number in (*numbers, *reads):
            self._roots.setdefault(number, root)
        known = tree_map_only(Tensor, lambda t: _Ref(self._number(t)) if _is_absent(t) else t, (args, kwargs))
        self._lines.append(_Line(func, known[0], known[1], reads, numbers, root))


class _Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook has no types
    def __init__(self, recipes: Recipes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recipes = recipes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch wraps the handler in a function that imports its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        absent = any(isinstance(t, Tensor) and _is_absent(t) for t in tree_leaves((args, kwargs)))
        if absent and func is torch.ops.aten._local_scalar_dense.default:
            raise JobError(
                "a constructor of the model reads the value of a parameter (.item(), bool(), print), which is not "
                "there yet with init=by-name. Leave that out, or build the model whole: --set init=whole"
            )
        out = func(*args, **kwargs)
        if absent:
            self._recipes._write(func, args, kwargs, out)
        return out


def _as_one(init: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An initialiser is one line: inside, some look at values, and some leave `meta` alone.

    A library that is imported meanwhile may keep this function for good, so it asks who is writing now.
    """

    @functools.wraps(init)
    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        recipes = _current.get()
        if recipes is None or not _is_absent(tensor):
            return init(tensor, *args, **kwargs)
        recipes._write(init, (tensor, *args), kwargs, tensor)
        return tensor

    return noted


class _LooksPresent(TorchFunctionMode):
    """Code that asks whether a parameter is on `meta` does so to skip its initialisation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _IS_META:
            return False
        return func(*args, **(kwargs or {}))


def _is_absent(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _shares(tensor: Tensor, outs: list[Tensor]) -> bool:
    return any(out.untyped_storage()._cdata == tensor.untyped_storage()._cdata for out in outs)


def _filled(tree: Any, made: dict[int, Tensor]) -> Any:
    return tree_map_only(_Ref, lambda ref: made[ref.number], tree)
