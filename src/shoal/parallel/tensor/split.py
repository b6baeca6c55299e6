"""The tensor split of a model: found or given, proved, applied; and what it leaves to do after a backward."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal.errors import LayoutError
from shoal.parallel.parts import Part, local_of
from shoal.parallel.swap import become
from shoal.parallel.tensor.infer import Look, Search, look, share_of
from shoal.parallel.tensor.peers import Peers
from shoal.parallel.tensor.plan import Style, given_plan, resolve
from shoal.parallel.tensor.region import Region, Slices, cut_layers, narrowing
from shoal.parallel.tensor.sequence import Stretch
from shoal.parallel.tensor.stream import OwnStream
from shoal.parallel.tensor.stretches import Stretches, find_stretches
from shoal.parallel.tensor.styles import Cut
from shoal.parallel.tensor.trial import Call, Trial, UntriedError
from shoal.parallel.tensor.vocabulary import SlicedLogits
from shoal.world import World

# These take whole inputs and give whole outputs.
ALONE = ("colwise_gather", "rowwise_scatter", "vocabulary", "heads", "experts")
Sample = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Split:
    """What was split.

    Attributes:
        parts: by name in `model.state_dict()`, what this rank holds of what was cut.
        flops_share, params_share: of the matrix products' work, and of the parameters, 0 to 1.
        bytes_per_sample: what each rank sends for one sample, forward and backward.
        stretches: of blocks that run on slices of the sequence.
    """

    model: nn.Module
    peers: Peers
    regions: list[Region]
    parts: dict[str, Part] = field(default_factory=dict)
    flops_share: float = 0.0
    params_share: float = 0.0
    bytes_per_sample: int = 0
    stretches: Stretches | None = None
    _shown: dict[int, SlicedLogits] = field(default_factory=dict)
    _partial: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """After the last backward: of parameters inside a region each rank has a part of the gradient."""
        grads = [local_of(p.grad) for p in map(self.model.get_parameter, self._partial) if p.grad is not None]
        if grads:
            flat = self.peers.add(torch.cat([grad.flatten() for grad in grads]))
            for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))

    def glued(self) -> list[list[str]]:
        """Layers that no cut of a pipeline may part: of a region, and of a block with slices between its splits."""
        regions = [[f"{region.name}.{layer}".strip(".") for layer in region.cuts] for region in self.regions]
        blocks = [block for run in self.stretches.runs for block in run] if self.stretches is not None else []
        inside = [[name for name, _ in self.model.get_submodule(block).named_modules(prefix=block)] for block in blocks]
        return regions + inside

    def hide_outputs(self) -> None:
        """What stayed cut passes as plain slices through the hooks that come now (DDP, fully_shard)."""
        self.model.register_forward_hook(self._to_slices)

    def show_outputs(self) -> None:
        """After those hooks: it looks whole again, to whoever calls the model."""
        self.model.register_forward_hook(self._to_whole)

    def _to_slices(self, module: nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        self._shown = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, SlicedLogits)}
        cut = {place: leaf.local for place, leaf in self._shown.items() if leaf.held is None}
        return tree_unflatten([cut.get(place, leaf) for place, leaf in enumerate(leaves)], spec) if cut else output

    def _to_whole(self, module: nn.Module, args: Any, output: Any) -> Any:
        shown, self._shown = self._shown, {}
        if not shown:
            return output
        leaves, spec = tree_flatten(output)
        for place, leaf in shown.items():
            again = SlicedLogits.of(leaves[place], leaf.peers, leaf.sizes)
            # Who asks for no gradient looks at them: a sample, a metric.
            leaves[place] = leaf.held if leaf.held is not None else again if torch.is_grad_enabled() else again.whole()
        return tree_unflatten(leaves, spec)

    def __str__(self) -> str:
        blocks = [block for run in self.stretches.runs for block in run] if self.stretches is not None else []
        sliced = f". Between the splits of {len(blocks)} blocks each holds its share of the tokens" if blocks else ""
        return (
            f"tensor  {len(self.regions)} regions split over {self.peers.size} ranks: {self.flops_share:.0%} of the "
            f"matrix products' FLOPs, {self.params_share:.0%} of the parameters; the rest is on every rank{sliced}"
        )


def split_tensors(
    model: nn.Module,
    world: World,
    *,
    plan: Mapping[str, str] | None = None,
    sample: Sample | None = None,
) -> Split:
    """Split a model over the axis tp, in place; collective.

    Args:
        plan: glob -> style. Left out: the model's own, else inferred.
        sample: what the model is called with (args, kwargs), the same on every rank of tp; shows which layers
            follow each other, and proves that the split model computes the same.

    Raises:
        LayoutError: a plan that is wrong, or no sample to look at.
    """
    size = world.mesh.sizes["tp"]
    peers = Peers(world.axis_group("tp"), world.mesh.coordinate(world.rank, "tp"), size)
    world.at_close(lambda: setattr(peers, "group", None))
    if sample is None:
        raise LayoutError(
            "tensor parallelism looks at what the model does with one sample, and was given none. Pass one to "
            "shoal.place(model, world, sample=((inputs,), {})); the data of a job must have an index for it."
        )
    seen = look(model, *sample)
    proof = _Proof(model, sample, peers, world, seen)
    search = Search(model, seen, peers, world)
    stated = given_plan(model, plan)
    if stated:
        _follow(search, seen, resolve(model, stated), size)
        _check_together(model, search.regions, peers, proof)
    else:
        search.infer()
        while torn := _torn(model, search.regions, peers):  # what one use would leave whole, all do
            search.regions.remove(torn[0][0])
        search.regions = proof.keep(search.regions)
        if not search.regions:
            proof.check_repeats()
            raise LayoutError(_nothing(size, search.untried))
    stretches = None
    if world.layout.sequence:
        stretches = find_stretches(model, Call(*sample), search.regions, proof.trial, search, _cut)
    _check_compiles(world, search.regions)
    split = _apply(model, peers, search.regions, seen, stretches)
    heads = [region.name for region in search.regions if region.name in seen.heads and _gathers(region)]
    for name in heads:
        model.get_submodule(name).__dict__["_shoal_shown"] = True
    if heads:
        split.hide_outputs()
    return split


def _check_compiles(world: World, regions: list[Region]) -> None:
    spelled = [region.name for region in regions if region.rules is not None]
    if world.layout.compile != "none" and spelled:
        raise LayoutError(
            f"{world.layout}: the code of {spelled[0]} spells out sizes of the whole model (`x.view(b, t, self.heads, "
            "d)`), and torch.compile cannot trace how a rank's own are put in their place. Drop compile, or let the "
            "code read them off the tensor (`x.view(b, t, -1, d)`)."
        )


def _nothing(size: int, untried: Mapping[str, str]) -> str:
    told = "".join(f" {name or 'The model'} could not be tried by itself ({why})." for name, why in untried.items())
    return (
        f"tp{size} splits nothing of this model: no layers were found that compute the same in {size} parts, so every "
        f"rank would do all of the work.{told[:500]} Use those ranks for dp or fsdp, or state a plan (tensor_plan of "
        "the job), which is proved too and says what is wrong with it."
    )


def _gathers(region: Region) -> bool:
    return region.cuts.keys() == {""} and region.cuts[""].style == "colwise_gather"


class _Proof:
    """That the whole model is the same with all its regions cut: no region is used from outside of it.

    Raises:
        LayoutError: the model cannot be proved to be anything, since no copy of it runs.
    """

    def __init__(self, model: nn.Module, sample: Sample, peers: Peers, world: World, seen: Look) -> None:
        self._seen, self._size = seen, peers.size
        try:
            self.trial = Trial(model, [Call(*sample)], peers, world)
        except UntriedError as error:
            raise LayoutError(
                f"tp{peers.size} proves on copies of the model that it computes the same when it is split, and a copy "
                f"cannot be compared ({error}). The sample ran through the model itself. A copy fails where a model "
                "holds locks, files or generators; the tensors that it returns are found in tuples, lists, dicts and "
                "dataclasses. Mend that, or use these ranks for dp or fsdp."
            ) from error

    def holds(self, regions: list[Region]) -> bool:
        """Of these together; collective."""
        if not regions:
            return True
        partial = {".".join(filter(None, (region.name, name))) for region in regions for name in region.partial}
        found = self.trial.confirm(lambda model, peers: _apply(model, peers, regions, self._seen).parts)
        return found is not None and partial.issuperset(found)

    def check_repeats(self) -> None:
        """Where a guess failed; collective.

        Raises:
            LayoutError: the model fails whole, too, so that the guess may have been right.
        """
        if not self.trial.repeats():
            raise LayoutError(
                f"tp{self._size} compares the split model with the whole one, and the whole one does not even compute "
                "the same twice for one sample, with its dropout off: it draws from a generator of its own, or keeps "
                "something from call to call. Draw from torch's own stream, or use these ranks for dp or fsdp."
            )

    def keep(self, regions: list[Region]) -> list[Region]:
        """The regions that hold together: all, or those that hold alone, or none."""
        if self.holds(regions):
            return regions
        alone = [region for region in regions if self.holds([region])]
        return alone if self.holds(alone) else []


def _check_together(model: nn.Module, regions: list[Region], peers: Peers, proof: _Proof) -> None:
    torn = _torn(model, regions, peers)
    if torn:
        raise LayoutError(
            f"tensor plan: {torn[0][1]} is used in several places, and the plan does not cut it alike in all of "
            "them. Give each a style that cuts the same way (an embedding: vocabulary, the head: colwise_gather)."
        )
    if not proof.holds(regions):
        proof.check_repeats()
        wrong = next((region.name for region in regions if not proof.holds([region])), regions[0].name)
        raise LayoutError(
            f"tensor plan: with {wrong or 'these layers'} split the model does not compute what it computes whole: "
            "something in it is used from outside (a weight, an activation), or runs in training alone. Leave it out."
        )


def _follow(search: Search, seen: Look, styles: Mapping[str, Style], size: int) -> None:
    """Group the layers of a plan into regions, and prove each.

    Raises:
        LayoutError: naming the region that would compute something else.
    """
    for name, layers in regions_of(seen, styles):
        region = search.prove(name, layers)
        if region is None:
            raise LayoutError(
                f"tensor plan: {name or 'the model'} split over tp{size} as {_shown(layers)} does not compute what it "
                "computes whole: outputs or gradients differ, or the sizes do not divide. The heads must divide, a "
                "rowwise layer must follow its colwise ones, and a colwise layer that nothing follows needs "
                "colwise_gather. Leave these layers out, or take a degree that divides."
                f"{_that_fit(search.few.get(name))}"
            )
        search.regions.append(region)


def _that_fit(num_heads: int | None) -> str:
    if num_heads is None:
        return ""
    fitting = ", ".join(f"tp{degree}" for degree in range(2, num_heads + 1))
    return f" Its code cuts the features into {num_heads} heads, so these fit: {fitting or 'none'}."


def _shown(layers: Mapping[str, Style]) -> str:
    return ", ".join(f"{layer or 'itself'}: {style}" for layer, style in layers.items())


def regions_of(seen: Look, styles: Mapping[str, Style]) -> list[tuple[str, dict[str, Style]]]:
    """The layers of a plan by the smallest module that holds a rowwise one and its colwise ones, chain by chain."""
    alone = {name: style for name, style in styles.items() if style.name in ALONE}
    regions = [(name, {"": style}) for name, style in alone.items() if name in seen.calls]
    rest = [name for name in seen.order if name in styles and name not in alone]
    for name in sorted(seen.calls, key=lambda name: -len(name.split(".")) if name else 1):
        held = [layer for layer in rest if not name or layer.startswith(f"{name}.")]
        kinds = {styles[layer].name for layer in held}
        if kinds >= {"colwise", "rowwise"} or (held and not name):
            chain: dict[str, Style] = {}
            for layer in held:
                chain[layer[len(name) + 1 :] if name else layer] = styles[layer]
                if styles[layer].name == "rowwise" or layer == held[-1]:
                    regions.append((name, chain))
                    chain = {}
            rest = [layer for layer in rest if layer not in held]
    return regions


def _apply(
    model: nn.Module, peers: Peers, regions: list[Region], seen: Look, stretches: Stretches | None = None
) -> Split:
    layers = [f"{region.name}.{layer}".strip(".") for region in regions for layer in region.cuts]
    flops_share, params_share = share_of(model, seen, layers)
    split = Split(model, peers, regions, flops_share=flops_share, params_share=params_share, stretches=stretches)
    # A ring all-reduce sends 2 (N - 1) / N of the tensor; one forward and one backward per layer that leaves.
    sent = sum(
        seen.output_bytes.get(f"{r.name}.{n}".strip("."), 0) for r in regions for n, c in r.cuts.items() if _leaves(c)
    )
    split.bytes_per_sample = int(2 * sent * 2 * (peers.size - 1) / peers.size / max(seen.num_samples, 1))
    split.parts, _ = _cut(model, peers, regions, stretches)
    partial = [f"{region.name}.{name}".strip(".") for region in regions for name in region.partial]
    split._partial = list(dict.fromkeys([*partial, *(stretches.partial if stretches is not None else ())]))
    by_param = {id(model.get_parameter(n)): p for n, p in split.parts.items() if _is_param(model, n)}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in by_param:
            split.parts.setdefault(name, by_param[id(param)])  # under every name that it has
    first = {id(module): name for name, module in reversed(list(model.named_modules()))}
    for name, module in model.named_modules(remove_duplicate=False):  # a shared module, and so its buffers
        for key in module._buffers:
            part = split.parts.get(f"{first[id(module)]}.{key}".strip("."))
            if part is not None:
                split.parts.setdefault(f"{name}.{key}".strip("."), part)
    return split


def _cut(
    model: nn.Module, peers: Peers, regions: list[Region], stretches: Stretches | None
) -> tuple[dict[str, Part], list[Stretch]]:
    """Cut the layers of the regions; what this rank holds, by name, and the stretches of blocks that were laid."""
    parts: dict[str, Part] = {}
    laid, peers_of = stretches.lay(model, peers, regions) if stretches is not None else ([], {})
    done: Slices = {}
    for place, region in enumerate(regions):
        module = model.get_submodule(region.name)
        held = cut_layers(module, region.cuts, peers_of.get(place, peers), done)
        parts |= {f"{region.name}.{name}".strip("."): part for name, part in held.items()}
        if region.rules is not None or region.draws:
            _attach(module, region, peers)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # in evaluation; nested tensors cannot be added over ranks
    return parts, laid


def _leaves(cut: Cut) -> bool:
    return cut.style not in ("colwise", "channels")


def _torn(model: nn.Module, regions: list[Region], peers: Peers) -> list[tuple[Region, str]]:
    """Regions that cut a parameter otherwise than another layer which uses it too, with its name."""
    uses: dict[int, set[int]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            uses.setdefault(id(param), set()).add(id(module))
    ways: dict[int, dict[int, tuple[Region, str, Any]]] = {}
    for region in regions:
        for layer, cut in region.cuts.items():
            for path, (dim, units) in cut.keeps.items():
                name = ".".join(filter(None, (region.name, layer, path)))
                if _is_param(model, name):
                    owner = model.get_submodule(name.rpartition(".")[0])
                    way = (region, name, (dim, units.spans(peers.rank)))
                    ways.setdefault(id(model.get_parameter(name)), {})[id(owner)] = way
    return [
        (region, name)
        for param, found in ways.items()
        for region, name, _ in found.values()
        if found.keys() != uses[param] or len({way for _, _, way in found.values()}) > 1
    ]


def _is_param(model: nn.Module, name: str) -> bool:
    module, _, key = name.rpartition(".")
    return key in model.get_submodule(module)._parameters


def _attach(module: nn.Module, region: Region, peers: Peers) -> None:
    stream = OwnStream(peers.rank) if region.draws else None
    if "_shoal_inside" not in module.__dict__:  # one module may hold several regions
        module.__dict__["_shoal_inside"] = []
        become(module, _Inside)
    module.__dict__["_shoal_inside"].append((region.rules, stream, region.cuts.keys() == {""}))
    for layer in region.cuts if stream is not None else ():
        module.get_submodule(layer).__dict__["_shoal_stream"] = stream


class _Inside:
    """The module of a region, run with this rank's sizes and, where the ranks differ, its own random numbers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        with contextlib.ExitStack() as stack:
            for rules, stream, is_all in self.__dict__["_shoal_inside"]:
                if stream is not None and module.training:
                    stack.callback(stream.end)
                    if is_all:  # the region is this one layer
                        stream.begin(next(module.parameters()))
                stack.enter_context(narrowing(rules))
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the class that it is mixed into
