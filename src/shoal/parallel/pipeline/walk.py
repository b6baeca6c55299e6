"""A model's own forward, run from the viewpoint of one stage: what is elsewhere is a shape.

The forward runs unchanged on every stage. A call of an atom of another stage gives back shapes without numbers
(fake tensors), and so does a function on them; where a call of this stage is given such a shape, the tensor has come
from the stage before. So residual sums, skip connections, masks and positions need no care of the user's, and no trace
of the model is kept: what the model decides in Python it decides anew in each forward.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from shoal.errors import JobError
from shoal.parallel.pipeline.program import Cut, Program
from shoal.parallel.swap import become
from shoal.parallel.writes import memory_of

_NUMBER = "_shoal_value"  # of a tensor: which value of the program it is
_ELSEWHERE = "_shoal_elsewhere"  # of a tensor: it is a shape, and its numbers are in another stage
_WALK = "_shoal_walk"  # of an atom: where its walk is found, and its name
SIDE = "_shoal_side"  # of a tensor: the atom that keeps it as an attribute
_HOOKS = (Tensor.register_hook, Tensor.retain_grad)
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # a property of C
_NUMBERS = (int, float, bool, str)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
NO_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)

Around = Callable[[], contextlib.AbstractContextManager[None]]


class Finished(BaseException):  # so that no `except Exception` of a model stops it
    """All calls of a stage have run; what follows in the forward is of later ones."""


class Walk(TorchFunctionMode):
    """Sees the calls of one forward: of atoms, and of functions that something of theirs goes into.

    Attributes:
        place: of the next call in the program.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = 0
        self._next_value = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(_is_followed(leaf) for leaf in leaves_in(args, kwargs)):
            return self.function(func, args, kwargs)
        return func(*args, **kwargs)

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function between atoms, on values or parameters."""
        raise NotImplementedError

    def atom(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """A call of an atom."""
        raise NotImplementedError

    def _number(self, made: list[Tensor]) -> tuple[int, ...]:
        """The next numbers, written on these tensors."""
        first, self._next_value = self._next_value, self._next_value + len(made)
        for number, tensor in enumerate(made, first):
            tensor.__dict__[_NUMBER] = number
        self.place += 1
        return tuple(range(first, self._next_value))


def _is_followed(leaf: Any) -> bool:
    known = getattr(leaf, "__dict__", ())
    return isinstance(leaf, nn.Parameter) or _NUMBER in known or SIDE in known


def leaves_in(args: Any, kwargs: Any) -> list[Any]:
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    is_flat = all(type(leaf) in _PLAIN or isinstance(leaf, Tensor) for leaf in leaves)
    return leaves if is_flat else tree_leaves(leaves)


def tensors_in(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def mapped(convert: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """As torch's `tree_map_only` of tensors; in what calls are mostly made of many times as quick."""
    if isinstance(tree, Tensor):
        return convert(tree)
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if kind is tuple or kind is list:
        return kind([mapped(convert, leaf) for leaf in tree])
    if kind is dict:
        return {key: mapped(convert, leaf) for key, leaf in tree.items()}
    return tree_map_only(Tensor, convert, tree)


def number_of(tensor: Tensor) -> int | None:
    return tensor.__dict__.get(_NUMBER)


def name_of(func: Any) -> str:
    return str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))


def versions_of(tensors: list[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def changed_of(tensors: list[Tensor], versions: list[int]) -> list[int]:
    """The places of those with another version than before; of several in one memory the first: a view's base."""
    now = versions_of(tensors)
    first: dict[int, int] = {}  # by memory
    for place, (before, after) in enumerate(zip(versions, now, strict=True)):
        if before != after:
            first.setdefault(memory_of(tensors[place]), place)
    return list(first.values())


def made_by(out: Any, changed: list[Tensor]) -> list[Tensor]:
    """The tensors that a function has made or changed, each once."""
    found = [t for t in tensors_in(out) if not isinstance(t, nn.Parameter)] + changed
    return list({id(t): t for t in found}.values())


def run_atom(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The atom itself, with its hooks. An output that is an input, or a parameter, becomes a view of it.

    So a value has one number in the eyes of every stage.
    """
    given = {id(leaf) for leaf in leaves_in(args, kwargs)}
    out = nn.Module.__call__(module, *args, **kwargs)
    return mapped(lambda t: t.view_as(t) if id(t) in given or isinstance(t, nn.Parameter) else t, out)


def uses_of(tensors: list[Tensor]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(n for n in map(number_of, tensors) if n is not None))


class StageWalk(Walk):
    """Runs what is of one stage, and passes over the rest.

    Args:
        received: by number, the values that the stage before has sent.
        shapes: by the id of a parameter that is not here, a fake tensor of its shape.
        around: put around each atom that runs here.
        likenesses: kept from walk to walk: of what other stages make, shapes to hand out.
        is_dry: this stage has no numbers either, as where a layout is only planned.
    """

    def __init__(
        self,
        program: Program,
        cut: Cut,
        stage: int,
        received: dict[int, Tensor],
        shapes: Mapping[int, Tensor],
        around: Around,
        likenesses: dict[int, Tensor],
        *,
        is_dry: bool = False,
    ) -> None:
        super().__init__()
        self._program, self._cut, self._stage = program, cut, stage
        self._shapes, self._around, self._is_dry = shapes, around, is_dry
        self._likenesses = likenesses
        self._held = dict(received)  # by number: what this stage has, where it is wanted by number
        self._sent = set(cut.leaves(stage))
        self._is_over = False  # all calls of this stage have run

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Here, on numbers; or as a shape."""
        if self._is_over and self._is_next(func):
            raise Finished
        if args and isinstance(args[0], Tensor) and _ELSEWHERE in args[0].__dict__:
            if func in _HOOKS:  # where its numbers are, it is called
                return RemovableHandle(OrderedDict())
            if func == _REQUIRES_GRAD:
                return self._program.values[args[0].__dict__[_NUMBER]].requires_grad
        originals = [leaf for leaf in leaves_in(args, kwargs) if isinstance(leaf, Tensor)]
        uses = uses_of(originals)
        if uses:
            is_here = max(self._home(value) for value in uses) == self._stage
        else:  # parameters alone: their shape is known everywhere; what is made of them, in one stage
            out = func(*self._as_shapes(args), **self._as_shapes(kwargs))
            if not made_by(out, []):
                return out
            is_here = self._cut.homes[self.place] == self._stage
        if not is_here and self._is_next(func):
            return self._passed_over(name_of(func))
        convert = self._resolved if is_here else self._as_shapes
        args, kwargs = convert(args), convert(kwargs)
        with contextlib.nullcontext() if is_here else torch.no_grad():
            out = func(*args, **kwargs)
        if made := made_by(out, self._changed(func, args, kwargs)):
            self._made(name_of(func), made, is_here)
        return out

    def atom(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """Here, or the shapes of what it gives."""
        if self._is_over:
            raise Finished
        self._check_path(name)
        with _pop_mode_temporarily():  # out of sight of this walk
            if self._cut.homes[self.place] != self._stage:
                return self._passed_over(name)
            with self._around():
                out = run_atom(module, self._resolved(args), self._resolved(kwargs))
        self._check_numbers(name, out)
        self._check_plain(name, out)
        self._made(name, made_by(out, []), True)
        return out

    def _changed(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """What of these the survey has seen to be changed: shapes of one memory are no views of each other here."""
        place, calls = self.place, self._program.calls
        if place >= len(calls) or not calls[place].changed or calls[place].name != name_of(func):
            return []
        tensors = [leaf for leaf in leaves_in(args, kwargs) if isinstance(leaf, Tensor)]
        return [tensors[index] for index in calls[place].changed if index < len(tensors)]

    def _is_next(self, func: Any) -> bool:
        """Whether this is the next call of the program, and all that it does is to make something."""
        place, calls = self.place, self._program.calls
        known = place in self._program.outputs and place < len(calls)
        return known and not calls[place].atom and calls[place].name == name_of(func)

    def _passed_over(self, name: str) -> Any:
        """What the next call gives, as shapes."""
        out = mapped(self._again, self._program.outputs[self.place])
        self._made(name, made_by(out, []), False)
        return out

    def _again(self, tensor: Tensor) -> Tensor:
        # Walks run one after the other, so all can use one, which nothing has changed in place.
        known = self._likenesses.get(id(tensor))
        if known is None or known._version:
            known = self._likenesses[id(tensor)] = _like(tensor)
        return known

    def end(self, output: Any) -> Any:
        """What the model has returned, with what came from stages before."""
        return self._resolved(output)

    def leaves(self) -> list[Tensor]:
        """What the next stage is sent."""
        # Of what is only passed on, a view: it has a backward of its own.
        return [self._held[n].view_as(self._held[n]) for n in self._cut.leaves(self._stage)]

    def _home(self, value: int) -> int:
        return self._cut.made_in[value]

    def _made(self, name: str, made: list[Tensor], is_here: bool) -> None:
        self._check_path(name, len(made))
        place = self.place
        numbers = self._number(made)
        if is_here:
            self._held |= {n: t for n, t in zip(numbers, made, strict=True) if n in self._sent}
        else:
            for tensor in made:
                tensor.__dict__[_ELSEWHERE] = True
        if self._stage < self._cut.num_stages - 1:
            self._is_over |= place == self._cut.last[self._stage]

    def _check_path(self, name: str, num_made: int | None = None) -> None:
        """The calls are those of the program."""
        calls = self._program.calls
        call = calls[self.place] if self.place < len(calls) else None
        if call is None or call.name != name or num_made not in (None, len(call.makes)):
            raise JobError(
                f"the model's forward came to {name} where it {'came to ' + call.name if call else 'was at its end'} "
                "before, with inputs of the same shapes. In a pipeline all stages must take the same path: let the "
                "forward decide by shapes or settings, or decide inside of a module."
            )

    def _check_numbers(self, name: str, out: Any) -> None:
        fakes = [t for t in tensors_in(out) if isinstance(t, FakeTensor)]
        if fakes and not self._is_dry:
            raise JobError(
                f"{name} was given a value of another stage in a way that a pipeline cannot see (inside of an object "
                "of its own class). Pass tensors as arguments, in tuples, lists or dicts."
            )

    def _check_plain(self, name: str, out: Any) -> None:
        """What is no tensor other stages know from the survey alone."""
        if isinstance(out, Tensor) or self._stage == self._cut.num_stages - 1:
            return
        known = tree_leaves(self._program.outputs[self.place])
        for ours, theirs in zip(tree_leaves(out), known, strict=False):
            if type(ours) in _NUMBERS and repr(ours) != repr(theirs):
                raise JobError(
                    f"{name} gives a number of its own, {ours}, that other stages of the pipeline cannot know (on "
                    f"shapes alone it gave {theirs}). Let it give a tensor, or use the number inside of {name}."
                )

    def _resolved(self, tree: Any) -> Any:
        """With numbers for shapes."""
        return mapped(self._resolve, tree)

    def _resolve(self, tensor: Tensor) -> Tensor:
        return self._held[tensor.__dict__[_NUMBER]] if _ELSEWHERE in tensor.__dict__ else tensor

    def _as_shapes(self, tree: Any) -> Any:
        return mapped(lambda t: self._shapes.get(id(t), t), tree)


def _like(tensor: Tensor) -> Tensor:
    """Another of the same shape; `detach` would do, at eight times the time."""
    if type(tensor) is not FakeTensor:
        return tensor.detach()
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(tensor.fake_mode, empty, tensor.device)


class Atom:
    """A module that no stage cuts, put under a walk."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Here, or in another stage."""
        view, name = self.__dict__[_WALK]
        if view.walk is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # of the class that it is mixed into
        return view.walk.atom(self, name, args, kwargs)


class View:
    """Where the atoms of a model find the walk that goes on, if any."""

    def __init__(self) -> None:
        self.walk: Walk | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "View":
        return self

    def put_on(self, model: nn.Module, names: list[str]) -> None:
        """Put these modules under it, as atoms."""
        for name in names:
            module = model.get_submodule(name)
            module.__dict__[_WALK] = (self, name)
            become(module, Atom)

    @contextlib.contextmanager
    def walking(self, walk: Walk) -> Iterator[None]:
        """Within: a forward is this walk's."""
        before, self.walk = self.walk, walk
        try:
            yield
        finally:
            self.walk = before
