"""Attention cut by heads, however its code spells them out.

Dimensions: B batch, T time, H heads, G key and value heads, D width of a head.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from splitting import MLP, WIDTH, assert_same_split, sequences
from torch import Tensor, nn

HEADS = 4
Spell = Callable[[Tensor, int, int], Tensor]  # features (B, T, H D), heads, their width -> (B, H, T, D)

SPLITS: dict[str, Spell] = {
    "view of all sizes": lambda x, h, d: x.view(x.shape[0], x.shape[1], h, d).transpose(1, 2),
    "view, the width left open": lambda x, h, d: x.view(x.shape[0], x.shape[1], h, -1).transpose(1, 2),
    "view, the heads left open": lambda x, h, d: x.view(x.shape[0], x.shape[1], -1, d).transpose(1, 2),
    "view, the batch left open": lambda x, h, d: x.view(-1, x.shape[1], h, d).transpose(1, 2),
    "view, the time left open": lambda x, h, d: x.view(x.shape[0], -1, h, d).transpose(1, 2),
    "view of a torch.Size": lambda x, h, d: x.view((*x.size()[:-1], h, d)).permute(0, 2, 1, 3),
    "reshape of a list": lambda x, h, d: torch.reshape(x, [x.shape[0], x.shape[1], h, d]).permute(0, 2, 1, 3),
    "reshape by keywords": lambda x, h, d: torch.reshape(input=x, shape=(*x.shape[:2], h, d)).permute(0, 2, 1, 3),
    "unflatten": lambda x, h, d: x.unflatten(-1, (h, d)).transpose(1, 2),
    "torch.unflatten, the width left open": lambda x, h, d: torch.unflatten(x, 2, (h, -1)).transpose(1, 2),
    "chunks, stacked": lambda x, h, d: torch.stack(x.chunk(h, dim=-1), dim=1),
}

MERGES: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda y: y.transpose(1, 2).flatten(2),
    "view of all sizes": lambda y: y.transpose(1, 2).contiguous().view(y.shape[0], y.shape[2], WIDTH),
    "reshape, the width left open": lambda y: y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1),
    "view of a torch.Size": lambda y: y.permute(0, 2, 1, 3).contiguous().view((y.shape[0], y.shape[2], WIDTH)),
}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v


class Attention(nn.Module):
    """Three matrices; the sizes of the whole are spelled out."""

    def __init__(self, split: Spell, merge: Callable[[Tensor], Tensor], heads: int = HEADS, kv: int = HEADS) -> None:
        super().__init__()
        self.split, self.merge, self.heads, self.kv, self.head_width = split, merge, heads, kv, WIDTH // heads
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, kv * self.head_width), nn.Linear(WIDTH, kv * self.head_width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x), self.heads, self.head_width)
        k, v = (self.split(layer(x), self.kv, self.head_width) for layer in (self.k, self.v))
        if self.kv != self.heads:
            k, v = self.repeat(k), self.repeat(v)
        return self.o(self.merge(attend(q, k, v)))

    def repeat(self, x: Tensor) -> Tensor:
        """(B, G, T, D) -> (B, H, T, D), as Llama's code does."""
        b, g, t, d = x.shape
        return x[:, :, None].expand(b, g, self.heads // self.kv, t, d).reshape(b, self.heads, t, d)


class Block(nn.Module):
    """x + attention(norm(x))"""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def assert_cut_by_heads(make_attention: Callable[[], nn.Module], layout: str = "tp2") -> None:
    found = assert_same_split(lambda: Block(make_attention()), sequences, layout)
    assert set(found.styles.values()) == {"colwise", "rowwise"}


@pytest.mark.parametrize("split", SPLITS)
def test_heads_split_in_any_spelling(split):
    found = assert_same_split(lambda: Block(Attention(SPLITS[split], MERGES["flatten"])), sequences)
    if "chunks" not in split:  # their number is spelled out where no size can be put in its place: left whole
        assert set(found.styles.values()) == {"colwise", "rowwise"}


@pytest.mark.parametrize("merge", MERGES)
def test_heads_merged_in_any_spelling(merge):
    assert_cut_by_heads(lambda: Attention(SPLITS["view of all sizes"], MERGES[merge]))


@pytest.mark.parametrize("layout", ["tp2", "tp3"])
@pytest.mark.parametrize("split", ["view of all sizes", "view, the width left open", "unflatten"])
def test_six_query_heads_on_three_key_value_heads(split, layout):
    assert_cut_by_heads(lambda: Attention(SPLITS[split], MERGES["flatten"], heads=6, kv=3), layout)


def test_key_value_heads_repeated_by_repeat_interleave():
    class Interleaved(Attention):
        def repeat(self, x: Tensor) -> Tensor:
            return x.repeat_interleave(self.heads // self.kv, dim=1)

    assert_cut_by_heads(lambda: Interleaved(SPLITS["unflatten"], MERGES["flatten"], heads=6, kv=3))


def test_one_key_value_head_for_all_stays_right():
    assert_same_split(lambda: Block(Attention(SPLITS["unflatten"], MERGES["flatten"], kv=1)), sequences)


def test_attention_with_fewer_heads_than_ranks_stays_whole_and_the_rest_is_split():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(Attention(SPLITS["view of all sizes"], MERGES["flatten"], heads=2, kv=2))
            self.mlp = MLP(hidden=200)

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.block(x))

    found = assert_same_split(Both, sequences, "tp4")
    assert found.styles == {"mlp.up": "colwise", "mlp.down": "rowwise"}


def merged_into_batch(open_dim: str) -> type[nn.Module]:
    """Heads merged into the batch, as fairseq and older Hugging Face code do."""

    class Merged(Attention):
        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            shape = {"": (b * HEADS, t, 3), "time": (b * HEADS, -1, 3), "batch": (-1, t, 3)}[open_dim]
            q, k, v = (self.split(layer(x), HEADS, 3).reshape(shape) for layer in (self.q, self.k, self.v))
            return self.o(attend(q, k, v).view(b, -1, t, 3).transpose(1, 2).reshape(b, t, WIDTH))

    return Merged


@pytest.mark.parametrize("open_dim", ["", "time", "batch"])
def test_heads_merged_into_the_batch_with_another_batch_than_that_of_the_sample(open_dim):
    made = merged_into_batch(open_dim)
    assert_same_split(lambda: Block(made(SPLITS["view of all sizes"], MERGES["flatten"])), sequences)


def test_heads_merged_into_the_batch_and_taken_apart_by_their_number():
    class Merged(Attention):
        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k, v = (self.split(layer(x), HEADS, 3).reshape(b * HEADS, t, 3) for layer in (self.q, self.k, self.v))
            return self.o(attend(q, k, v).view(b, HEADS, t, 3).transpose(1, 2).reshape(b, t, WIDTH))

    assert_same_split(lambda: Block(Merged(SPLITS["view of all sizes"], MERGES["flatten"])), sequences)


def test_time_first_with_heads_in_the_batch():
    class TimeFirst(Attention):
        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k, v = (
                layer(x).transpose(0, 1).contiguous().view(t, b * HEADS, 3).transpose(0, 1)
                for layer in (self.q, self.k, self.v)
            )
            return self.o(attend(q, k, v).transpose(0, 1).contiguous().view(t, b, WIDTH).transpose(0, 1))

    assert_cut_by_heads(lambda: TimeFirst(SPLITS["unflatten"], MERGES["flatten"]))


def test_attention_by_einsum():
    class Einsum(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).view(*x.shape[:2], HEADS, 3) for layer in (self.q, self.k, self.v))
            weights = torch.softmax(torch.einsum("bthd,bshd->bhts", q, k) * 3**-0.5, dim=-1)
            return self.o(torch.einsum("bhts,bshd->bthd", weights, v).reshape(*x.shape))

    assert_cut_by_heads(lambda: Einsum(SPLITS["unflatten"], MERGES["flatten"]))


# -- q, k and v in one matrix --------------------------------------------------------------------------


def parted(split: Callable[[Tensor], Any]) -> Callable[[Tensor, int], list[Tensor]]:
    """Features of q, k and v apart, then heads."""
    return lambda z, heads: [x.view(*x.shape[:2], -1, WIDTH // heads).transpose(1, 2) for x in split(z)]


FUSED: dict[str, Callable[[Tensor, int], Any]] = {
    "chunk": parted(lambda z: z.chunk(3, dim=-1)),
    "split by one size": parted(lambda z: z.split(WIDTH, dim=2)),
    "split by keywords": parted(lambda z: torch.split(tensor=z, split_size_or_sections=WIDTH, dim=-1)),
    "split by a list": parted(lambda z: torch.split(z, [WIDTH, WIDTH, WIDTH], dim=-1)),
    "view (b, t, 3, h, d)": lambda z, h: z.view(*z.shape[:2], 3, h, WIDTH // h).permute(2, 0, 3, 1, 4),
    "reshape (b, t, 3, h, -1)": lambda z, h: z.reshape(*z.shape[:2], 3, h, -1).permute(2, 0, 3, 1, 4).unbind(0),
    "view (b, t, h, 3, d)": lambda z, h: z.view(*z.shape[:2], h, 3, WIDTH // h).permute(3, 0, 2, 1, 4),
    "unflatten (h, 3 d), chunk": lambda z, h: z.unflatten(-1, (h, -1)).transpose(1, 2).chunk(3, dim=-1),
}


class Fused(nn.Module):
    def __init__(self, take: Callable[[Tensor, int], Any], width: int = 3 * WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.take, self.heads = take, heads
        self.qkv, self.o = nn.Linear(WIDTH, width), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.take(self.qkv(x), self.heads)
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for y in (k, v))
        return self.o(attend(q, k, v).transpose(1, 2).reshape(*x.shape))


@pytest.mark.parametrize("take", FUSED)
@pytest.mark.parametrize("layout", ["tp2", "tp4"])
def test_a_fused_matrix_is_cut_part_by_part(take, layout):
    assert_cut_by_heads(lambda: Fused(FUSED[take]), layout)


def test_a_fused_matrix_with_fewer_key_value_heads():
    def take(z: Tensor, heads: int) -> list[Tensor]:
        return [x.unflatten(-1, (-1, 2)).transpose(1, 2) for x in z.split([WIDTH, 6, 6], dim=-1)]

    assert_cut_by_heads(lambda: Fused(take, width=2 * WIDTH, heads=6))


def test_slices_of_a_fused_matrix_may_leave_it_whole():
    def take(z: Tensor, heads: int) -> list[Tensor]:
        parts = z[..., :WIDTH], z[..., WIDTH : 2 * WIDTH], z[..., 2 * WIDTH :]
        return [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in parts]

    assert_same_split(lambda: Block(Fused(take)), sequences)


# -- parameters inside ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("layout", ["tp2", "tp4"])
def test_a_norm_per_head_gets_the_sum_of_the_gradients_of_all_heads(norm, layout):
    """The bias of a norm of keys has no gradient but rounding: that too must be the same on every rank."""

    class Normed(Attention):
        def __init__(self) -> None:
            super().__init__(SPLITS["view of all sizes"], MERGES["flatten"])
            self.q_norm, self.k_norm = norm(3), norm(3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.split(layer(x), HEADS, 3) for layer in (self.q, self.k, self.v))
            return self.o(self.merge(attend(self.q_norm(q), self.k_norm(k), v)))

    assert_cut_by_heads(Normed, layout)


def test_a_bias_of_each_head_stays_right():
    class Biased(Attention):
        def __init__(self) -> None:
            super().__init__(SPLITS["view of all sizes"], MERGES["flatten"])
            self.slope = nn.Parameter(torch.linspace(0.1, 1.0, HEADS)[:, None, None])

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.split(layer(x), HEADS, 3) for layer in (self.q, self.k, self.v))
            return self.o(self.merge(torch.softmax(q @ k.transpose(-2, -1) * self.slope, dim=-1) @ v))

    assert_same_split(lambda: Block(Biased()), sequences)


# -- code that takes several paths ---------------------------------------------------------------------


class SelfOrCross(Attention):
    """One class, another line of code for a context."""

    def __init__(self) -> None:
        super().__init__(SPLITS["view of all sizes"], MERGES["flatten"])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q = self.q(x).view(*x.shape[:2], HEADS, 3).transpose(1, 2)
        if context is None:
            k, v = (layer(x).view(*x.shape[:2], HEADS, 3).transpose(1, 2) for layer in (self.k, self.v))
        else:
            k, v = (layer(context).reshape(*context.shape[:2], HEADS, 3).transpose(1, 2) for layer in (self.k, self.v))
        return self.o(self.merge(attend(q, k, v)))


class Decoder(nn.Module):
    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.own = SelfOrCross()
        self.cross = self.own if shared else SelfOrCross()

    def forward(self, x: Tensor) -> Tensor:
        return self.cross(self.own(x), x[:, :4])


@pytest.mark.parametrize("shared", [False, True])
def test_attention_to_itself_and_to_a_context_by_one_class(shared):
    """Each way of calling it is proved, so both may be cut."""
    found = assert_same_split(lambda: Decoder(shared=shared), sequences)
    assert len(found.styles) == (4 if shared else 8)
    assert set(found.styles.values()) == {"colwise", "rowwise"}


class ByIdentity(Attention):
    """Other lines where the keys are the queries, and where there is a mask of each head."""

    def __init__(self) -> None:
        super().__init__(SPLITS["unflatten"], MERGES["flatten"])

    def forward(self, query: Tensor, key: Tensor, *, mask: Tensor | None = None) -> Tensor:
        b, t, _ = query.shape
        if key is query:
            fused = torch.cat([self.q(query), self.k(query), self.v(query)], dim=-1)
            q, k, v = (y.view(b, t, HEADS, 3).transpose(1, 2) for y in fused.split(WIDTH, dim=-1))
        else:
            q = self.q(query).reshape(b, t, HEADS, 3).transpose(1, 2)
            k, v = (layer(key).reshape(b, t, HEADS, 3).transpose(1, 2) for layer in (self.k, self.v))
        scores = q @ k.transpose(-2, -1)
        return self.o(self.merge(torch.softmax(scores if mask is None else scores + mask, dim=-1) @ v))


@pytest.mark.parametrize("first", ["itself", "another"])
def test_one_module_called_on_one_tensor_twice_and_on_two(first):
    """Of one shape, so that nothing but their identity tells the calls apart."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = ByIdentity()

        def forward(self, x: Tensor) -> Tensor:
            other = x * 2
            itself, another = self.attention(x, x), self.attention(x, other)
            return itself - 2 * another

    class Turned(Calls):
        def forward(self, x: Tensor) -> Tensor:
            other = x * 2
            another, itself = self.attention(x, other), self.attention(x, x)
            return itself - 2 * another

    found = assert_same_split(Calls if first == "itself" else Turned, sequences)
    assert set(found.styles.values()) == {"colwise", "rowwise"}


def test_a_way_of_calling_that_cannot_be_cut_leaves_the_module_out():
    """A mask of each head is of all heads; without it the module could be cut."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp = ByIdentity(), MLP(hidden=400)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.arange(HEADS, dtype=x.dtype).view(HEADS, 1, 1) * torch.arange(6, dtype=x.dtype)
            return self.mlp(self.attention(x, x) + self.attention(x, x, mask=mask))

    assert assert_same_split(Calls, sequences).styles == {"mlp.up": "colwise", "mlp.down": "rowwise"}


def test_a_way_of_calling_that_comes_in_training_alone_beside_dropout():
    """In evaluation it is seen called in one way, and the dropout hid that the other fails."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp = SelfOrCross(), MLP(hidden=400)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.attention(x)
            if self.training:
                hidden = hidden + self.attention(F.dropout(x, 0.3), x[:, :4])
            return self.mlp(hidden)

    assert "mlp.up" in assert_same_split(Calls, sequences).styles


def test_attention_that_is_spelled_otherwise_in_training():
    class Modes(Attention):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return super().forward(x)
            q, k, v = (layer(x).view(*x.shape[:2], HEADS, 3).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape))

    assert_cut_by_heads(lambda: Modes(SPLITS["unflatten"], MERGES["flatten"]))
