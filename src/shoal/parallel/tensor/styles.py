"""How a single layer is cut, by style: which rows or columns a rank keeps, and what its forward does.

The layer stays the user's own module: its parameters become this rank's slices under the same names, and its class
a subclass that talks to the peers.

    style            keeps                    in         out
    colwise          its output features      whole      cut
    colwise_gather   its output features      whole      whole (gathered)
    rowwise          its input features       cut        whole (summed; the bias is added once, after it)
    rowwise_scatter  its input features       whole      whole
    vocabulary       its rows of a table      whole      whole (an embedding)
    channels         its channels             cut        cut   (a norm between two convolutions)
    heads            its heads                whole      whole (nn.MultiheadAttention)
    experts          a part of each expert    whole      whole (parameters that the plan names, of any module)
    replicated       all                      -          -
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shoal.parallel.swap import become
from shoal.parallel.tensor import attention
from shoal.parallel.tensor.peers import Peers
from shoal.parallel.tensor.units import Units
from shoal.parallel.tensor.vocabulary import SlicedLogits

STYLES = ("colwise", "colwise_gather", "rowwise", "rowwise_scatter", "vocabulary", "channels", "heads", "replicated")


@dataclass(frozen=True, slots=True)
class Cut:
    """One layer, its style, the units of the features that it cuts, and by tensor: the dim, and the units there."""

    style: str
    units: Units
    keeps: Mapping[str, tuple[int, Units]]


def make_cut(layer: nn.Module, style: str, units: Units) -> Cut:
    """How a layer is cut."""
    if style == "heads":
        return Cut(style, units, attention.keeps(layer, units))
    return Cut(style, units, {name: (dim, units) for name, dim in _cut_dims(layer, style).items()})


def cut_experts(module: nn.Module, units: Units, tensors: Mapping[str, tuple[bool, bool]]) -> Cut:
    """How parameters (experts, out, in) are cut, all along the middle layer of each expert.

    Args:
        tensors: by name, whether it is the matrix after that layer, and whether two are packed in one.
    """
    keeps = {}
    for name, (is_last, is_packed) in tensors.items():
        param = module.get_parameter(name)
        dim = param.dim() - (1 if is_last else 2)
        width = param.shape[dim]
        keeps[name] = (dim, replace(units, parts=(width // 2,) * 2 if is_packed else (width,)))
    return Cut("experts", units, keeps)


def is_linear(module: nn.Module) -> bool:
    """A matrix product (Linear, the transposed Conv1D of GPT-2, a convolution) that runs as its class says."""
    return _kind(module) in ("linear", "conv1d", "conv")


def _kind(module: nn.Module) -> str:
    forward = type(module).forward
    if nn.utils.parametrize.is_parametrized(module):
        return ""  # its weight is computed, and reading it may change a state (spectral norm)
    if forward is nn.Linear.forward:
        return "linear"
    if forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward):
        return "conv" if module.groups == 1 else ""
    if type(module).__name__ == "Conv1D" and {"nx", "nf"} <= vars(module).keys():  # of transformers, not imported here
        return "conv1d"
    if forward is nn.Embedding.forward:
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return "embedding" if plain else ""
    if attention.fits(module):
        return "attention"
    return "norm" if isinstance(module, nn.modules.batchnorm._BatchNorm) else ""


def features(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a layer that can be cut; rows and width of a table."""
    kind = _kind(module)
    if kind == "attention":
        return module.embed_dim, module.embed_dim  # type: ignore[return-value]  # nn.Module does not say int
    if kind == "norm":
        return module.num_features, module.num_features  # type: ignore[return-value]  # as above
    weight = module.weight
    assert isinstance(weight, Tensor)
    first, second = weight.shape[:2]
    return (first, second) if kind in ("conv1d", "embedding") else (second, first)


def fits(module: nn.Module, style: str) -> bool:
    """Whether a layer of this kind can be cut so."""
    kinds = {
        "colwise": ("linear", "conv1d", "conv"),
        "colwise_gather": ("linear", "conv1d", "embedding"),
        "rowwise": ("linear", "conv1d", "conv"),
        "rowwise_scatter": ("linear", "conv1d"),
        "vocabulary": ("embedding",),
        "channels": ("norm",),
        "heads": ("attention",),
    }
    return style == "replicated" or _kind(module) in kinds.get(style, ())


def _cut_dims(module: nn.Module, style: str) -> dict[str, int]:
    """The dim that each tensor of the layer is cut along; what is not named stays whole."""
    kind = _kind(module)
    if style == "channels":
        return {name: 0 for name, tensor in module.state_dict().items() if tensor.dim() == 1}
    if style == "replicated":
        return {}
    if style == "vocabulary":
        return {"weight": 0}
    if kind == "embedding":
        return {"weight": 1}
    transposed = kind == "conv1d"
    if style in ("colwise", "colwise_gather"):
        has_bias = getattr(module, "bias", None) is not None  # no bias: the attribute is None, or absent
        return {"weight": 1 if transposed else 0} | ({"bias": 0} if has_bias else {})
    return {"weight": 0 if transposed else 1}


def convert(module: nn.Module, cut: Cut, peers: Peers) -> None:
    """Let a layer whose parameters are slices already talk to its peers."""
    if cut.style in ("channels", "replicated"):
        if cut.style == "channels":
            setattr(module, "num_features", cut.units.sizes()[peers.rank])  # noqa: B010 (typed as a tensor or module)
        return
    kind, local = _kind(module), cut.units.sizes()[peers.rank]
    module.__dict__["_shoal_cut"] = (cut, peers)
    module.register_forward_pre_hook(_be_called)
    if cut.style in ("heads", "experts"):
        become(module, attention.Heads if cut.style == "heads" else _Experts)
        return
    column = cut.style in ("colwise", "colwise_gather")
    shown = {
        "linear": ("out_features", "in_features"),
        "conv1d": ("nf", "nx"),
        "conv": ("out_channels", "in_channels"),
        "embedding": ("embedding_dim", "num_embeddings"),
    }[kind]
    setattr(module, shown[0] if column else shown[1], local)
    base: type = _Column if column else _Row if cut.style.startswith("rowwise") else _Vocabulary
    become(module, base)


def _be_called(module: nn.Module, args: Any) -> None:
    """Does nothing: torch's encoder layers read the weights of a layer that has no hook, and do not call it."""


class _Column:
    """Out of whole inputs, this rank's features."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())  # torch's layers call it `input`, those of transformers `x`
        cut, peers = self.__dict__["_shoal_cut"]
        whole = x if isinstance(self, nn.Embedding) else peers.enter(x)
        out: Tensor = super().forward(whole)  # type: ignore[misc]
        stream = self.__dict__.get("_shoal_stream")
        if stream is not None and self.training and cut.style == "colwise":  # type: ignore[attr-defined]
            stream.begin(out)
        if "_shoal_shown" in self.__dict__:
            return SlicedLogits.of(out, peers, cut.units.sizes())
        return peers.gather(out, cut.units.sizes()) if cut.style == "colwise_gather" else out


class _Row:
    """Out of this rank's features, a part of a sum; the bias belongs to the sum."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())
        cut, peers = self.__dict__["_shoal_cut"]
        if cut.style == "rowwise_scatter":
            x = peers.scatter(x, cut.units.sizes())
        out: Tensor = peers.leave(_without_bias(self, x))
        if "_shoal_stream" in self.__dict__:
            self.__dict__["_shoal_stream"].end()
        bias: Tensor | None = getattr(self, "bias", None)  # a layer without one has None, or no such attribute
        if bias is None:
            return out
        if isinstance(self, nn.modules.conv._ConvNd):
            bias = bias.view(-1, *[1] * (self.weight.dim() - 2))
        return out + bias.to(out.dtype)  # under autocast the product is narrower


def _without_bias(layer: Any, x: Tensor) -> Tensor:
    out: Tensor
    if isinstance(layer, nn.Linear):
        out = F.linear(x, layer.weight)
    elif isinstance(layer, nn.modules.conv._ConvNd):
        out = layer._conv_forward(x, layer.weight, None)
    else:
        out = x @ layer.weight
    return out


class _Experts:
    """A module whose parameters are parts of experts: whole inputs (the routing's weights too), a part of a sum."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _, peers = self.__dict__["_shoal_cut"]
        args, kwargs = tree_map_only(Tensor, peers.enter, (args, kwargs))
        return tree_map_only(Tensor, peers.leave, super().forward(*args, **kwargs))  # type: ignore[misc]


class _Vocabulary:
    """Rows that this rank holds; of the others it adds zeros to the sum."""

    def forward(self, input: Tensor) -> Tensor:
        ids, (cut, peers) = input, self.__dict__["_shoal_cut"]
        ((start, stop),) = cut.units.spans(peers.rank)
        elsewhere = (ids < start) | (ids >= stop)
        known = elsewhere & (ids >= 0) & (ids < cut.units.count)  # what is in nobody's rows is an error, as ever
        padding = getattr(self, "padding_idx", None)
        own = padding - start if padding is not None and start <= padding < stop else None
        weight: Tensor = self.weight  # type: ignore[attr-defined]  # of the class that this one is mixed into
        rows = F.embedding((ids - start).masked_fill(known, 0), weight, own)
        out: Tensor = peers.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))
        return out
