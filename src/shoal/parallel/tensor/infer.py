"""From a model and one sample to the regions that are split: guesses, in order, each proved by `Trial`."""

import contextlib
import copy
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from shoal.parallel.mode import without_trace
from shoal.parallel.tensor.heads import Seen
from shoal.parallel.tensor.peers import Peers
from shoal.parallel.tensor.plan import Style
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.styles import Cut, cut_experts, features, fits, is_linear, make_cut
from shoal.parallel.tensor.trial import Call, Trial, UntriedError
from shoal.parallel.tensor.units import Units
from shoal.world import World

Guess = tuple[dict[str, Units], int | None]

MAX_LAYERS = 8  # that one module may hold beyond those of its parts; more are several modules in one
MAX_CHAIN = 6  # q, k, v, a gate, something more, the output
MAX_GUESSES = 40  # about one structure
MAX_CALLS = 8  # of one module, each unlike the others; the whole model is proved with all of them


@dataclass
class Look:
    """What one forward of the whole model showed.

    Attributes:
        calls: of every module, its calls; of those that are alike, the first.
        kinds: what makes them differ, in the same order.
        uncopied: modules with calls that cannot be copied, and why.
        order: of the layers that can be cut, as they ran, each once.
        rows: how many vectors each matrix gave, for the share of the work.
        output_bytes: of every module, in all its calls.
        num_samples: of the batch that it was.
        heads: the layers whose output is the model's, untouched.
    """

    calls: dict[str, list[Call]] = field(default_factory=dict)
    kinds: dict[str, list[Hashable]] = field(default_factory=dict)
    uncopied: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    output_bytes: dict[str, int] = field(default_factory=dict)
    num_samples: int = 1
    heads: list[str] = field(default_factory=list)


def look(model: nn.Module, args: Any, kwargs: Any) -> Look:
    """Run one sample through the whole model, twice, and note who was called with what."""
    seen = Look()
    asks: dict[str, list[list[bool]]] = defaultdict(list)  # call by call: which tensors ask for a gradient
    num_noted: dict[str, int] = defaultdict(int)
    made: dict[int, str] = {}
    kept: list[Tensor] = []

    def note_gradients(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        asks[name].append([t.requires_grad for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        asked = dict(enumerate(asks[name])).get(num_noted[name], [])
        num_noted[name] += 1
        kind = _kind_of_call(args, kwargs, asked)
        calls, kinds = seen.calls.setdefault(name, []), seen.kinds.setdefault(name, [])
        if kind not in kinds and len(kinds) < MAX_CALLS:
            try:
                calls.append(_copied(args, kwargs, asked))
                kinds.append(kind)
            except (TypeError, RuntimeError) as error:  # what cannot be copied is not tried by itself
                seen.uncopied[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        if _can_be_cut(module) and name not in seen.order:
            seen.order.append(name)

    def count(name: str, module: nn.Module, args: Any, out: Any) -> None:
        first = next((t for t in tree_leaves(out) if isinstance(t, Tensor)), None)
        seen.output_bytes[name] = seen.output_bytes.get(name, 0) + (0 if first is None else first.nbytes)
        if is_linear(module):
            made[id(out)] = name
            kept.append(out)  # so that no other tensor takes its id
            seen.rows[name] = seen.rows.get(name, 0) + out.numel() // max(features(module)[1], 1)

    with _watched(model, note_gradients), torch.enable_grad():
        model(*args, **kwargs)
    counters = [m.register_forward_hook(functools.partial(count, name)) for name, m in model.named_modules()]
    with _watched(model, note), torch.no_grad():
        out = model(*args, **kwargs)
    seen.heads = [made[id(t)] for t in tree_leaves(out) if id(t) in made]
    for counter in counters:
        counter.remove()
    seen.num_samples = next((len(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()), 1)
    return seen


def _can_be_cut(module: nn.Module) -> bool:
    return is_linear(module) or fits(module, "vocabulary") or fits(module, "channels")


@contextlib.contextmanager
def _watched(model: nn.Module, note: Callable[..., None]) -> Iterator[None]:
    """The model evaluates, each module tells `note` of its calls, and all is as before at the end."""
    handles = [
        module.register_forward_pre_hook(functools.partial(note, name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        with without_trace(model):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _copied(args: Any, kwargs: Any, asks: list[bool]) -> Call:
    """A call as it is now: a cache that the model fills must not be filled by the trials."""
    call = copy.deepcopy((args, kwargs))
    tensors = [t for t in tree_leaves(call) if isinstance(t, Tensor)]
    for tensor, asked in zip(tensors, asks, strict=False):
        tensor.requires_grad_(asked)
    return Call(*call)


def _kind_of_call(args: Any, kwargs: Any, asked: Sequence[bool]) -> Hashable:
    """What makes a module take another path: the structure, which tensors are one, shapes but for the batch, values."""
    leaves, spec = tree_flatten((args, kwargs))
    first: dict[int, int] = {}
    kinds: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kinds.append((leaf.dtype, leaf.dim(), tuple(leaf.shape[1:]), first.setdefault(id(leaf), len(first))))
        else:
            kinds.append(repr(leaf) if leaf is None or _decides(leaf) else type(leaf).__qualname__)
    return str(spec), tuple(kinds), tuple(asked)


class Search:
    """Finds the regions of a model; collective. A structure that was proved once is tried first where it recurs."""

    def __init__(self, model: nn.Module, seen: Look, peers: Peers, world: World) -> None:
        self._model, self.seen, self.peers, self.world = model, seen, peers, world
        self._modules = dict(model.named_modules())
        self._proved: dict[Any, Region | None] = {}
        self._guessed: dict[Any, list[Guess]] = {}
        self._last: Guess = ({}, None)
        self.regions: list[Region] = []
        self.untried: dict[str, str] = {}  # modules that could not be run alone, and what they said
        self.few: dict[str, int] = {}  # heads of modules that have fewer of them than there are ranks

    def infer(self) -> None:
        """Chains of layers from the innermost module outwards, then tables and heads."""
        taken: set[str] = set()
        for name in self._inside_out():
            free = [layer for layer in self._layers(name) if layer not in taken]
            free = [layer for layer in free if is_linear(self._modules[layer])]
            if 2 <= len(free) <= MAX_LAYERS:
                for chain in self._chains(name, free):
                    taken |= {f"{name}.{layer}" if name else layer for layer in chain.cuts}
                    self.regions.append(chain)
        for name in self.seen.calls:
            if fits(self._modules[name], "heads") and (region := self.prove(name, {"": Style("heads")})) is not None:
                self.regions.append(region)
        for name in self.seen.order:
            if name not in taken and not fits(self._modules[name], "channels") and self._is_big(name):
                style = "vocabulary" if isinstance(self._modules[name], nn.Embedding) else "colwise_gather"
                region = self.prove(name, {"": Style(style)})
                if region is not None:
                    self.regions.append(region)

    def _inside_out(self) -> list[str]:
        return sorted(self.seen.calls, key=lambda name: -len(name.split(".")) if name else 1)

    def _layers(self, name: str) -> list[str]:
        return [layer for layer in self.seen.order if not name or layer.startswith(f"{name}.")]

    def _chains(self, name: str, free: list[str]) -> Iterator[Region]:
        """Runs of layers in the order of execution: all cut by columns but the last, which is cut by rows."""
        start = 0
        while start < len(free) - 1:
            for stop in range(start + 1, min(start + MAX_CHAIN, len(free))):
                chain = free[start : stop + 1]
                if len({_below(name, layer).partition(".")[0] for layer in chain}) == 1 < _depth(chain[0], name):
                    continue  # all within one part, where it was tried
                styles = dict.fromkeys(chain, "colwise") | {chain[-1]: "rowwise"} | self._norms_in(chain)
                region = self.prove(name, {_below(name, layer): Style(style) for layer, style in styles.items()})
                if region is not None:
                    yield region
                    start = stop
                    break
            start += 1

    def _norms_in(self, chain: Sequence[str]) -> dict[str, str]:
        """Norms by channel that ran inside a chain of convolutions: each normalises the channels that are there."""
        first, last = self.seen.order.index(chain[0]), self.seen.order.index(chain[-1])
        inside = self.seen.order[first:last]
        return dict.fromkeys((name for name in inside if fits(self._modules[name], "channels")), "channels")

    def _is_big(self, name: str) -> bool:
        """Worth a collective: a tenth of the parameters (a table, the head)."""
        numel = sum(param.numel() for param in self._modules[name].parameters())
        return bool(10 * numel >= sum(param.numel() for param in self._model.parameters()))

    def prove(self, name: str, styles: Mapping[str, Style]) -> Region | None:
        """The region of these layers, named relative to the module; None where no guess about it was right."""
        module = self._modules[name]
        layers = {layer: module.get_submodule(layer) for layer in styles}
        if not all(style.name == "experts" or fits(layers[layer], style.name) for layer, style in styles.items()):
            return None
        exact = (self.kind_of(name), tuple(styles.items()))
        alike = (_structure(module, exactly=False), tuple(styles.items()))
        if exact in self._proved:
            found = self._proved[exact]
            return None if found is None else found.like(name)
        # What failed for one module is not tried again for its likes; what was right for one is tried first.
        found = self._first_right(name, module, styles, self._guessed.get(alike))
        self._proved[exact] = found
        self._guessed.setdefault(alike, [] if found is None else [self._last])
        return found

    def _first_right(
        self, name: str, module: nn.Module, styles: Mapping[str, Style], guesses: list[Guess] | None
    ) -> Region | None:
        layers = {layer: module.get_submodule(layer) for layer in styles}
        if guesses == []:
            return None
        try:
            trial = self.trial(name)
        except UntriedError as error:
            self.untried[name] = str(error)
            return None
        heads = trial.seen.head_counts([_width(layers[layer], style) for layer, style in styles.items()])
        if heads and heads[0] < self.peers.size:
            self.few[name] = heads[0]
        every = itertools.product(self._guesses(layers, styles, trial.seen), (None, 0, 1))
        for units, choice in guesses or itertools.islice(every, MAX_GUESSES):
            cuts = {layer: _cut(layers[layer], styles[layer], units[layer]) for layer in styles}
            region = trial.attempt(name, cuts, choice)
            if region is not None:
                self._last = (units, choice)
                return region
        return None

    def trial(self, name: str) -> Trial:
        """Of one module.

        Raises:
            UntriedError: it cannot be run alone.
        """
        calls = self.seen.calls.get(name)
        if name in self.seen.uncopied or not calls:
            raise UntriedError(self.seen.uncopied.get(name, "the sample does not run it"))
        return Trial(self._modules[name], calls, self.peers, self.world)

    def kind_of(self, name: str) -> Hashable:
        """Equal for modules that are alike and are called alike."""
        return _structure(self._modules[name], exactly=True), tuple(self.seen.kinds.get(name, ()))

    def _guesses(
        self, layers: Mapping[str, nn.Module], styles: Mapping[str, Style], seen: Seen
    ) -> Iterator[dict[str, Units]]:
        """Units that all layers can share, and ways in which each is fused."""
        size = self.peers.size
        widths = {layer: _width(layers[layer], style) for layer, style in styles.items()}
        ways = {
            layer: [(width // 2,) * 2] if styles[layer].is_packed else seen.fused(width)
            for layer, width in widths.items()
        }
        inner = [w for way in ways.values() for parts in way for w in parts]
        heads = [layer.num_heads for layer in layers.values() if isinstance(layer, nn.MultiheadAttention)]
        counts = [*heads, *seen.head_counts([*widths.values(), *inner]), gcd(*inner), gcd(*widths.values())]
        for count in dict.fromkeys(counts):
            for fused in itertools.product(*ways.values()):
                if count >= size and not any(width % count for way in fused for width in way):
                    yield {layer: Units(count, parts, size) for layer, parts in zip(ways, fused, strict=True)}


def _depth(layer: str, name: str) -> int:
    return len(_below(name, layer).split("."))


def _below(name: str, layer: str) -> str:
    return layer[len(name) + 1 :] if name else layer


def _cut(layer: nn.Module, style: Style, units: Units) -> Cut:
    if style.name == "experts":
        return cut_experts(layer, units, {n: (s.name == "rowwise", s.is_packed) for n, s in style.tensors})
    return make_cut(layer, style.name, units)


def _width(layer: nn.Module, style: Style) -> int:
    """The features that are cut."""
    if style.name == "experts":
        return layer.get_parameter(next(n for n, s in style.tensors if s.name == "rowwise")).shape[-1]
    ins, outs = features(layer)
    return ins if style.name.startswith("rowwise") or style.name == "vocabulary" else outs


def _structure(module: nn.Module, *, exactly: bool) -> Hashable:
    """What two modules have in common that compute alike: classes, shapes, plain attributes; exactly, numbers too."""
    plain = tuple(
        (name, type(part).__qualname__, tuple(sorted(_plain(part, numbers=exactly).items())))
        for name, part in module.named_modules()
    )
    return plain, tuple((name, tuple(t.shape), t.dtype) for name, t in module.state_dict().items())


def _plain(part: nn.Module, *, numbers: bool) -> dict[str, Any]:
    """Attributes that may make a module compute otherwise: words, functions, each its own, and numbers."""
    known = {n: v for n, v in vars(part).items() if not n.startswith("_") and _decides(v)}
    known = {n: v for n, v in known.items() if numbers or type(v) not in (int, float)}
    return {n: repr(v) if type(v) in (int, float, bool, str) else str(id(v)) for n, v in known.items()}


def _decides(value: Any) -> bool:
    return type(value) in (int, float, bool, str) or (callable(value) and not isinstance(value, nn.Module))


def share_of(model: nn.Module, seen: Look, layers: Sequence[str]) -> tuple[float, float]:
    """The share of the matrix products' FLOPs, and of the parameters, that these layers have."""
    modules = dict(model.named_modules())
    flops = {name: rows * modules[name].weight.numel() for name, rows in seen.rows.items()}
    numel = sum(p.numel() for p in model.parameters())
    ours = {id(p): p.numel() for name in layers for p in modules[name].parameters(recurse=False) if p.dim() > 1}
    return sum(flops.get(name, 0) for name in layers) / max(sum(flops.values()), 1), sum(ours.values()) / max(numel, 1)
