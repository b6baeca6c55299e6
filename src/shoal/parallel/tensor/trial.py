"""The proof that a module computes the same when it is cut.

Each guess about a region (which layers, in which units, where its code spells sizes out) is tried on the live ranks
before a training begins: a copy of the module runs whole, a second one cut, in float64, on what the model gave the
module for one sample, in all the ways in which it called it, with weights moved away from special values. Outputs,
gradients of every parameter and gradients of the inputs must agree, or the guess is dropped.

A guess may fail in any way inside the user's code. The whole copy must not: where it does, nothing was tried, and
`UntriedError` says why. A complaint of Python about a line of shoal's is a mistake of ours, and is raised as it is.
"""

import contextlib
import copy
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from shoal.dry import is_dry, is_equal
from shoal.parallel.parts import Part, cut
from shoal.parallel.tensor.heads import Narrow, Rules, Seen, Watch
from shoal.parallel.tensor.peers import GivenUpElsewhereError, Peers, Trying
from shoal.parallel.tensor.region import Region, cut_layers
from shoal.parallel.tensor.stream import Undropped
from shoal.parallel.tensor.styles import Cut
from shoal.parallel.wide import WIDTHS, draws, is_close, moved, tensors_in, weights, wide, widened
from shoal.precision import Widened
from shoal.world import World

T = TypeVar("T")
_OWN_CODE = Path(__file__).parents[1]


class UntriedError(Exception):
    """A module cannot be copied, or its copy does not run whole; says why."""


class Call(NamedTuple):
    """What a module was called with, once, in the one look at a sample."""

    args: Any
    kwargs: Any


@dataclass
class Answer:
    """What a copy computed: outputs, gradients by parameter and of the inputs."""

    outputs: list[Tensor] = field(default_factory=list)
    params: dict[str, Tensor | None] = field(default_factory=dict)
    inputs: list[Tensor | None] = field(default_factory=list)

    def is_bitwise(self, other: "Answer") -> bool:
        """Whether both are the same to the last bit."""
        ours = [*self.outputs, *self.params.values(), *self.inputs]
        theirs = [*other.outputs, *other.params.values(), *other.inputs]
        pairs = zip(ours, theirs, strict=False)
        return len(ours) == len(theirs) and all(
            a is b if a is None or b is None else a.dtype == b.dtype and is_equal(a, b) for a, b in pairs
        )


class Trial:
    """Tries guesses about one module on the live ranks; every method is called on all of them.

    Attributes:
        draws: the module draws random numbers in training.
        seen: the sizes that its code spells out.

    Raises:
        UntriedError: there is nothing to compare with.
    """

    def __init__(self, module: nn.Module, calls: Sequence[Call], peers: Peers, world: World) -> None:
        self._peers, self._world, self._calls = Trying(peers), world, calls
        self._original = module
        reasons = []
        for width in WIDTHS:
            self._width = width
            try:
                self._run_whole()
                return
            except Exception as error:  # the user's code, which may not run alone, or not so wide
                if is_our_mistake(error):
                    raise
                kind = "" if isinstance(error, UntriedError) else f"{type(error).__name__}: "
                reasons.append(f"{kind}{error}".splitlines()[0])
        raise UntriedError(reasons[-1])  # in float32, where most models live: the reason that is not about width

    def _run_whole(self) -> None:
        self._module = moved(self._original, self._width.dtype)
        is_wide = any(param.dtype == torch.float64 for param in self._original.parameters())
        with Widened() if is_wide else contextlib.nullcontext():
            self.draws = draws(self._original, self._calls)
        # What is drawn would differ, and the statistics of a BatchNorm wait for the other data ranks.
        quiet = not any(isinstance(m, _BatchNorm) for m in self._module.modules()) and not self._draws_still()
        watch = Watch()
        self._modes: tuple[bool, ...] = (False,)
        self._whole = [self._run(copy.deepcopy(self._module), watch, False)]
        if not self._whole[0].outputs:
            raise UntriedError("no floating-point tensor is found in what it returns")
        self.seen: Seen = watch.seen
        places = self.seen.places()
        if quiet:
            training = self._run(copy.deepcopy(self._module), watch, True)
            if self.seen.places() != places or not self._whole[0].is_bitwise(training):  # it runs other code then
                self._modes, self._whole = (False, True), [self._whole[0], training]

    def attempt(self, name: str, cuts: dict[str, Cut], choice: int | None) -> Region | None:
        """The region, proved; or None where the guess is wrong on any rank.

        Args:
            choice: which reading of ambiguous sizes to take; None: the code spells none out.
        """
        rules = Rules(next(iter(cuts.values())).units, self._peers.rank)
        mode = contextlib.nullcontext() if choice is None else Narrow(rules, self.seen, choice)
        partial = self._agreed(lambda module: cut_layers(module, cuts, self._peers, {}), mode)
        if partial is None:
            return None
        return Region(name, cuts, rules if rules.is_needed else None, partial, self.draws)

    def confirm(
        self, apply: Callable[[nn.Module, Peers], Mapping[str, Part]], around: Any = None
    ) -> tuple[str, ...] | None:
        """The parameters whose gradients are to be summed when `apply` has cut the module; None where it computes
        something else.

        Args:
            around: a context for a run in training mode with its dropout on.
        """
        found = self._agreed(lambda module: apply(module, self._peers), contextlib.nullcontext())
        if found is not None and self.draws and not self._draws_alike(apply, around or contextlib.nullcontext()):
            return None
        return found

    def without_gradient(self) -> list[str]:
        """The parameters of which nothing was proved, since the calls gave them no gradient."""
        if is_dry():
            return []
        grads = {name: [whole.params[name] for whole in self._whole] for name in self._whole[0].params}
        return [name for name, each in grads.items() if all(grad is None or not grad.any() for grad in each)]

    def repeats(self) -> bool:
        """Whether a copy of which nothing is cut computes the same: if not, no guess about it says anything."""
        return self._agreed(lambda module: {}, contextlib.nullcontext()) is not None

    def _draws_alike(self, apply: Callable[[nn.Module, Peers], Mapping[str, Part]], around: Any) -> bool:
        """In training, with dropout: what is whole is still the same on all peers. A mask of their own would part them.

        Left out where a BatchNorm waits for other ranks.
        """
        if self._world.kind == "fake" or any(isinstance(m, _BatchNorm) for m in self._original.modules()):
            return True
        state = torch.get_rng_state()
        torch.manual_seed(0)
        alike = self._tried(lambda: self._outputs_alike(apply, around))
        torch.set_rng_state(state)
        return bool(alike)

    def _outputs_alike(self, apply: Callable[[nn.Module, Peers], Mapping[str, Part]], around: Any) -> bool | None:
        module = widened(self._original, self._width.dtype).train()
        peers = Trying(self._peers)
        peers.compares = True  # the outputs alone would not tell: most are sums or gathered
        apply(module, peers)
        with torch.no_grad(), self._at_width(), around:
            outputs = [module(*call.args, **call.kwargs) for call in self._wide_calls()]
        self._peers.meet()
        floats = [output for output in tensors_in(outputs) if output.is_floating_point()]
        alike = list(map(self._peers.have_same, floats))  # all asked
        return True if all(alike) and not peers.parted else None

    def _draws_still(self) -> bool:
        """Whether it draws with its dropout off."""
        with self._at_width(), Undropped():
            return draws(self._module, self._wide_calls())

    def _agreed(self, apply: Callable[[nn.Module], Mapping[str, Part]], mode: Any) -> tuple[str, ...] | None:
        def attempt() -> dict[str, bool] | None:
            found: dict[str, bool] = {}
            wrong = False
            for training, whole in zip(self._modes, self._whole, strict=True):
                module = copy.deepcopy(self._module)
                parts = apply(module)
                answer = self._run(module, mode, training)
                self._peers.meet()
                partial = self._partial(answer, whole, parts)
                # What a rank has a part of in one mode, it must not have all of in the other.
                wrong = wrong or partial is None or any(found.get(n, part) is not part for n, part in partial.items())
                found |= partial or {}
            return None if wrong else found

        found = self._tried(attempt)
        return None if found is None else tuple(name for name, is_partial in found.items() if is_partial)

    def _tried(self, attempt: Callable[[], T | None]) -> T | None:
        """What it gives on this rank; None where it fails, in any way, on any."""
        result: T | None = None
        mistake: Exception | None = None
        try:
            result = attempt()
        except GivenUpElsewhereError:
            pass
        except Exception as error:  # a guess may fail in any way inside the user's code: that is the answer
            self._peers.give_up()
            mistake = error if is_our_mistake(error) else None
        failed = self.on_any_rank(result is None)
        if mistake is not None:
            raise mistake  # after all were told, who would wait for this rank
        return None if failed else result

    def _partial(self, answer: Answer, whole: Answer, parts: Mapping[str, Part]) -> dict[str, bool] | None:
        """Of whose gradient each rank has a part, among the parameters that are whole; None where anything differs."""
        if self._world.kind == "fake":  # nothing was computed: shapes are all there is to compare
            return {} if [o.shape for o in answer.outputs] == [o.shape for o in whole.outputs] else None
        same = self._agree(answer.outputs, whole.outputs) and self._agree(answer.inputs, whole.inputs)
        partial: dict[str, bool] = {}
        for name, grad in answer.params.items():
            expected = whole.params[name]
            if (grad is None) != (expected is None):
                same = False
            elif grad is not None and expected is not None:
                if name in parts:
                    same = same and self._close(grad, cut(expected, parts[name]))
                elif self._peers.have_same(grad):
                    same = same and self._close(grad, expected)
                    partial[name] = False
                else:  # also where a gradient is nothing but rounding: the ranks must go on alike
                    partial[name] = True
                    same = self._close(self._peers.add(grad), expected) and same
        return partial if same else None

    def _agree(self, ours: list[Any], theirs: list[Any]) -> bool:
        return len(ours) == len(theirs) and all(map(self._close, ours, theirs))

    def _close(self, ours: Tensor | None, theirs: Tensor | None) -> bool:
        return is_close(ours, theirs, self._width)

    def _wide_calls(self) -> list[Call]:
        """Fresh copies of the calls; a tensor that is passed twice is one still."""
        calls = []
        for call in copy.deepcopy(self._calls):
            known: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the first, which is kept, so that it stays its own
            for tensor in tensors_in((call.args, call.kwargs)):
                known[id(tensor)] = (tensor, wide(tensor, self._width.dtype))
            exchanged = functools.partial(_exchanged, known)
            calls.append(Call(*tree_map_only(Tensor, exchanged, (call.args, call.kwargs))))
        return calls

    def _run(self, module: nn.Module, mode: Any, training: bool) -> Answer:
        """All calls in one graph: the gradient of a parameter is that of all of them, as in a training."""
        module.train(training)
        calls = self._wide_calls()
        with torch.enable_grad():
            with self._at_width(), Undropped(), mode:  # the mode within: it knows a call by its place in the code
                outputs = [module(*call.args, **call.kwargs) for call in calls]
            floats = [output for output in tensors_in(outputs) if output.is_floating_point()]
            loss = sum((o * weights(o)).sum() for o in floats if o.requires_grad)
        if isinstance(loss, Tensor):
            loss.backward()  # type: ignore[no-untyped-call]
        tensors = [tensor for call in calls for tensor in tensors_in((call.args, call.kwargs))]
        return Answer(
            [o.detach() for o in floats],
            {name: None if p.grad is None else p.grad.to_dense() for name, p in module.named_parameters()},
            [t.grad for t in tensors if t.is_floating_point()],
        )

    def _at_width(self) -> Any:
        return Widened() if self._width.dtype == torch.float64 else contextlib.nullcontext()

    def on_any_rank(self, wrong: bool) -> bool:
        """Whether it is so on any rank of the world; asked once per guess, wherever a group left it."""
        if self._world.kind != "real":
            return wrong
        flag = torch.tensor([float(wrong)], device=self._world.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._world.side_group)
        return bool(flag)


def is_our_mistake(error: Exception) -> bool:
    """Whether Python complains about a line of ours; where a guess is wrong, torch or the user's code complains."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    while codes and codes[-1].co_name == "__torch_function__":  # a mode of ours, which only passes the user's call on
        codes.pop()
    ours = bool(codes) and Path(codes[-1].co_filename).is_relative_to(_OWN_CODE)
    return ours and isinstance(error, (TypeError, AttributeError, NameError, LookupError, AssertionError))


def _exchanged(known: Mapping[int, tuple[Tensor, Tensor]], tensor: Tensor) -> Tensor:
    return known[id(tensor)][1]
