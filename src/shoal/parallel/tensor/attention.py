"""torch's nn.MultiheadAttention, cut by heads: it calls no layer of its own, so it has a forward of its own here."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.tensor.units import Units


def fits(module: nn.Module) -> bool:
    """Whether it is one without the options that nobody combines with heads on several ranks."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and module.bias_k is None
        and not module.add_zero_attn
    )


def keeps(module: nn.Module, units: Units) -> Mapping[str, tuple[int, Units]]:
    """What a rank keeps: its heads' rows of q, k and v, and its heads' columns of the output."""
    assert isinstance(module, nn.MultiheadAttention)
    width = module.embed_dim
    once, thrice = replace(units, parts=(width,)), replace(units, parts=(width,) * 3)
    kept = {"out_proj.weight": (1, once)}
    for name, dim_units in (
        ("in_proj_weight", thrice),
        ("in_proj_bias", thrice),
        ("q_proj_weight", once),
        ("k_proj_weight", once),
        ("v_proj_weight", once),
    ):
        if getattr(module, name) is not None:  # which of them exist depends on kdim and bias
            kept[name] = (0, dim_units)
    return kept


class Heads:
    """The forward on this rank's heads; arguments and results as nn.MultiheadAttention documents them."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self
        cut, peers = self.__dict__["_shoal_cut"]
        batched = query.dim() == 3
        q, k, v = (peers.enter(x) for x in (query, key, value))
        if not batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        elif not module.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        start, stop = cut.units.share(peers.rank)
        q, k, v = (
            F.linear(x, w, b).view(*x.shape[:2], stop - start, module.head_dim).transpose(1, 2)
            for x, w, b in zip((q, k, v), *_projections(module), strict=True)
        )  # (B, H, T, D)
        mask = _merged(module, attn_mask, key_padding_mask, q, (start, stop))
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * module.head_dim**-0.5
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            mixed = F.dropout(weights, dropout, training=dropout > 0) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = F.linear(mixed.transpose(1, 2).flatten(2), module.out_proj.weight)
        if not batched:
            out = out.squeeze(0)
        elif not module.batch_first:
            out = out.transpose(0, 1)
        out = peers.leave(out)
        if module.out_proj.bias is not None:
            out = out + module.out_proj.bias.to(out.dtype)
        if weights is None:
            return out, None
        weights = _shown(peers, cut.units, weights, average_attn_weights)
        return out, weights if batched else weights.squeeze(0)


def _projections(module: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return weights, biases


def _merged(
    module: Any, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, heads: tuple[int, int]
) -> Tensor | None:
    """Both masks as one that is added to the scores (B or 1, H or 1, T or 1, S)."""
    mask = None
    if attn_mask is not None:
        mask = _added(attn_mask, q)
        if mask.dim() == 3:  # (B H, T, S), of all heads
            mask = mask.view(-1, module.num_heads, *mask.shape[1:])[:, heads[0] : heads[1]]
    if padding is not None:
        hidden = _added(padding, q).view(-1, 1, 1, padding.shape[-1])
        mask = hidden if mask is None else mask + hidden
    return mask


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))


def _shown(peers: Any, units: Units, weights: Tensor, average: bool) -> Tensor:
    """The attention weights as the caller sees them: the mean of all heads (B, T, S), or each."""
    if average:
        return peers.leave(weights.sum(dim=1)) / units.count  # type: ignore[no-any-return]
    sizes = [stop - start for start, stop in map(units.share, range(units.num_ranks))]
    return peers.gather(weights.movedim(1, -1), sizes).movedim(-1, 1)  # type: ignore[no-any-return]
