"""The tensor split of a model: found or given, proved, applied; and what it leaves to do after a backward."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from shoal.parallel.tensor.stream import OwnStream
from shoal.parallel.tensor.styles import Cut
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
        heads: by the place of an output of the model that stays cut, how many features each rank has of it.
        bytes_per_sample: what each rank sends for one sample, forward and backward.
    """

    model: nn.Module
    peers: Peers
    regions: list[Region]
    parts: dict[str, Part] = field(default_factory=dict)
    flops_share: float = 0.0
    params_share: float = 0.0
    bytes_per_sample: int = 0
    heads: dict[int, list[int]] = field(default_factory=dict)
    _partial: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """After the last backward: of parameters inside a region each rank has a part of the gradient."""
        grads = [local_of(p.grad) for p in map(self.model.get_parameter, self._partial) if p.grad is not None]
        if grads:
            flat = self.peers.add(torch.cat([grad.flatten() for grad in grads]))
            for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))

    def present(self, output: Any) -> Any:
        """The model's output as a job sees it: what stayed cut looks whole."""
        if not self.heads:
            return output
        leaves, spec = tree_flatten(output)
        for place, sizes in self.heads.items():
            leaves[place] = SlicedLogits.of(leaves[place], self.peers, sizes)
        return tree_unflatten(leaves, spec)

    def __str__(self) -> str:
        return (
            f"tensor  {len(self.regions)} regions split over {self.peers.size} ranks: {self.flops_share:.0%} of the "
            f"matrix products' FLOPs, {self.params_share:.0%} of the parameters; the rest is on every rank"
        )


def split_tensors(
    model: nn.Module,
    world: World,
    *,
    plan: Mapping[str, str] | None = None,
    sample: Sample | None = None,
    keep_cut: bool = False,
) -> Split:
    """Split a model over the axis tp, in place; collective.

    Args:
        plan: glob -> style. Left out: the model's own, else inferred.
        sample: what the model is called with (args, kwargs), the same on every rank of tp; shows which layers
            follow each other, and proves that the split model computes the same.
        keep_cut: logits that a head gives out stay slices, for `Split.present` to show.

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
    search = Search(model, seen, peers, world)
    stated = given_plan(model, plan)
    if stated:
        _follow(search, seen, resolve(model, stated), size)
        torn = _torn(model, search.regions, peers)
        if torn:
            raise LayoutError(
                f"tensor plan: {torn[0][1]} is used in several places, and the plan does not cut it alike in all of "
                "them. Give each a style that cuts the same way (an embedding: vocabulary, the head: colwise_gather)."
            )
    else:
        search.infer()
        while torn := _torn(model, search.regions, peers):  # what one use would leave whole, all do
            search.regions.remove(torn[0][0])
    heads = _keep_heads_cut(search.regions, seen) if keep_cut else {}
    split = _apply(model, peers, search.regions, seen)
    split.heads = heads
    return split


def _keep_heads_cut(regions: list[Region], seen: Look) -> dict[int, list[int]]:
    """A head whose output is the model's need not gather it: by place in the output, the sizes of the slices."""
    heads = {}
    for place, name in seen.output_of.items():
        for region in regions:
            cut = region.cuts.get("")
            if region.name == name and cut is not None and cut.style == "colwise_gather":
                region.cuts = {"": replace(cut, style="colwise")}
                heads[place] = cut.units.sizes()
    return heads


def _follow(search: Search, seen: Look, styles: Mapping[str, Style], size: int) -> None:
    """Group the layers of a plan into regions, and prove each.

    Raises:
        LayoutError: naming the region that would compute something else.
    """
    for name, layers in regions_of(seen, styles).items():
        region = search.prove(name, layers)
        if region is None:
            raise LayoutError(
                f"tensor plan: {name or 'the model'} split over tp{size} as {_shown(layers)} does not compute what it "
                "computes whole: outputs or gradients differ, or the sizes do not divide. The heads must divide, a "
                "rowwise layer must follow its colwise ones, and a colwise layer that nothing follows needs "
                "colwise_gather. Leave these layers out, or take a degree that divides."
            )
        search.regions.append(region)


def _shown(layers: Mapping[str, Style]) -> str:
    return ", ".join(f"{layer or 'itself'}: {style}" for layer, style in layers.items())


def regions_of(seen: Look, styles: Mapping[str, Style]) -> dict[str, dict[str, Style]]:
    """The layers of a plan by the smallest module that holds a rowwise one and its colwise ones."""
    alone = {name: style for name, style in styles.items() if style.name in ALONE}
    regions = {name: {"": style} for name, style in alone.items() if name in seen.calls}
    rest = [name for name in seen.order if name in styles and name not in alone]
    for name in sorted(seen.calls, key=lambda name: -len(name.split(".")) if name else 1):
        held = [layer for layer in rest if not name or layer.startswith(f"{name}.")]
        kinds = {styles[layer].name for layer in held}
        if kinds >= {"colwise", "rowwise"} or (held and not name):
            regions[name] = {layer[len(name) + 1 :] if name else layer: styles[layer] for layer in held}
            rest = [layer for layer in rest if layer not in held]
    return regions


def _apply(model: nn.Module, peers: Peers, regions: list[Region], seen: Look) -> Split:
    layers = [f"{region.name}.{layer}".strip(".") for region in regions for layer in region.cuts]
    flops_share, params_share = share_of(model, seen, layers)
    split = Split(model, peers, regions, flops_share=flops_share, params_share=params_share)
    # A ring all-reduce sends 2 (N - 1) / N of the tensor; one forward and one backward per layer that leaves.
    sent = sum(
        seen.output_bytes.get(f"{r.name}.{n}".strip("."), 0) for r in regions for n, c in r.cuts.items() if _leaves(c)
    )
    split.bytes_per_sample = int(2 * sent * 2 * (peers.size - 1) / peers.size / max(seen.num_samples, 1))
    done: Slices = {}
    for region in regions:
        module = model.get_submodule(region.name)
        held = cut_layers(module, region.cuts, peers, done)
        split.parts |= {f"{region.name}.{name}" if region.name else name: part for name, part in held.items()}
        split._partial += [f"{region.name}.{name}" if region.name else name for name in region.partial]
        if region.rules is not None or region.draws:
            _attach(module, region, peers)
    by_param = {id(model.get_parameter(n)): p for n, p in split.parts.items() if _is_param(model, n)}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in by_param:
            split.parts.setdefault(name, by_param[id(param)])  # under every name that it has
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # in evaluation; nested tensors cannot be added over ranks
    return split


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
