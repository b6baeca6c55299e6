"""A tensor plan: globs and styles in, layers and their styles out; what is wrong in it is found by its words alone."""

from collections.abc import Mapping

import pytest
from torch import nn

from shoal.errors import LayoutError
from shoal.parallel.tensor import plan
from shoal.parallel.tensor.plan import given_plan


def resolve(model: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Layers and their styles, as words."""
    return {name: str(style) for name, style in plan.resolve(model, rules).items()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(11))
        self.conv, self.bn = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 10)


def test_a_star_stands_for_one_part_of_a_name() -> None:
    found = resolve(Net(), {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    assert len(found) == 22
    assert found["blocks.10.up"] == "colwise"
    assert found["blocks.3.down"] == "rowwise"


def test_a_star_never_reaches_over_a_dot() -> None:
    with pytest.raises(LayoutError, match="matches nothing"):
        resolve(Net(), {"*.up": "colwise"})
    assert resolve(Net(), {"*.1.up": "colwise"}) == {"blocks.1.up": "colwise"}
    assert set(resolve(Net(), {"blocks.1.*p": "colwise"})) == {"blocks.1.up"}


def test_a_dot_in_a_rule_is_a_dot() -> None:
    with pytest.raises(LayoutError, match="matches nothing"):
        resolve(Net(), {"blocks.1xup": "colwise"})


def test_a_later_rule_overrides_an_earlier_one() -> None:
    found = resolve(Net(), {"blocks.*.up": "colwise", "blocks.0.up": "replicated", "blocks.1.up": "colwise_gather"})
    assert "blocks.0.up" not in found
    assert found["blocks.1.up"] == "colwise_gather"
    assert found["blocks.2.up"] == "colwise"


@pytest.mark.parametrize(
    ("name", "told", "style"),
    [
        ("head", "colwise_rep", "colwise_gather"),
        ("head", "colwise_gather_output", "colwise_gather"),
        ("head", "rowwise_rep", "rowwise_scatter"),
        ("head", "rowwise_split_input", "rowwise_scatter"),
        ("embed", "embedding_rowwise", "vocabulary"),
        ("embed", "embedding_colwise", "colwise_gather"),
        ("blocks.0.up", "packed_colwise", "packed_colwise"),
        ("blocks.0.down", "packed_rowwise", "packed_rowwise"),
    ],
)
def test_hugging_faces_spellings_are_understood(name: str, told: str, style: str) -> None:
    assert resolve(Net(), {name: told}) == {name: style}


@pytest.mark.parametrize("told", ["replicate", "replicated", "replicated_with_grad_allreduce", "sequence"])
def test_what_stays_whole_may_be_any_layer(told: str) -> None:
    assert resolve(Net(), {"blocks.*.norm": told}) == {}


@pytest.mark.parametrize(
    ("told", "nearest"),
    [("columnwise", "colwise"), ("row_wise", "rowwise"), ("vocab", "vocabulary"), ("Colwise", "colwise")],
)
def test_an_unknown_style_is_refused_with_the_nearest(told: str, nearest: str) -> None:
    with pytest.raises(LayoutError, match=f"'{told}'.*Did you mean '{nearest}'"):
        resolve(Net(), {"head": told})


def test_a_style_that_resembles_none_is_refused_with_all_there_are() -> None:
    with pytest.raises(LayoutError, match=r"Known: .*colwise.*vocabulary"):
        resolve(Net(), {"head": ""})


@pytest.mark.parametrize(
    ("glob", "nearest"),
    [("block.*.up", r"blocks\.\*\.up"), ("blocks.*.upp", r"blocks\.\*\.up"), ("haed", "head")],
)
def test_a_rule_that_matches_nothing_is_refused_with_the_nearest(glob: str, nearest: str) -> None:
    with pytest.raises(LayoutError, match=f"matches nothing in the model.*Did you mean '{nearest}'"):
        resolve(Net(), {"embed": "vocabulary", glob: "colwise"})


def test_a_rule_for_a_parameter_of_a_layer_is_refused_with_the_layer() -> None:
    """It would split nothing, in silence; only parameters of experts have styles of their own."""
    with pytest.raises(LayoutError, match=r"blocks\.\*\.up"):
        resolve(Net(), {"blocks.*.up.weight": "colwise"})


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("blocks.0.norm", "colwise"),
        ("blocks.0", "colwise"),
        ("embed", "colwise"),
        ("embed", "rowwise"),
        ("head", "vocabulary"),
        ("head", "heads"),
        ("head", "channels"),
        ("bn", "rowwise"),
        ("conv", "colwise_gather"),
        ("attention", "colwise"),
    ],
)
def test_a_style_that_does_not_fit_the_layer_is_refused_with_both(name: str, style: str) -> None:
    with pytest.raises(LayoutError, match=f"{name} is a .*'{style}'"):
        resolve(Net(), {name: style})


@pytest.mark.parametrize(
    ("name", "style"),
    [("conv", "colwise"), ("conv", "rowwise"), ("bn", "channels"), ("attention", "heads"), ("embed", "vocabulary")],
)
def test_a_style_that_fits_the_layer_is_taken(name: str, style: str) -> None:
    assert resolve(Net(), {name: style}) == {name: style}


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 8, 1, groups=2),
        nn.ConvTranspose2d(4, 8, 1),
        nn.Bilinear(4, 4, 8),
        nn.Embedding(10, 4, max_norm=1.0),
        nn.Embedding(10, 4, sparse=True),
        nn.MultiheadAttention(4, 2, add_zero_attn=True),
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)),
    ],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("style", ["colwise", "rowwise", "vocabulary", "heads"])
def test_layers_that_are_not_understood_take_no_style(module: nn.Module, style: str) -> None:
    with pytest.raises(LayoutError, match="cannot be split"):
        resolve(nn.ModuleDict({"layer": module}), {"layer": style})


def test_a_linear_layer_with_a_forward_of_its_own_takes_no_style() -> None:
    class Adapted(nn.Linear):
        def forward(self, input):  # type: ignore[no-untyped-def]
            return super().forward(input) * 2

    with pytest.raises(LayoutError, match="cannot be split"):
        resolve(nn.ModuleDict({"layer": Adapted(4, 8)}), {"layer": "colwise"})


# -- whose plan it is ----------------------------------------------------------------------------------


class Own(Net):
    tp_plan = {"head": "colwise_gather"}  # noqa: RUF012 (as models write it)


class HuggingFaces(Net):
    _tp_plan = {"head": "colwise_rep"}  # noqa: RUF012 (as models write it)


class Both(HuggingFaces):
    tp_plan = {"embed": "vocabulary"}  # noqa: RUF012 (as models write it)


@pytest.mark.parametrize(
    ("model", "stated", "expected"),
    [
        (Net, None, {}),
        (Net, {}, {}),
        (Net, {"head": "colwise"}, {"head": "colwise"}),
        (Own, None, {"head": "colwise_gather"}),
        (HuggingFaces, {}, {"head": "colwise_rep"}),
        (Both, None, {"embed": "vocabulary"}),
        (Own, {"embed": "vocabulary"}, {"embed": "vocabulary"}),
    ],
)
def test_the_jobs_plan_goes_before_the_models_and_that_before_hugging_faces(
    model: type[nn.Module], stated: Mapping[str, str] | None, expected: dict[str, str]
) -> None:
    assert given_plan(model(), stated) == expected


def test_a_model_without_a_plan_may_have_an_attribute_of_that_name() -> None:
    model = Net()
    model._tp_plan = None  # type: ignore[assignment]  # as Hugging Face's models do
    assert given_plan(model, None) == {}
