"""The repeated blocks of models as people write them, and how parameters are grouped by them."""

import pytest
import torch
from torch import nn

from shoal.errors import JobError
from shoal.models.gpt import Decoder
from shoal.parallel.blocks import find_blocks
from shoal.parallel.grouping import Grouping


class Residual(nn.Module):
    """Of two widths it has other parameters, but it is the same kind of thing."""

    def __init__(self, width: int, out: int | None = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(width, out or width)

    def forward(self, x):
        return self.out(self.inner(x))


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(width) for _ in range(depth))


def decoder(**options):
    return Decoder(**{"width": 8, "depth": 3, "heads": 2, "context": 4, "tied": True, "dropout": 0.0, **options})


def test_a_decoder_has_one_list():
    assert find_blocks(decoder()) == ["blocks.0", "blocks.1", "blocks.2"]


def test_an_encoder_decoder_has_two():
    model = nn.Transformer(8, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=8, batch_first=True)
    assert find_blocks(model) == [
        *("encoder.layers.0", "encoder.layers.1"),
        *("decoder.layers.0", "decoder.layers.1", "decoder.layers.2"),
    ]


def test_a_list_by_itself():
    assert find_blocks(nn.Sequential(*(Residual(4) for _ in range(2)))) == ["0", "1"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 3)),
        nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 3))),
        nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), nn.ModuleList([nn.Linear(1, 1)])]),
        decoder(depth=1),
    ],
    ids=[
        "a layer",
        "layers of other widths",
        "plain lists of other things",
        "lists that cannot be called",
        "one block",
    ],
)
def test_what_is_not_repeated_is_no_block(model):
    assert find_blocks(model) == []


def test_equal_layers_are_blocks():
    assert find_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3))) == ["0", "2"]


def test_blocks_of_one_class_and_other_widths():
    """As in a ResNet, whose stages begin with a block that widens; or T5, whose first block has one table more."""
    assert find_blocks(nn.Sequential(Residual(4, 8), Residual(8), Residual(8, 2))) == ["0", "1", "2"]


def test_the_outermost_repetition_counts():
    assert find_blocks(nn.ModuleList(nn.Sequential(Residual(4), Residual(4)) for _ in range(2))) == ["0", "1"]


def test_in_a_pyramid_the_blocks_of_the_stages_count():
    """Stages differ in width; as blocks they would be far too large."""
    pyramid = nn.ModuleDict({"stages": nn.ModuleList([Stage(2, 2), Stage(4, 3)])})
    assert find_blocks(pyramid) == [
        *("stages.0.layers.0", "stages.0.layers.1"),
        *("stages.1.layers.0", "stages.1.layers.1", "stages.1.layers.2"),
    ]


def test_a_block_that_is_shared_counts_once():
    shared = Residual(4)
    assert find_blocks(nn.ModuleList([shared, shared, shared])) == []
    both = nn.ModuleDict({"a": nn.ModuleList([shared, Residual(4)]), "b": nn.ModuleList([shared, Residual(4)])})
    assert find_blocks(both) == ["a.0", "a.1", "b.1"]


class Telling(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.first, self.second = names, Residual(4), nn.ModuleList([Residual(2), Residual(2)])

    def blocks(self):
        return self.names


def test_a_model_says_what_its_blocks_are():
    assert find_blocks(Telling("first", "second.1")) == ["first", "second.1"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("frist",), r"Telling.blocks\(\) names 'frist', no module in it. Did you mean 'first'"),
        (("",), "names '', no module in it"),
        (("second", "second.0"), "names 'second.0', which is inside 'second'"),
    ],
)
def test_what_it_says_is_checked(names, message):
    with pytest.raises(JobError, match=message):
        find_blocks(Telling(*names))


# -- groups of parameters ------------------------------------------------------------------------------------


def names_of(model, params):
    return {name for name, param in model.named_parameters() if param in params}


def test_tied_tables_outside_of_the_blocks_touch_no_block():
    found = Grouping.of(decoder())
    assert list(found.blocks) == ["blocks.0", "blocks.1", "blocks.2"]
    assert (found.with_root, found.whole) == (frozenset(), {})


def test_what_a_block_shares_with_the_root_goes_with_the_root():
    model = nn.ModuleDict({"table": nn.Linear(4, 4), "layers": nn.ModuleList([Residual(4), Residual(4)])})
    model["layers"][1].out.weight = model["table"].weight
    found = Grouping.of(model)
    assert list(found.blocks) == ["layers.0", "layers.1"]
    assert names_of(model, found.with_root) == {"table.weight"}


def test_blocks_that_share_go_with_the_root_together():
    model = nn.Sequential(*(Residual(4) for _ in range(4)))
    model[1].out.weight = model[3].out.weight
    assert list(Grouping.of(model).blocks) == ["0", "2"]


def test_what_has_no_rows_or_another_dtype_stays_whole():
    model = nn.ModuleDict({"table": nn.Linear(4, 4), "layers": nn.ModuleList([Residual(4), Residual(4)])})
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.none = nn.Parameter(torch.empty(0, 3))
    model.turn = nn.Parameter(torch.zeros(64, dtype=torch.complex64))
    model["layers"][0].inner[0].bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    model["layers"][1].to(torch.float64)
    assert list(Grouping.of(model).whole) == ["scale", "none", "turn", "layers.0.inner.0.bias"]


def test_frozen_parameters_of_another_dtype_are_cut():
    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False), nn.Linear(4, 4))
    assert Grouping.of(model).whole == {}
