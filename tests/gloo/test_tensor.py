"""Tensor parallelism: the layers of any model cut over ranks compute what they compute whole, at every parameter."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from splitting import (
    MLP,
    WIDTH,
    assert_same_or_refused,
    assert_same_split,
    images,
    sequences,
    split_run,
    tokens,
    vectors,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import LayoutError
from shoal.world import World


class Gated(nn.Module):
    """SwiGLU; `fused`: gate and value in one matrix."""

    def __init__(self, hidden: int = 30, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.gate = nn.Linear(WIDTH, hidden * (1 + fused))
        if not fused:
            self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).chunk(2, dim=-1) if self.fused else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Table(nn.Module):
    """A table, an MLP and a head, tied if asked."""

    def __init__(self, vocabulary: int = 40, *, tied: bool = True, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH, **options)
        self.mlp = MLP()
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids).clone()  # torch asks for it where max_norm changes the table
        return self.head(hidden + self.mlp(hidden))


# -- linear layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp2", "tp3", "tp4", "dp2.tp2"])
def test_an_mlp_is_cut_by_columns_then_by_rows(layout):
    found = assert_same_split(MLP, vectors, layout)
    assert found.styles == {"up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["tp2", "tp4"])
def test_a_gate_of_30_features_is_cut_unevenly(layout, fused):
    found = assert_same_split(lambda: Gated(fused=fused), vectors, layout)
    assert set(found.styles.values()) == {"colwise", "rowwise"}


def test_a_model_whose_sizes_are_smaller_than_the_axis_stays_whole():
    found = assert_same_split(lambda: MLP(hidden=3), vectors, "tp4")
    assert "up" not in found.styles


def test_three_layers_in_a_row_are_cut_where_two_of_them_chain():
    layers = [nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3)]
    found = assert_same_split(lambda: nn.Sequential(*copy.deepcopy(layers)), vectors)
    assert {"colwise", "rowwise"} <= set(found.styles.values())


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


@pytest.mark.parametrize("names", [("up.weight", "up.bias"), ("up.bias", "down.bias"), ("down.weight",)])
def test_frozen_parameters_inside_a_region_stay_frozen(names):
    found = assert_same_split(lambda: frozen(MLP(), *names), vectors)
    assert found.styles == {"up": "colwise", "down": "rowwise"}


def test_a_layer_that_is_unfrozen_later_is_trained_from_then_on():
    class Thawing(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.up.requires_grad_(self.calls > 1 or not self.training)
            self.calls += self.training
            return super().forward(x)

    def made() -> nn.Module:
        model = Thawing()
        model.calls = 0
        return model

    assert_same_split(made, vectors)


class Twice(nn.Module):
    """One MLP under two names (ALBERT), called three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MLP()] * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.blocks[0](x)
        x = x + self.blocks[1](x)
        return self.blocks[0](x)


def test_a_block_that_several_places_share_is_cut_once():
    found = assert_same_split(Twice, vectors)
    assert found.share < 0.6


def test_linear_layers_that_are_tied_across_two_regions_stay_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = MLP(), MLP()
            self.second.up.weight = self.first.up.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    def tied(model: nn.Module, world: World) -> bool:
        return model.first.up.weight is model.second.up.weight

    assert assert_same_split(Tied, vectors, then=tied).extra


def test_outputs_of_any_structure_come_out_whole():
    class Structured(MLP):
        def forward(self, x: Tensor) -> Any:
            return {"both": [super().forward(x), None], "kept": (x * 1, 3)}

    assert_same_split(Structured, vectors)


def test_inputs_by_keyword_and_layers_called_by_keyword():
    class Keywords(MLP):
        def forward(self, *, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.down(input=torch.relu(self.up(input=x))) * scale

    found = assert_same_split(Keywords, lambda rows: {"x": vectors(rows), "scale": 2.0})
    assert found.styles == {"up": "colwise", "down": "rowwise"}


def test_activations_changed_in_place_inside_a_region():
    def made() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 24),
            nn.ReLU(inplace=True),
            nn.Linear(24, WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, 3),
        )

    assert_same_split(made, vectors)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_blocks_that_the_model_recomputes_itself(use_reentrant):
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.blocks = nn.LayerNorm(WIDTH), nn.ModuleList([MLP(), MLP()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            for block in self.blocks:
                x = x + (checkpoint(block, x, use_reentrant=use_reentrant) if torch.is_grad_enabled() else block(x))
            return x

    found = assert_same_split(Recomputing, vectors)
    assert len(found.styles) == 4


def test_a_target_without_gradient_from_the_same_tensor():
    class Target(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(x)
            first = super().forward(hidden)
            with torch.no_grad():
                target = super().forward(hidden)
            return first * target + super().forward(hidden.detach())

    assert_same_split(Target, vectors)


# -- convolutions --------------------------------------------------------------------------------------


def conv_net(*between: nn.Module, channels: int = 8) -> nn.Module:
    first, second = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 4, 1)
    return nn.Sequential(first, *between, nn.ReLU(), second)


def test_convolutions_are_cut_by_channel_with_the_norm_between_them():
    found = assert_same_split(lambda: conv_net(nn.BatchNorm2d(9), channels=9), images, "tp4")
    assert found.styles == {"0": "colwise", "1": "channels", "3": "rowwise"}


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.BatchNorm2d(8, affine=False, track_running_stats=False),
        nn.InstanceNorm2d(8),
        nn.GroupNorm(4, 8),
        nn.PReLU(8),
    ],
    ids=str,
)
def test_what_stands_between_convolutions_is_split_or_refused(norm):
    assert_same_or_refused(lambda: conv_net(copy.deepcopy(norm)), images)


def test_one_dimensional_convolutions():
    def made() -> nn.Module:
        return nn.Sequential(nn.Conv1d(6, 9, 3, padding=1), nn.GELU(), nn.Conv1d(9, 4, 3))

    found = assert_same_split(made, sequences)
    assert found.styles == {"0": "colwise", "2": "rowwise"}


def test_grouped_convolutions_alone_are_refused():
    with pytest.raises(LayoutError, match="splits nothing"):
        split_run(lambda: conv_net(nn.Conv2d(8, 8, 3, groups=8, padding=1)), images)


def test_a_convolution_whose_channels_are_flattened_into_a_linear_layer():
    def made() -> nn.Module:
        conv = nn.Conv2d(3, 8, 3, padding=1)
        return nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3))

    found = assert_same_split(made, images)
    assert found.styles == {"0": "colwise", "4": "rowwise"}


def test_convolutions_that_pad_by_themselves_and_unbatched_images():
    def made() -> nn.Module:
        circular = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        return nn.Sequential(circular, nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"))

    assert_same_split(made, images)
    assert_same_split(made, lambda rows: images(rows)[0])


def test_a_norm_of_a_shared_block_is_cut_under_each_of_its_names():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.first(x))

    assert_same_split(Shared, images)


# -- tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp2", "tp3"])
def test_a_vocabulary_of_257_that_the_head_is_tied_to(layout):
    found = assert_same_split(lambda: Table(257), tokens(257), layout)
    assert found.styles["embed"] == "vocabulary"
    assert found.styles["head"] == "colwise_gather"


@pytest.mark.parametrize("padding_idx", [0, 30, -1])
def test_the_row_of_the_padding_gets_no_gradient_wherever_it_lies(padding_idx):
    found = assert_same_split(lambda: Table(tied=False, padding_idx=padding_idx), tokens(40))
    assert found.styles["embed"] == "vocabulary"


def test_a_frozen_table_that_the_head_is_tied_to():
    assert_same_split(lambda: frozen(Table(), "embed.weight"), tokens(40))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
def test_tables_with_options_of_their_own_stay_whole(options, tied):
    found = assert_same_split(lambda: Table(tied=tied, **options), tokens(40))
    assert "embed" not in found.styles


def test_a_table_with_sparse_gradients_stays_whole():
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mlp = nn.Embedding(40, WIDTH, sparse=True), MLP()

        def forward(self, ids: Tensor) -> Tensor:
            return self.mlp(self.embed(ids))

    def sparse(model: nn.Module, world: World) -> bool:
        model(torch.tensor([[1]])).sum().backward()
        return model.embed.weight.grad.is_sparse

    (found, _) = split_run(Sparse, tokens(40), steps=0, then=sparse)
    assert found.extra
    assert found.styles == {"mlp.up": "colwise", "mlp.down": "rowwise"}


def test_a_token_outside_of_the_vocabulary_is_an_error_as_in_one_process():
    def look_up(model: nn.Module, world: World) -> str:
        try:
            model(torch.tensor([[1, 45]]))
        except IndexError:
            return "IndexError"
        return "no error"

    assert assert_same_split(Table, tokens(40), then=look_up).extra == "IndexError"
