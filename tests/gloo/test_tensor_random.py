"""Law 7: ranks that hold the same activation draw the same numbers, ranks that hold different slices different ones.

Replicated parameters that are bit-equal after three steps show the first half: `split_run` checks them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_processes
from splitting import MLP, WIDTH, Found, assert_same_split, sequences, split_run, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.layout import Layout
from shoal.run import assemble
from shoal.world import Place, World


class Dropping(MLP):
    """Dropout on the hidden features (cut) and on the output (whole), in one module, as in most vision models."""

    def __init__(self, inner: float = 0.5, outer: float = 0.5) -> None:
        super().__init__()
        self.inner, self.outer = nn.Dropout(inner), nn.Dropout(outer)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.down(self.inner(torch.relu(self.up(x)))))


class Functional(MLP):
    """The same without modules."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.relu(self.up(F.dropout(x, 0.3, self.training))), 0.5, self.training)
        return F.dropout(self.down(hidden), 0.5, self.training)


class Beside(MLP):
    """What is dropped between the two layers is whole: the residual."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        residual = F.dropout(x, 0.5, self.training)
        return residual + self.down(F.dropout(hidden, 0.5, self.training))


class AttentionDropout(nn.Module):
    """Dropout on the weights of the attention (cut by heads), and behind its output (whole)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4 if self.training else 0.0)
        return F.dropout(self.o(mixed.transpose(1, 2).flatten(2)), 0.4, self.training)


def torchs_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.3, batch_first=True)


def torchs_attention() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    return Own()


def assert_equal_over_ranks(found: list[Found]) -> None:
    for seen in found[1:]:
        for ours, theirs in zip(seen.walk.outputs, found[0].walk.outputs, strict=True):
            assert all(map(torch.equal, ours, theirs))
        assert all(torch.equal(t, found[0].walk.state[name]) for name, t in seen.walk.state.items())


def with_head(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(make(), nn.LayerNorm(WIDTH), MLP())


DROPPING: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "modules": (Dropping, vectors),
    "functions": (Functional, vectors),
    "a whole activation inside": (Beside, vectors),
    "attention": (AttentionDropout, sequences),
    "torch's layer": (torchs_layer, sequences),
    "torch's attention": (torchs_attention, sequences),
}


@pytest.mark.parametrize("layout", ["tp2", "tp4"])
@pytest.mark.parametrize("kind", DROPPING)
def test_ranks_that_hold_the_same_activation_drop_the_same_of_it(kind, layout):
    make, inputs = DROPPING[kind]
    found = split_run(with_head(make), inputs, layout)
    # Between the layers each rank draws its own, so that what is whole must not be dropped there: left whole.
    is_cut = any(name.startswith("0") for name in found[0].styles)
    assert is_cut == (kind != "a whole activation inside")
    assert_equal_over_ranks(found)


@pytest.mark.parametrize("kind", DROPPING)
def test_a_run_with_dropout_repeats_itself_bit_by_bit(kind):
    make, inputs = DROPPING[kind]
    first, second = (split_run(with_head(make), inputs)[0].walk for _ in range(2))
    assert all(torch.equal(tensor, second.state[name]) for name, tensor in first.state.items())


def test_dropout_outside_of_regions_draws_what_one_process_draws():
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.drop, self.head = MLP(), nn.Dropout(0.3), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(self.mlp(self.drop(x))))

    assert_same_split(Outside, vectors)


def test_ranks_drop_different_features_of_what_they_hold_in_slices():
    def mask(model: nn.Module, world: World) -> Tensor:
        masks = []
        model.inner.register_forward_hook(lambda module, args, output: masks.append(output != 0))
        model.train()
        torch.manual_seed(3)
        with torch.no_grad():
            model.up.weight.zero_()
            model.up.bias.fill_(1.0)
            model(torch.ones(64, WIDTH, dtype=torch.float64))
        return masks[0]

    first, second = (seen.extra for seen in split_run(Dropping, vectors, then=mask))
    assert not torch.equal(first, second)
    kept = torch.cat([first, second], dim=1).double()
    assert 0.4 < float(kept.mean()) < 0.6
    # Independent: masks of two features agree about half of the time, over ranks as within one.
    agree = (first[:, None] == second[:, :, None]).double().mean()
    assert 0.45 < float(agree) < 0.55


@pytest.mark.parametrize("inner_dropout", [0.0, 0.2])
def test_a_block_that_is_left_out_at_random_is_left_out_on_all_ranks(inner_dropout):
    """Stochastic depth: one draw decides whether the collectives of a region come at all."""

    class Skipping(MLP):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and torch.rand(()) < 0.5:
                return x
            hidden = F.dropout(torch.relu(self.up(x)), inner_dropout, self.training)
            return x + self.down(hidden)

    found = split_run(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Skipping() for _ in range(4))), vectors)
    assert_equal_over_ranks(found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_the_model_recomputes_draws_again_what_it_drew(use_reentrant):
    class Recomputing(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            self.norm, self.block, self.recompute = nn.LayerNorm(WIDTH), Dropping(), recompute

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            if self.recompute and torch.is_grad_enabled():
                return checkpoint(self.block, x, use_reentrant=use_reentrant)
            return self.block(x)

    kept, again = (split_run(lambda r=r: Recomputing(r), vectors)[0].walk for r in (False, True))
    for ours, theirs in zip(again.grads, kept.grads, strict=True):
        assert all(torch.equal(grad, theirs[name]) for name, grad in ours.items())


def test_data_ranks_draw_different_streams_and_the_ranks_of_one_model_the_same():
    import jobs

    class Outer(jobs.Points):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3))

    def rank(rank: int, size: int, rendezvous: str) -> list[bool]:
        where = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("dp2.tp2", place=where) as world:
            run = assemble(Outer(batch_size=8, steps=1), world, quiet=True)
            masks = []
            run.model[3].register_forward_hook(lambda module, args, output: masks.append((output == 0)[0].tolist()))
            for step in run.steps():
                step()
            return masks[0]

    masks = run_processes(rank, Layout.parse("dp2.tp2").num_ranks)
    assert masks[0] == masks[1]
    assert masks[2] == masks[3]
    assert masks[0] != masks[2]
