"""A forward on shapes alone, written down as a program."""

import copy
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from shoal.errors import LayoutError
from shoal.parallel.pipeline.program import Call, Meta, Program
from shoal.parallel.pipeline.values import (
    SIDE,
    changed_of,
    leaves_in,
    made_by,
    name_of,
    number_of,
    tensors_in,
    uses_of,
    versions_of,
)
from shoal.parallel.pipeline.walk import HOOKS, NO_NUMBERS, Walk, run_atom
from shoal.parallel.wide import tensors_in as all_tensors_in
from shoal.parallel.writes import memory_of, written_by

_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a property of C


class Survey(Walk):
    """Writes the program down: atoms run on fake tensors, what is between them on what it gets.

    Args:
        mode: of the fake tensors.
        names: of the parameters, by id.
        params_in: the same by their memory.
    """

    def __init__(
        self, mode: FakeTensorMode, names: Mapping[int, str], params_in: Mapping[int, str], *, is_dry: bool
    ) -> None:
        super().__init__()
        self.program = Program()
        self._mode, self._names = mode, names
        self._leaks_show = not is_dry
        self._in_memory: dict[int, list[tuple[int, Tensor]]] = {}  # by storage, which their tensors keep alive: values
        self._made: list[Tensor] = []  # by number
        self._params_in = params_in  # by storage: the names of parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in leaves_in(args, kwargs or {}) if self._leaks_show else ():
            if isinstance(leaf, FakeTensor) and id(leaf) not in self._names and number_of(leaf) is None:
                self._check_leak(leaf, name_of(func))
        return super().__torch_function__(func, types, args, kwargs)

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run it, and note what it used and made."""
        tensors = [leaf for leaf in leaves_in(args, kwargs) if isinstance(leaf, Tensor)]
        _check_sides(tensors, name_of(func))
        self._check_function(func, tensors)
        versions = versions_of(tensors)
        uses = uses_of(tensors)
        try:
            out = func(*args, **kwargs)
        except NO_NUMBERS as error:
            raise LayoutError(
                f"the model's own forward decides between its modules by numbers that parameters have made "
                f"({name_of(func)}), and only one stage of a pipeline has them. Do it inside of a module."
            ) from error
        written = tuple(changed_of(tensors, versions))
        changed = [tensors[place] for place in written]
        self._check_no_parameter(changed, name_of(func))
        plain = next((t for t in changed if number_of(t) is None), None)
        if plain is not None:
            raise LayoutError(
                f"the model's own forward writes what parameters have made into a tensor of shape {tuple(plain.shape)} "
                f"({name_of(func)}, between its modules), and a pipeline cannot follow that. Use torch.cat or "
                "torch.stack, or do it inside of a module."
            )
        place, made = self.place, made_by(out, changed)
        self.program.has_effects |= func in HOOKS
        call = Call("", name_of(func), uses, (), frozenset(self._params(tensors)), self._sharers(changed), written)
        self._note(call, made)
        if made and not changed and not {id(t) for t in made} & {id(t) for t in tensors}:
            self.program.outputs[place] = out
        return out

    def atom(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """Run it on shapes, and note the same."""
        _check_no_checkpoint(name)
        tensors = tensors_in((args, kwargs))
        _check_sides(tensors, name)
        uses = uses_of(tensors)
        kept_before = {id(tensor) for tensor in _attributes(module)}
        with _pop_mode_temporarily():  # out of sight of the walk
            args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
            given = tensors_in((args, kwargs))
            kept = tree_map(_copied_object, (args, kwargs))
            contents = _contents(args, kwargs)
            with _Touched(self._names, name, given) as touched, _Writes() as writes:
                try:
                    with self._mode:
                        out = run_atom(module, args, kwargs)
                except NO_NUMBERS:  # it decides by numbers: an expert that gets no token
                    out = self._run_on_zeros(module, *kept)
            changed = [t for t, inner in zip(tensors, given, strict=True) if memory_of(inner) in writes.memory]
        if _contents(args, kwargs) != contents:
            raise LayoutError(
                f"{name} puts something into a list or dict that it is given, which the other stages of a pipeline "
                f"would not see. Let {name} return it."
            )
        if any(number_of(tensor) is None for tensor in changed):
            raise LayoutError(
                f"{name} changes what it is given, in place, and what each stage of a pipeline has made for itself. "
                "Let it make a new tensor, as x = x + y does."
            )
        returned = {id(tensor) for tensor in (*tensors_in(out), *tensors)}
        for tensor in _attributes(module):
            if id(tensor) not in kept_before | returned:
                tensor.__dict__[SIDE] = name
        self.program.outputs[self.place] = out
        self._note(Call(name, name, uses, (), frozenset(touched.names), self._sharers(changed)), made_by(out, []))
        return out

    def _run_on_zeros(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The shapes that a copy of it gives with weights and inputs of zeros, which takes its memory for a moment."""
        fakes = [t for t in (*module.parameters(), *module.buffers()) if isinstance(t, FakeTensor)]
        memo: dict[int, Any] = {}
        for fake in fakes:
            real = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
            memo[id(fake)] = nn.Parameter(real, fake.requires_grad) if isinstance(fake, nn.Parameter) else real
        args, kwargs = tree_map_only(Tensor, _zeros, (args, kwargs))
        out = run_atom(copy.deepcopy(module, memo), args, kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
            return tree_map_only(Tensor, self._fake, out)

    def end(self, output: Any) -> Program:
        """The program, given what the model has returned."""
        returned = list(all_tensors_in(output))
        _check_sides(returned, "the end")
        # Only now: within a function of autograd's own, and before its view was written, a tensor has no gradient.
        for number, tensor in enumerate(self._made):
            self.program.values[number] = replace(self.program.values[number], requires_grad=tensor.requires_grad)
        self.program.returns, self.program.result = uses_of(returned), output
        return self.program

    def _fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def _params(self, tensors: list[Tensor]) -> set[str]:
        return {self._names[id(t)] for t in tensors if id(t) in self._names}

    def _sharers(self, tensors: list[Tensor]) -> tuple[int, ...]:
        """The values that share memory with these."""
        found = [number for tensor in tensors for number, _ in self._in_memory.get(memory_of(tensor), ())]
        return tuple(dict.fromkeys(found))

    def _note(self, call: Call, made: list[Tensor]) -> None:
        """A call that is done; what it has made is numbered."""
        if made or call.atom:
            makes = self._number(made)
            self.program.calls.append(replace(call, makes=makes))
            self.program.values += [Meta(tuple(t.shape), t.dtype, t.requires_grad) for t in made]
            self._made += made
            for number, tensor in zip(makes, made, strict=True):
                self._in_memory.setdefault(memory_of(tensor), []).append((number, tensor))

    def _check_leak(self, tensor: Tensor, reader: str) -> None:
        """What has no numbers here was made inside of a module, if it was not returned by one."""
        if SIDE not in tensor.__dict__:
            raise LayoutError(
                f"the model's own forward reads a tensor of shape {tuple(tensor.shape)} ({reader}) that one of its "
                "modules has made, or holds, and has not returned: in a pipeline only one stage has it. Let the module "
                "return it beside its output."
            )

    def _check_function(self, func: Any, tensors: list[Tensor]) -> None:
        """What no stage can do by itself, done between modules."""
        if func in _GRADIENTS:
            raise LayoutError(
                f"the model's own forward calls torch.autograd.{func.__name__} between its modules, and each stage of "
                "a pipeline has a part of the graph alone. Do it inside of one module, or take a layout without pp."
            )
        if func == _SET_DATA and isinstance(tensors[0], nn.Parameter):
            self._check_no_parameter(tensors[:1], ".data =")
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._names:
                raise LayoutError(
                    f"the model's own forward reads a parameter of shape {tuple(tensor.shape)} ({name_of(func)}) that "
                    "is none of the model's own: it lies in a closure, or in a plain list. Let the model have it as an "
                    "attribute, and read it there."
                )

    def _check_no_parameter(self, changed: list[Tensor], writer: str) -> None:
        found = next((name for tensor in changed if (name := self._params_in.get(memory_of(tensor)))), None)
        if found is not None:
            raise LayoutError(
                f"the model's own forward writes into {found} ({writer}, between its modules): only one stage of a "
                "pipeline would do it. Do it in the optimizer's step, or inside of the module that uses it."
            )


def _check_no_checkpoint(name: str) -> None:
    """What runs again in a backward runs without a walk, on the shapes of what another stage has."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise LayoutError(
                f"the model's own forward calls {name} through torch.utils.checkpoint, which would run it again where "
                "a pipeline has no values for it. Leave that to the layout: recompute=block."
            )
        frame = frame.f_back


def _attributes(module: nn.Module) -> list[Tensor]:
    """The tensors that it, or a module in it, keeps as plain attributes or in lists and dicts that are."""
    held = (value for inner in module.modules() for key, value in inner.__dict__.items() if key[:1] != "_")
    return [leaf for value in held for leaf in _inside(value) if isinstance(leaf, Tensor)]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_sides(tensors: list[Tensor], reader: str) -> None:
    for tensor in tensors:
        if (atom := tensor.__dict__.get(SIDE)) is not None:
            raise LayoutError(
                f"{atom} keeps a tensor that it has made as an attribute, and the model's own forward reads it there "
                f"(in {reader}): in a pipeline only one stage has it. Let {atom} return it beside its output."
            )


def _copied_object(leaf: Any) -> Any:
    """A cache that the module fills must not be filled twice."""
    if isinstance(leaf, Tensor | str | int | float | bool | None):
        return leaf
    try:
        with _SharedTensors():
            return copy.deepcopy(leaf)
    except Exception:  # whatever a user's class does when it is copied
        return leaf


class _SharedTensors(TorchFunctionMode):
    """What is copied within shares its tensors, which may be those of a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].detach() if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def _zeros(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device).requires_grad_(tensor.requires_grad)


class _Touched(TorchFunctionMode):
    """Which parameters take part in what runs within an atom; what it reads that it was not given is refused."""

    def __init__(self, names: Mapping[int, str], atom: str, given: list[Tensor]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._known, self._atom, self._given = names, atom, {id(tensor) for tensor in given}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in leaves_in(args, kwargs or {}):
            if isinstance(leaf, nn.Parameter) and id(leaf) in self._known:
                self.names.add(self._known[id(leaf)])
            elif isinstance(leaf, Tensor) and id(leaf) not in self._given:
                self._check(leaf)
        return func(*args, **(kwargs or {}))

    def _check(self, tensor: Tensor) -> None:
        maker = tensor.__dict__.get(SIDE)
        if number_of(tensor) is not None or maker not in (None, self._atom):
            raise LayoutError(
                f"{self._atom} reads a tensor that it is not given and that another module has made or kept "
                f"({maker or 'as an attribute'}): in a pipeline only one stage has it. Pass it as an argument."
            )


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook has no types
    """The memory that operations within write into, also where no version tells (`x.data.mul_`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor has its constructor
        self.memory: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch wraps the handler below in a function that imports torch._dynamo, one second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.memory |= written_by(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _contents(args: Any, kwargs: Any) -> tuple[str, list[int]]:
    """What lists and dicts among these hold, by structure and identity."""
    leaves, structure = tree_flatten((args, kwargs))
    return str(structure), [id(leaf) for leaf in leaves]
