"""A model's own forward, run from the viewpoint of one stage: what is elsewhere is a shape.

The forward runs unchanged on every stage. A call of an atom of another stage gives back shapes without numbers
(fake tensors), and so does a function on them; where a call of this stage is given such a shape, the tensor has come
from the stage before. So residual sums, skip connections, masks and positions need no care of the user's, and no trace
of the model is kept: what the model decides in Python it decides anew in each forward.
"""

import contextlib
import numbers
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shoal.errors import JobError
from shoal.parallel.pipeline.program import Cut, Program
from shoal.parallel.pipeline.values import (
    AWAY,
    ELSEWHERE,
    NUMBER,
    is_followed,
    leaves_in,
    made_by,
    mapped,
    may_draw,
    name_of,
    tensors_in,
    uses_of,
)
from shoal.parallel.swap import become

_WALK = "_shoal_walk"  # of an atom: where its walk is found, and its name
HOOKS = (Tensor.register_hook, Tensor.retain_grad)
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # a property of C
_NUMBERS = (numbers.Number, np.generic, str)
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
        for leaf in leaves_in(args, kwargs):
            if is_followed(leaf):
                return self.function(func, args, kwargs)
        return self.plain(func, args, kwargs)

    def plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function between atoms of which all stages know all."""
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
            tensor.__dict__[NUMBER] = number
        self.place += 1
        return tuple(range(first, self._next_value))


def run_atom(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The atom itself, with its hooks. An output that is an input, or a parameter, becomes a view of it.

    So a value has one number in the eyes of every stage.
    """
    given = {id(leaf) for leaf in leaves_in(args, kwargs)}
    out = super(Atom, module).__call__(*args, **kwargs)  # type: ignore[misc]  # of the user's class
    return mapped(lambda t: t.view_as(t) if id(t) in given or isinstance(t, nn.Parameter) else t, out)


def returned(output: Any) -> Any:
    """What a model returns, within its walk: a parameter among it becomes a value, so that one stage gives it."""
    return mapped(lambda tensor: tensor.view_as(tensor) if isinstance(tensor, nn.Parameter) else tensor, output)


def check_is_here(tensors: list[Tensor], reader: str) -> None:
    """No tensor among these is of another stage.

    Raises:
        JobError: one is; in a pipeline it would be read as empty.
    """
    for tensor in tensors:
        if (name := tensor.__dict__.get(AWAY)) is not None:
            raise JobError(
                f"{reader} reads {name}, which is in another stage of the pipeline. The model's own forward may use a "
                "parameter where it did so for shoal's sample of two, too; what else needs it belongs into a module."
            )


class StageWalk(Walk):
    """Runs what is of one stage, and passes over the rest.

    Args:
        received: by number, the values that the stage before has sent.
        shapes: by the id of a parameter that is not here, a fake tensor of its shape.
        common: put around what draws the same in all stages.
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
        common: Around,
        likenesses: dict[int, Tensor],
        *,
        is_dry: bool = False,
    ) -> None:
        super().__init__()
        self._program, self._cut, self._stage = program, cut, stage
        self._shapes, self.common, self._is_dry = shapes, common, is_dry
        self._likenesses = likenesses
        self._held = dict(received)  # by number: what this stage has, where it is wanted by number
        self._sent = set(cut.leaves(stage))
        self._is_over = False  # all calls of this stage have run, and what follows leaves nothing behind

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Here, on numbers; or as a shape."""
        if self._is_over and self._is_next(func):
            raise Finished
        if args and isinstance(args[0], Tensor) and ELSEWHERE in args[0].__dict__:
            if func in HOOKS:  # where its numbers are, it is called
                return RemovableHandle(OrderedDict())
            if func == _REQUIRES_GRAD:
                return self._program.values[args[0].__dict__[NUMBER]].requires_grad
        originals = [leaf for leaf in leaves_in(args, kwargs) if isinstance(leaf, Tensor)]
        uses = uses_of(originals)
        if uses:
            is_here = max(self._home(value) for value in uses) == self._stage
        else:  # parameters alone: their shape is known everywhere; what is made of them, in one stage
            out = func(*self._as_shapes(args), **self._as_shapes(kwargs))
            if not made_by(out, []):
                return out
            is_here = self._cut.homes[self.place] == self._stage
        check_is_here([t for t in originals if is_here or not isinstance(t, nn.Parameter)], name_of(func))
        if not is_here and self._is_next(func):
            return self._passed_over(name_of(func), uses)
        convert = self._resolved if is_here else self._as_shapes
        args, kwargs = convert(args), convert(kwargs)
        with contextlib.nullcontext() if is_here else torch.no_grad():
            out = func(*args, **kwargs)
        if made := made_by(out, self._changed(func, args, kwargs)):
            self._made(name_of(func), uses, made, is_here)
        return out

    def plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """In every stage; what it draws is drawn alike."""
        with self.common() if may_draw(func) else contextlib.nullcontext():
            return func(*args, **kwargs)

    def atom(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """Here, or the shapes of what it gives."""
        if self._is_over:
            raise Finished
        with _pop_mode_temporarily():  # out of sight of this walk
            uses = uses_of([leaf for leaf in leaves_in(args, kwargs) if isinstance(leaf, Tensor)])
            self._check_path(name, uses)
            if self._cut.homes[self.place] != self._stage:
                return self._passed_over(name, uses)
            out = run_atom(module, self._resolved(args), self._resolved(kwargs))
            self._check_numbers(name, out)
            self._check_plain(name, out)
            self._made(name, uses, made_by(out, []), True)
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

    def _passed_over(self, name: str, uses: tuple[int, ...]) -> Any:
        """What the next call gives, as shapes."""
        out = mapped(self._again, self._program.outputs[self.place])
        self._made(name, uses, made_by(out, []), False)
        return out

    def _again(self, tensor: Tensor) -> Tensor:
        # Walks run one after the other, so all can use one, which nothing has changed in place.
        known = self._likenesses.get(id(tensor))
        if known is None or known._version:
            known = self._likenesses[id(tensor)] = _like(tensor)
        return known

    def end(self, output: Any) -> Any:
        """What the model has returned, in the last stage with what came from stages before."""
        return self._resolved(output) if self._stage == self._cut.num_stages - 1 else output

    def leaves(self) -> list[Tensor]:
        """What the next stage is sent."""
        found = []
        for number in self._cut.leaves(self._stage):
            value = self._held[number]
            if value.requires_grad and not self._program.values[number].requires_grad and torch.is_grad_enabled():
                raise JobError(
                    f"a value of shape {tuple(value.shape)} leaves stage {self._stage} with a gradient, and for shapes "
                    "alone it had none: what the model's own forward does there depends on numbers. Do it inside of a "
                    "module."
                )
            found.append(value.view_as(value))  # of what is only passed on, a view: it has a backward of its own
        return found

    def _home(self, value: int) -> int:
        return self._cut.made_in[value]

    def _made(self, name: str, uses: tuple[int, ...], made: list[Tensor], is_here: bool) -> None:
        self._check_path(name, uses, len(made))
        place = self.place
        makes = self._number(made)
        if is_here:
            self._check_shapes(name, makes, made)
            self._held |= {n: t for n, t in zip(makes, made, strict=True) if n in self._sent}
        else:
            for tensor in made:
                tensor.__dict__[ELSEWHERE] = True
        if self._stage < self._cut.num_stages - 1 and not self._program.has_effects:
            self._is_over |= place == self._cut.last[self._stage]

    def _check_path(self, name: str, uses: tuple[int, ...], num_made: int | None = None) -> None:
        """The calls are those of the program, on the same values."""
        calls = self._program.calls
        call = calls[self.place] if self.place < len(calls) else None
        if call is None or call.name != name or num_made not in (None, len(call.makes)):
            before = f"came to {call.name}" if call else "was at its end"
            raise JobError(
                f"the model's own forward came to {name} where it {before} before, with inputs of the same shapes. In "
                "a pipeline all stages must take the same path: let the forward decide by shapes or settings, or "
                "decide inside of a module."
            )
        if call.uses != uses:
            raise JobError(
                f"{name} is given {len(uses)} values that modules have made, and on shapes alone it was given "
                f"{len(call.uses)}, or others: some reach it by a way that the stages of a pipeline do not share (a "
                "hook or an object that collects what modules make). Let the modules return them."
            )

    def _check_shapes(self, name: str, makes: tuple[int, ...], made: list[Tensor]) -> None:
        for number, tensor in zip(makes, made, strict=True):
            meta = self._program.values[number]
            if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
                raise JobError(
                    f"{name} makes a tensor of {tuple(tensor.shape)} ({tensor.dtype}), and made one of {meta.shape} "
                    f"({meta.dtype}) from other inputs of the same shapes: it depends on their numbers, and other "
                    "stages of a pipeline cannot know that. Cut a batch in collate(), or do all that has such shapes "
                    "inside of one module."
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
            if isinstance(ours, _NUMBERS) and repr(ours) != repr(theirs):
                raise JobError(
                    f"{name} gives a number of its own, {ours}, that other stages of the pipeline cannot know (on "
                    f"shapes alone it gave {theirs}). Let it give a tensor, or use the number inside of {name}."
                )

    def _resolved(self, tree: Any) -> Any:
        """With numbers for shapes."""
        return mapped(self._resolve, tree)

    def _resolve(self, tensor: Tensor) -> Tensor:
        if ELSEWHERE not in tensor.__dict__:
            return tensor
        if (value := self._held.get(tensor.__dict__[NUMBER])) is None:
            raise JobError(
                f"the model's own forward needs a value of shape {tuple(tensor.shape)} here that it did not need on "
                "shapes alone: what it does with its modules' outputs depends on numbers. Let it decide by shapes or "
                "settings, or decide inside of a module."
            )
        return value

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
