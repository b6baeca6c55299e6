"""A region: the smallest module around layers that are cut together, and the proof that it computes the same.

Each guess about a region (which layers, in which units, where its code spells sizes out) is tried on the live ranks
before a training begins: a copy of the module runs whole, a second one cut, in float64, on what the model gave the
module for one sample, with weights moved away from special values. Outputs, gradients of every parameter and
gradients of the inputs must agree, or the guess is dropped.
"""

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.parallel.parts import Part, cut
from shoal.parallel.tensor.heads import Narrow, Rules, Seen, Watch
from shoal.parallel.tensor.peers import Peers
from shoal.parallel.tensor.styles import Cut, convert
from shoal.precision import Widened
from shoal.world import World

_TOLERANCE = 1e-9  # of float64; a wrong cut is wrong by a part of the whole


@dataclass
class Region:
    """Layers of one module that are cut together.

    Attributes:
        name: of the module.
        cuts: by the name of the layer relative to it.
        rules: for sizes that its code spells out.
        partial: parameters inside, whole on every rank, of whose gradient each rank computes a part.
        draws: it draws random numbers in training (dropout), of which each rank needs its own.
    """

    name: str
    cuts: dict[str, Cut]
    rules: Rules | None = None
    partial: tuple[str, ...] = ()
    draws: bool = False

    def like(self, name: str) -> "Region":
        """The same of another module of the same structure."""
        return Region(name, self.cuts, self.rules, self.partial, self.draws)


@dataclass(frozen=True)
class Call:
    """What a module was called with, in the one look at a sample."""

    args: Any
    kwargs: Any


@dataclass
class Answer:
    """What a copy computed: outputs, gradients by parameter and of the inputs."""

    outputs: list[Tensor] = field(default_factory=list)
    params: dict[str, Tensor | None] = field(default_factory=dict)
    inputs: list[Tensor | None] = field(default_factory=list)


Slices = dict[int, tuple[nn.Parameter, nn.Parameter]]  # by the id of the whole one, which is kept, so that it stays its


def cut_layers(module: nn.Module, cuts: Mapping[str, Cut], peers: Peers, done: Slices) -> dict[str, Part]:
    """Replace the tensors of the named layers by this rank's slices; returns what it holds, by name below `module`.

    Args:
        done: the slices made so far, so that shared parameters stay shared.
    """
    parts: dict[str, Part] = {}
    for name, layer_cut in cuts.items():
        layer = module.get_submodule(name)
        for path, (dim, units) in layer_cut.keeps.items():
            below, _, key = path.rpartition(".")
            owner = layer.get_submodule(below)
            tensor = getattr(owner, key)
            part = Part.whole(tensor.shape).take(dim, units.spans(peers.rank), "tp")
            parts[f"{name}.{path}" if name else path] = part
            if isinstance(tensor, nn.Parameter):
                if id(tensor) not in done:
                    slice_ = nn.Parameter(cut(tensor.detach(), part), requires_grad=tensor.requires_grad)
                    slice_.__dict__.update(tensor.__dict__)  # what a job wrote on it
                    done[id(tensor)] = (tensor, slice_)
                setattr(owner, key, done[id(tensor)][1])
            else:
                owner._buffers[key] = cut(tensor, part)
        convert(layer, layer_cut, peers)
    return parts


@contextlib.contextmanager
def narrowing(rules: Rules | None) -> Iterator[None]:
    """Around a forward of a region whose code spells sizes out."""
    with Narrow(rules) if rules is not None and rules.is_needed else contextlib.nullcontext():
        yield


class Trial:
    """Tries guesses about one module on the live ranks; every method is called on all of them."""

    def __init__(self, module: nn.Module, call: Call, peers: Peers, world: World, *, training: bool = False) -> None:
        self._peers, self._world, self._call = _Trying(peers), world, call
        self._original, self._module = module, _moved(module)
        self.draws = _draws(module, call)
        # A drawn mask would differ, and the statistics of a BatchNorm wait for the other data ranks.
        quiet = not _draws(self._module, self._wide_call()) and not any(isinstance(m, _BatchNorm) for m in module.modules())
        self._modes = (False, True) if training and quiet else (False,)
        watch = Watch()
        self._whole = [self._run(copy.deepcopy(self._module), watch, mode) for mode in self._modes]
        self.seen: Seen = watch.seen

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

    def confirm(self, apply: Callable[[nn.Module, Peers], Mapping[str, Part]], partial: Iterable[str]) -> bool:
        """Whether the module is the same when `apply` has cut it; `partial`: the gradients that will be summed."""
        found = self._agreed(lambda module: apply(module, self._peers), contextlib.nullcontext())
        if found is None or not set(found) <= set(partial):
            return False
        return not self.draws or self._draws_alike(apply)

    def _draws_alike(self, apply: Callable[[nn.Module, Peers], Mapping[str, Part]]) -> bool:
        """In training, with dropout: what is whole is still the same on all peers. A mask of their own would part them.

        Left out where a BatchNorm waits for other ranks.
        """
        if self._world.kind == "fake" or any(isinstance(m, _BatchNorm) for m in self._original.modules()):
            return True
        module = copy.deepcopy(self._original).double().train()
        apply(module, self._peers)
        call = self._wide_call()
        state = torch.get_rng_state()
        torch.manual_seed(0)
        with torch.no_grad(), Widened():
            outputs = module(*call.args, **call.kwargs)
        torch.set_rng_state(state)
        floats = [o for o in tree_leaves(outputs) if isinstance(o, Tensor) and o.is_floating_point()]
        alike = [self._peers.have_same(output) for output in floats]  # all asked
        return not self._any(not all(alike))

    def _agreed(self, apply: Callable[[nn.Module], Mapping[str, Part]], mode: Any) -> tuple[str, ...] | None:
        partial: tuple[str, ...] | None = ()
        try:
            for training, whole in zip(self._modes, self._whole, strict=True):
                module = copy.deepcopy(self._module)
                parts = apply(module)
                answer = self._run(module, mode, training)
                self._peers.meet()
                found = self._partial(answer, whole, parts)
                partial = None if found is None or partial is None else (*partial, *found)
        except _GivenUpElsewhereError:
            partial = None
        except Exception:  # a guess may fail in any way inside the user's code: that is the answer
            self._peers.give_up()
            partial = None
        return None if self._any(partial is None) else partial

    def _partial(self, answer: Answer, whole: Answer, parts: Mapping[str, Part]) -> tuple[str, ...] | None:
        """The parameters of whose gradient each rank has a part; None where anything differs from the whole."""
        if not whole.outputs:
            return None  # an output in which nothing is found proves nothing
        same = _agree(answer.outputs, whole.outputs) and _agree(answer.inputs, whole.inputs)
        if self._world.kind == "fake":  # nothing was computed: shapes are all there is to compare
            return () if [o.shape for o in answer.outputs] == [o.shape for o in whole.outputs] else None
        partial = []
        for name, grad in answer.params.items():
            expected = whole.params[name]
            if (grad is None) != (expected is None):
                same = False
            elif grad is not None and expected is not None:
                if name in parts:
                    same = same and _close(grad, cut(expected, parts[name]))
                elif self._peers.have_same(grad):
                    same = same and _close(grad, expected)
                else:  # also where a gradient is nothing but rounding: the ranks must go on alike
                    partial.append(name)
                    same = _close(self._peers.add(grad), expected) and same
        return tuple(partial) if same else None

    def _wide_call(self) -> Call:
        return Call(*tree_map_only(Tensor, _wide, copy.deepcopy((self._call.args, self._call.kwargs))))

    def _run(self, module: nn.Module, mode: Any, training: bool) -> Answer:
        module.train(training)
        call = self._wide_call()
        args, kwargs = call.args, call.kwargs
        with torch.enable_grad():
            with Widened(), mode:
                outputs = module(*args, **kwargs)
            floats = [o for o in tree_leaves(outputs) if isinstance(o, Tensor) and o.is_floating_point()]
            loss = sum((o * _weights(o)).sum() for o in floats if o.requires_grad)
        if isinstance(loss, Tensor):
            loss.backward()  # type: ignore[no-untyped-call]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        return Answer(
            [o.detach() for o in floats],
            {name: param.grad for name, param in module.named_parameters()},
            [t.grad for t in given],
        )

    def _any(self, wrong: bool) -> bool:
        """Whether it is so on any rank of the world; asked once per guess, wherever a group left it."""
        if self._world.kind != "real":
            return wrong
        flag = torch.tensor([float(wrong)], device=self._world.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._world.side_group)
        return bool(flag)


class _GivenUpElsewhereError(Exception):
    """Another rank has given this guess up."""


class _Trying(Peers):
    """Peers that ask each other before every sum whether all are still there, and whether it is the same sum."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers.group, peers.rank, peers.size)

    def add(self, tensor: Tensor) -> Tensor:
        self._same(tensor)
        return super().add(tensor)

    def join(self, tensor: Tensor, sizes: Any) -> Tensor:
        self._same(tensor[..., :0])
        return super().join(tensor, sizes)

    def _same(self, tensor: Tensor) -> None:
        self.meet(float(zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode())))

    def meet(self, what: float = 0.0) -> None:
        """All here, about to do the same; or `_GivenUpElsewhereError` on every rank."""
        told = self._tell(what)
        if min(told) < 0 or len(set(told)) > 1:
            raise _GivenUpElsewhereError

    def give_up(self) -> None:
        """Tell those who wait in `meet`."""
        self._tell(-1.0)

    def have_same(self, tensor: Tensor) -> bool:
        """Whether all hold it bit for bit."""
        most = torch.stack([tensor, -tensor])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return torch.equal(most[0], -most[1])

    def _tell(self, what: float) -> list[float]:
        backend = dist.get_backend(self.group)
        if backend == "fake":
            return [what]
        own = torch.tensor([what], dtype=torch.float64, device="cuda" if backend == "nccl" else "cpu")
        told = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(told, own, group=self.group)
        return [float(flag) for flag in told]


def _moved(module: nn.Module) -> nn.Module:
    """A copy in float64, evaluating, no parameter zero or one: what starts at zero would hide a mistake."""
    moved = copy.deepcopy(module).double().eval()
    for part in moved.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in moved.parameters():
            if param.is_floating_point():
                noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.add_((0.02 * noise).to(param.device))
                param.requires_grad_(True)
            param.grad = None
    return moved


def _wide(tensor: Tensor) -> Tensor:
    wide = tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
    return wide.requires_grad_(tensor.requires_grad)


def _weights(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(output.numel())
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


def _agree(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if ours.shape != theirs.shape:
        return False
    # Masks fill with -inf or the lowest number; both are equal or they are not.
    finite = theirs.abs() < 1e30
    if not torch.equal(finite, ours.abs() < 1e30):
        return False
    error = torch.linalg.vector_norm((ours - theirs)[finite])
    return bool(error <= _TOLERANCE * torch.linalg.vector_norm(theirs[finite]) + 1e-12)


def _draws(module: nn.Module, call: Call) -> bool:
    """Whether a training forward moves the random stream."""
    probe = copy.deepcopy(module).train()
    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    state = (torch.cuda if device.type == "cuda" else torch).get_rng_state()
    widened = Widened() if any(p.dtype == torch.float64 for p in probe.parameters()) else contextlib.nullcontext()
    with torch.no_grad(), widened:
        args, kwargs = copy.deepcopy((call.args, call.kwargs))
        probe(*args, **kwargs)
    moved = not torch.equal(state, (torch.cuda if device.type == "cuda" else torch).get_rng_state())
    (torch.cuda if device.type == "cuda" else torch).set_rng_state(state)
    return moved
