"""The structure of a model without its numbers, on which forwards are surveyed."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.dry import dry_mode
from shoal.errors import LayoutError, ShoalError
from shoal.parallel.mode import own_attributes
from shoal.parallel.pipeline.program import Program
from shoal.parallel.pipeline.survey import Survey
from shoal.parallel.pipeline.values import number_of, versions_of
from shoal.parallel.pipeline.walk import NO_NUMBERS, View, returned
from shoal.parallel.writes import memory_of
from shoal.world import World

_LISTS = (list, tuple, dict)
_NUMBERS = (int, float, bool, str, complex)


class Skeleton:
    """A copy of a model with shapes for its parameters, and for the buffers of its atoms; it takes no memory.

    Attributes:
        model: the copy.
        is_dry: the original has no numbers either, where a layout is only planned.
    """

    def __init__(self, original: nn.Module, world: World, atoms: Sequence[str], view: View) -> None:
        self._original, self._world, self._view = original, world, view
        self.is_dry = dry_mode() is not None
        self._mode = dry_mode() or FakeTensorMode(allow_non_fake_inputs=True)
        self._names: dict[int, str] = {}
        self.model = self._copied(original, atoms)
        view.put_on(self.model, list(atoms))
        inside = [f"{atom}." for atom in atoms]
        self._beside = [
            m for n, m in self.model.named_modules() if not any(f"{n}.".startswith(each) for each in inside)
        ]
        self._programs: dict[Any, Program] = {}
        self._modes: Any = None
        self.follow()

    def _copied(self, original: nn.Module, atoms: Sequence[str]) -> nn.Module:
        inside = {id(b) for atom in atoms for b in original.get_submodule(atom).buffers()}
        memo: dict[int, Any] = {}
        for name, param in original.named_parameters():
            fake = nn.Parameter(self._as_shape(param.detach()), requires_grad=param.requires_grad)
            memo[id(param)] = fake
            self._names[id(fake)] = name
        for buffer in original.buffers():
            memo[id(buffer)] = self._as_shape(buffer) if id(buffer) in inside else buffer
        try:
            return copy.deepcopy(original, memo)
        except Exception as error:  # whatever a user's class does when it is copied
            raise LayoutError(
                f"{self._world.layout}: a pipeline keeps a copy of the model's structure, and "
                f"{type(original).__name__} cannot be copied ({type(error).__name__}: {error}). Let it be copied "
                "(copy.deepcopy), or take a layout without pp."
            ) from error

    def _as_shape(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta":  # not made yet; it will be where the world is
            with self._mode:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._world.device)
        return tensor.clone() if self.is_dry else self._mode.from_tensor(tensor)

    def follow(self) -> None:
        """Take over what is training of the original, and what is trained."""
        modules, params = self._original.modules(), self._original.parameters()
        modes = tuple(module.training for module in modules), tuple(param.requires_grad for param in params)
        if modes == self._modes:
            return
        self._modes = modes
        for module, training in zip(self.model.modules(), modes[0], strict=True):
            module.training = training
        for param, trained in zip(self.model.parameters(), modes[1], strict=True):
            param.requires_grad_(trained)

    def program(self, args: Any, kwargs: Any) -> tuple[Any, Program]:
        """Of a call with these inputs, and its key; surveyed once for all calls that are alike."""
        leaves = [
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in tree_leaves((args, kwargs))
        ]
        device = self._world.device.type
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = (tuple(leaves), self._modes, torch.is_grad_enabled(), half)
        if key not in self._programs:
            self._programs[key] = self._survey(args, kwargs)
        return key, self._programs[key]

    def _survey(self, args: Any, kwargs: Any) -> Program:
        params_in = {memory_of(param): name for name, param in self.model.named_parameters()}
        survey = Survey(self._mode, self._names, params_in, is_dry=self.is_dry)
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))  # each stage is given the batch as it was
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = versions_of(given)
        try:
            with _unchanged(self.model), self._view.walking(survey), survey:
                before = [_state(module) for module in self._beside]
                output = returned(self.model(*args, **kwargs))
            survey.program.moves_state = self._state_moves(before)
            survey.program.has_effects |= survey.program.moves_state
        except NO_NUMBERS as error:
            raise LayoutError(
                f"{self._world.layout}: the model's own forward asks for numbers where a pipeline has shapes alone "
                f"({error}). If it calls torch.utils.checkpoint, leave that to the layout (recompute=block); else do "
                "what asks for them inside of a module."
            ) from error
        except ShoalError:
            raise
        except Exception as error:  # on numbers it has run, when its work was counted
            why = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            raise LayoutError(
                f"{self._world.layout}: the model's own forward cannot be followed on shapes alone, as a pipeline does "
                f"({why}). What compiled or scripted code, numpy, or a hook does with tensors between modules cannot "
                "be seen: do it inside of a module, or take a layout without pp."
            ) from error
        if versions_of(given) != versions:
            raise LayoutError(
                f"{self._world.layout}: the model's own forward writes in place into what it is called with, and each "
                "stage of a pipeline is called with it. Let it make a new tensor, as x = x - mean does."
            )
        return survey.end(output)

    def _state_moves(self, before: Sequence[dict[str, tuple[Any, ...]]]) -> bool:
        """Whether the forward has changed what the modules beside the atoms keep.

        Raises:
            LayoutError: it keeps what modules have made.
        """
        moved = False
        for module, old in zip(self._beside, before, strict=True):
            new = _state(module)
            changed = [value for key, value in new.items() if not _is_same(old.get(key, ()), value)]
            moved |= bool(changed)
            kept = [leaf for value in changed for leaf in value]
            if any(isinstance(leaf, Tensor) and number_of(leaf) is not None for leaf in kept):
                raise LayoutError(
                    f"{self._world.layout}: the forward of {type(module).__name__} keeps what its modules have made, "
                    "for the next forward, and in a pipeline each stage has a part of it. Return it, and give it to "
                    "the next forward; or keep it inside of the module that makes it."
                )
        return moved


def _state(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What it keeps as attributes of its own; of lists and dicts what they hold, too."""
    held = own_attributes(module)
    inner = {key: tuple(v.values() if isinstance(v, dict) else v) for key, v in held.items() if isinstance(v, _LISTS)}
    return {key: (value, *inner.get(key, ())) for key, value in held.items()}


def _is_same(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    same = (
        a is b or (type(a) is type(b) and isinstance(a, _NUMBERS) and a == b) for a, b in zip(old, new, strict=False)
    )
    return len(old) == len(new) and all(same)


@contextlib.contextmanager
def _unchanged(skeleton: nn.Module) -> Iterator[None]:
    """Afterwards random numbers, and the buffers that the model shares, are as they were."""
    real = [(b, b.detach().clone()) for b in skeleton.buffers() if not hasattr(b, "fake_mode")]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, value in real:
                buffer.copy_(value)
