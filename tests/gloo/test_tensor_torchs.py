"""torch's own attention, encoder and decoder, cut by heads: every mask and every way of calling them.

Dimensions: B batch, T time, H heads.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from splitting import WIDTH, assert_same_split, sequences, split_run
from torch import Tensor, nn

from shoal.errors import LayoutError

HEADS = 4


class Torchs(nn.Module):
    """nn.MultiheadAttention, called as `how` says."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Any], heads: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.how = how
        self.attention = nn.MultiheadAttention(WIDTH, heads, **{"batch_first": True, **options})
        with torch.no_grad():
            for name, param in self.attention.named_parameters():
                if "bias" in name:
                    param.uniform_()  # torch starts them at zero, where a mistake would not show

    def forward(self, x: Tensor) -> Any:
        return self.how(self.attention, x)


def with_mask(kind: str) -> dict[str, Tensor]:
    b, t = 3, 6  # of the steps; the sample has 2 sequences
    causal = torch.ones(t, t, dtype=torch.bool).triu(1)
    return {
        "none": {},
        "bool": {"attn_mask": causal},
        "float": {"attn_mask": torch.linspace(-1, 1, t * t, dtype=torch.float64).view(t, t)},
        "of each head": {"attn_mask": torch.linspace(-1, 1, b * HEADS * t * t, dtype=torch.float64).view(-1, t, t)},
        "bool, of each head": {"attn_mask": torch.arange(b * HEADS * t * t).view(-1, t, t) % 3 == 1},
        "padding": {"key_padding_mask": torch.arange(b * t).view(b, t) % t > 3},
        "float padding": {"key_padding_mask": torch.linspace(-1, 1, b * t, dtype=torch.float64).view(b, t)},
        "bool and padding": {"attn_mask": causal, "key_padding_mask": torch.arange(b * t).view(b, t) % t > 3},
        "causal, said": {"attn_mask": causal, "is_causal": True},
    }[kind]


def fitted(masks: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """For the batch at hand."""
    rows = {"attn_mask": len(x) * HEADS, "key_padding_mask": len(x)}
    return {n: m[: rows[n]] if n in rows and (n != "attn_mask" or m.dim() == 3) else m for n, m in masks.items()}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "none",
        "bool",
        "float",
        "of each head",
        "bool, of each head",
        "padding",
        "float padding",
        "bool and padding",
        "causal, said",
    ],
)
def test_torchs_attention_with_every_mask(kind, need_weights):
    def how(attention: nn.Module, x: Tensor) -> Any:
        return attention(x, x, x, need_weights=need_weights, **fitted(with_mask(kind), x))

    found = assert_same_split(lambda: Torchs(how), sequences)
    assert found.styles == {"attention": "heads"}


def plainly(attention: nn.Module, x: Tensor) -> Any:
    return attention(x, x, x)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"batch_first": False}, plainly),
        ({"bias": False}, plainly),
        ({"kdim": 5, "vdim": 7}, lambda attention, x: attention(x, x[..., :5], x[..., :7])),
        ({}, lambda attention, x: attention(x, x[:, :4], x[:, 1:5])),
        ({}, lambda attention, x: attention(x, x, x, average_attn_weights=False)),
        ({}, lambda attention, x: attention(x[0], x[0], x[0])),
        ({}, lambda attention, x: attention(x[0], x[0], x[0], key_padding_mask=torch.arange(6) > 3)),
        ({"heads": 3}, plainly),
    ],
    ids=["time first", "no bias", "kdim, vdim", "cross", "weights of each head", "unbatched", "unbatched, mask", "3"],
)
def test_torchs_attention_in_every_way_of_calling_it(options, how):
    found = assert_same_split(lambda: Torchs(how, **options), sequences)
    assert found.styles == {"attention": "heads"}


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"heads": 1}], ids=str)
def test_torchs_attention_alone_with_what_cannot_be_cut_is_refused(options):
    with pytest.raises(LayoutError, match="splits nothing"):
        split_run(lambda: Torchs(plainly, **options), sequences)


class Encoder(nn.Module):
    def __init__(self, heads: int = HEADS, hidden: int = 30, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, heads, hidden, dropout=0.0, batch_first=True, **options)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=torch.arange(len(x) * 6).view(-1, 6) % 6 > 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=str)
@pytest.mark.parametrize("layout", ["tp2", "tp4"])
def test_torchs_encoder_trains_and_evaluates(options, layout):
    def evaluate(model: nn.Module, world: Any) -> Tensor:
        torch.manual_seed(0)
        model.eval()
        with torch.no_grad():
            return model(sequences(3))[:, :4]

    def made() -> nn.Module:
        return Encoder(**options)

    found = assert_same_split(made, sequences, layout, then=evaluate)
    assert set(found.styles.values()) == {"heads", "colwise", "rowwise"}
    alone = assert_same_split(made, sequences, "tp2", then=evaluate) if layout != "tp2" else found
    torch.testing.assert_close(found.extra, alone.extra, rtol=1e-10, atol=1e-12)


def test_torchs_encoder_decoder():
    def made() -> nn.Module:
        return nn.Transformer(WIDTH, HEADS, 1, 1, 32, dropout=0.0, batch_first=True)

    found = assert_same_split(made, lambda rows: (sequences(rows), sequences(rows)[:, :4]))
    assert sorted(set(found.styles.values())) == ["colwise", "heads", "rowwise"]
