"""Which blocks run on slices of the sequence, and where their regions need the tokens whole: guessed, and proved.

A region's tokens are gathered at its column layers or, where its code looks at them before (`x.shape[1]`, a norm of
queries), at a module around those layers, the innermost that computes the same.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoal.errors import LayoutError
from shoal.parallel.blocks import find_blocks
from shoal.parallel.mode import without_trace
from shoal.parallel.parts import Part
from shoal.parallel.tensor.infer import Search
from shoal.parallel.tensor.peers import Peers
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.sequence import Draws, InStretch, OwnDropout, Stretch, Tokens, first_float, put_in
from shoal.parallel.tensor.trial import Call, Trial, UntriedError

MAX_GUESSES = 40  # about one kind of block
AT_LAYERS = None

Entries = tuple[str | None, ...]
Cutter = Callable[[nn.Module, Peers, list[Region], "Stretches"], tuple[Mapping[str, Part], list[Stretch]]]


@dataclass(frozen=True)
class Stretches:
    """Runs of blocks between whose ends the tokens are cut.

    Attributes:
        dim: of the tokens.
        runs: names of blocks, each fed with nothing but what the one before it gives.
        entries: of each region, by its place in the list: the module before which tokens are gathered; `AT_LAYERS`.
        partial: parameters of the blocks, of whose gradient each rank has the part of its tokens.
    """

    dim: int
    runs: tuple[tuple[str, ...], ...]
    entries: Mapping[int, str | None] = field(default_factory=dict)
    partial: tuple[str, ...] = ()

    def lay(self, model: nn.Module, peers: Peers, regions: Sequence[Region]) -> tuple[list[Stretch], dict[int, Peers]]:
        """Put the hooks in place; returns the stretches, and the peers of each region inside of one."""
        stretches: list[Stretch] = []
        peers_of: dict[int, Peers] = {}
        for run in self.runs:
            stretch = Stretch(peers, self.dim)
            stretches.append(stretch)
            model.get_submodule(run[0]).register_forward_pre_hook(stretch.begin, with_kwargs=True)
            for block in run[1:]:
                model.get_submodule(block).register_forward_pre_hook(stretch.go_on)
            model.get_submodule(run[-1]).register_forward_hook(stretch.end)
            model.register_forward_hook(stretch.check_end)
            for block in run:
                for module in model.get_submodule(block).modules():
                    if type(module) is nn.Dropout:
                        put_in(module, stretch, OwnDropout)
                put_in(model.get_submodule(block), stretch, InStretch)
                for place, region in enumerate(regions):
                    if is_in(region, block):
                        entry = self.entries[place]
                        peers_of[place] = Tokens(stretch, gathers=entry is AT_LAYERS)
                        if entry is not None:
                            model.get_submodule(entry).register_forward_pre_hook(stretch.enter, with_kwargs=True)
        return stretches, peers_of


def is_in(region: Region, block: str) -> bool:
    """Whether all of it is inside of the block."""
    layers = [_join(region.name, layer) for layer in region.cuts]
    return not block or all(layer == block or layer.startswith(f"{block}.") for layer in layers)


def find_stretches(
    model: nn.Module, call: Call, regions: list[Region], whole: Trial, search: Search, cut: Cutter
) -> Stretches:
    """All blocks that hold a region, in stretches as long as can be; collective.

    Args:
        whole: the trial of the whole model.
        cut: does what a guess says to a copy.

    Raises:
        LayoutError: a block of them cannot be run on slices, or none holds a region.
    """
    blocks = [block for block in find_blocks(model) if any(is_in(region, block) for region in regions)]
    if not blocks:
        raise LayoutError(
            "sequence=true cuts activations of repeated blocks between their splits, and this model has no block of "
            "which a layer is split. Give it a method blocks() that returns names of modules, or drop sequence."
        )
    known: dict[Any, tuple[int, Entries]] = {}
    dims: list[int] = []
    entries: dict[int, str | None] = {}
    for block in blocks:
        inside = [place for place, region in enumerate(regions) if is_in(region, block)]
        layers = tuple(_below(_join(regions[p].name, layer), block) for p in inside for layer in regions[p].cuts)
        kind = (search.kind_of(block), layers)
        if kind not in known:
            known[kind] = _prove_block(block, [regions[place] for place in inside], search, cut)
        dim, chosen = known[kind]
        dims.append(dim)
        entries |= {p: None if at is None else _join(block, at) for p, at in zip(inside, chosen, strict=True)}
    each = tuple((block,) for block in blocks)
    # Stages of a pipeline pass on whole tokens: there each block is a stretch of its own.
    ways = (each,) if search.world.layout.pp > 1 else (_linked(model, call, blocks), each)
    for runs in dict.fromkeys(ways) if len(set(dims)) == 1 else ():
        guess = Stretches(dims[0], runs, entries)
        partial = _confirm(whole, regions, guess, cut)
        if partial is not None:
            return replace(guess, partial=partial)
    raise LayoutError(
        "sequence=true: each block computes the same on slices of the sequence, and the whole model does not: "
        "something outside of the blocks uses what is inside of them. Drop sequence."
    )


def _prove_block(block: str, regions: list[Region], search: Search, cut: Cutter) -> tuple[int, Entries]:
    """The dim of the tokens, and where each region gathers them."""
    try:
        trial = search.trial(block)
    except UntriedError as error:
        raise LayoutError(f"sequence=true: {block} cannot be tried by itself ({error}). Drop sequence.") from error
    shapes = [first.shape for call in search.seen.calls[block] for first in first_float((call.args, call.kwargs))]
    dim, size = _dim_of_tokens(shapes, search.seen.num_samples), search.peers.size
    if any(len(shape) != 3 or shape[dim] < size for shape in shapes):
        raise LayoutError(
            f"sequence=true: {block} is called with a tensor of shape {tuple(shapes[0])}, and it takes (batch, tokens, "
            f"width) or (tokens, batch, width), with at least {size} tokens in the first samples of the data, one for "
            f"each rank of tp{size}. Drop sequence."
        )
    inside = [region.like(_below(region.name, block)) for region in regions]
    for chosen in itertools.islice(itertools.product(*map(_entries, inside)), MAX_GUESSES):
        partial = _confirm(trial, inside, Stretches(dim, (("",),), dict(enumerate(chosen))), cut)
        if partial is not None:
            _check_gradients(block, trial, inside)
            return dim, chosen
    raise LayoutError(
        f"sequence=true: {block} does not compute on slices of the sequence what it computes on all of it: outside of "
        "its split layers it looks at several tokens at once (an attention that is left whole, a mask), or draws "
        "random numbers other than by nn.Dropout (F.dropout, stochastic depth). Drop sequence."
    )


def _dim_of_tokens(shapes: list[torch.Size], num_samples: int) -> int:
    """The second, or the first where that is not the batch."""
    return 0 if all(shape[0] != num_samples == shape[1] for shape in shapes if len(shape) == 3) else 1


def _check_gradients(block: str, trial: Trial, regions: list[Region]) -> None:
    cut = {_join(_join(r.name, layer), path) for r in regions for layer, cut in r.cuts.items() for path in cut.keeps}
    for name in trial.without_gradient():
        if name not in cut:
            raise LayoutError(
                f"sequence=true: {_join(block, name)} has no gradient for the first samples of the data, so nothing "
                "shows whether what the tokens of other ranks give must be added. Leave it out, or drop sequence."
            )


def _entries(region: Region) -> list[str | None]:
    """The modules before which its tokens may be gathered, from the innermost outwards."""
    columns = [_join(region.name, layer) for layer, cut in region.cuts.items() if cut.style == "colwise"]
    if not columns:  # torch's attention, which takes other tensors besides
        return [region.name] if region.name else []
    around = columns[0].split(".")
    while not all(f"{column}.".startswith(f"{'.'.join(around)}.") for column in columns):
        around = around[:-1]
    paths = [".".join(around[:depth]) for depth in range(len(around), 0, -1)]
    return [AT_LAYERS, *(path for path in paths if path not in columns)]


def _confirm(trial: Trial, regions: list[Region], guess: Stretches, cut: Cutter) -> tuple[str, ...] | None:
    """The parameters whose gradients are to be summed; None where it computes something else."""
    laid: list[Stretch] = []

    def apply(module: nn.Module, peers: Peers) -> Mapping[str, Part]:
        parts, laid[:] = cut(module, peers, regions, guess)
        return parts

    draws = Draws(lambda: any(stretch.is_open and not stretch.is_inside for stretch in laid))
    found = trial.confirm(apply, draws)
    return None if found is None or trial.on_any_rank(draws.found) else found


def _linked(model: nn.Module, call: Call, blocks: list[str]) -> tuple[tuple[str, ...], ...]:
    """Runs of blocks, each called once, with what the one before it has returned."""
    fed: list[tuple[str, int]] = []
    gave: dict[int, str] = {}
    kept: list[Any] = []  # so that no other tensor takes the id of one

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        fed.extend((name, id(first)) for first in first_float((args, kwargs)))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        kept.append(output)
        gave.update((id(first), name) for first in first_float(output))

    handles = []
    for name in blocks:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(functools.partial(before, name), with_kwargs=True))
        handles.append(module.register_forward_hook(functools.partial(after, name)))
    with without_trace(model), torch.no_grad():
        model(*call.args, **call.kwargs)
    for handle in handles:
        handle.remove()
    num_calls = Counter(name for name, _ in fed)
    runs: list[list[str]] = []
    for name, given in fed:
        once = num_calls[name] == 1
        if once and runs and gave.get(given) == runs[-1][-1] and num_calls[runs[-1][-1]] == 1:
            runs[-1].append(name)
        elif [name] not in runs:
            runs.append([name])
    return tuple(map(tuple, runs))


def _join(outer: str, inner: str) -> str:
    return f"{outer}.{inner}".strip(".")


def _below(name: str, outer: str) -> str:
    return name[len(outer) + 1 :] if outer else name
