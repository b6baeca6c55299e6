"""Plans that somebody states: the right ones train as one process does, the wrong ones are refused before a step."""

from collections.abc import Mapping

import jobs
import pytest
import torch
import torch.nn.functional as F
from splitting import MLP, WIDTH, assert_same_split, sequences, split_run, tokens
from torch import Tensor, nn
from trainings import assert_same_training, record

from shoal.errors import LayoutError


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(heads), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Net(nn.Module):
    """Two blocks between a table and a head."""

    def __init__(self, heads: int = 4, tied: bool = False, plan: str = "") -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(2))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if plan:
            setattr(self, plan, dict(MLP_PLAN))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MLP_PLAN = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
PLAN = {
    **{f"blocks.*.attention.{name}": "colwise" for name in "qkv"},
    "blocks.*.attention.o": "rowwise",
    **MLP_PLAN,
}

RIGHT: dict[str, Mapping[str, str]] = {
    "all blocks": PLAN,
    "the MLPs alone": MLP_PLAN,
    "one block": {name.replace("*", "0"): style for name, style in PLAN.items()},
    "the tables too": {**PLAN, "embed": "vocabulary", "head": "colwise_gather"},
    "as Hugging Face spells it": {**PLAN, "embed": "embedding_rowwise", "head": "colwise_rep", "norm": "sequence"},
    "the table by its width": {"embed": "colwise_gather"},
    "gathered, then scattered": {"blocks.*.mlp.up": "colwise_gather", "blocks.*.mlp.down": "rowwise_scatter"},
    "a later rule overrides": {**PLAN, "blocks.1.mlp.up": "replicated", "blocks.1.mlp.down": "replicated"},
}


@pytest.mark.parametrize("layout", ["tp2", "dp2.tp2"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_plan_is_followed(name, layout):
    found = assert_same_split(Net, tokens(40), layout, plan=RIGHT[name])
    assert ("blocks.0.attention.q" in found.styles) == ("blocks.*.attention.q" in RIGHT[name] or name == "one block")
    assert ("blocks.1.mlp.up" in found.styles) == ("blocks.*.mlp.up" in RIGHT[name] and "overrides" not in name)


def test_a_plan_that_ties_a_table_and_a_head():
    found = assert_same_split(
        lambda: Net(tied=True), tokens(40), plan={"embed": "vocabulary", "head": "colwise_gather"}
    )
    assert found.share < 0.95


@pytest.mark.parametrize("attribute", ["tp_plan", "_tp_plan"])
def test_the_models_own_plan_is_taken_where_the_job_has_none(attribute):
    found = assert_same_split(lambda: Net(plan=attribute), tokens(40))
    assert sorted(set(found.styles.values())) == ["colwise", "rowwise"]
    assert "blocks.0.attention.q" not in found.styles


def test_the_jobs_plan_goes_before_the_models_own():
    found = assert_same_split(lambda: Net(plan="tp_plan"), tokens(40), plan={"head": "colwise_gather"})
    assert found.styles == {"head": "colwise_gather"}


def test_attention_and_mlp_in_one_module_have_units_of_their_own():
    class Flat(Attention):
        def __init__(self) -> None:
            super().__init__(4)
            self.up, self.down = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + super().forward(x)
            return x + self.down(torch.relu(self.up(x)))

    plan = {**dict.fromkeys("qkv", "colwise"), "o": "rowwise", "up": "colwise", "down": "rowwise"}
    assert assert_same_split(Flat, sequences).styles == plan
    assert assert_same_split(Flat, sequences, plan=plan).styles == plan


WRONG: dict[str, tuple[Mapping[str, str], str]] = {
    "colwise without rowwise": ({"blocks.*.mlp.up": "colwise"}, "does not compute"),
    "rowwise alone": ({"blocks.*.mlp.down": "rowwise"}, "does not compute"),
    "rowwise first": ({"blocks.*.mlp.up": "rowwise", "blocks.*.mlp.down": "colwise"}, "does not compute"),
    "half of an attention": (
        {"blocks.*.attention.q": "colwise", "blocks.*.attention.o": "rowwise"},
        "blocks.0.attention",
    ),
    "an attention without its output": ({f"blocks.*.attention.{n}": "colwise" for n in "qkv"}, "does not compute"),
    "one block of two": ({**PLAN, "blocks.1.mlp.down": "replicated"}, "blocks.1.mlp"),
    "a head that is not gathered": ({"head": "colwise"}, "colwise_gather"),
    "gate and value where there are none": (
        {"blocks.*.mlp.up": "packed_colwise", "blocks.*.mlp.down": "rowwise"},
        "does not compute",
    ),
    "a norm by columns": ({"norm": "colwise"}, "norm is a LayerNorm"),
    "a whole module": ({"blocks.*.mlp": "colwise"}, "blocks.0.mlp is a MLP"),
    "a parameter": ({"blocks.*.mlp.up.weight": "colwise"}, "blocks.*.mlp.up"),
    "an unknown style": ({"blocks.*.mlp.up": "columnwise"}, "Did you mean 'colwise'"),
    "a rule for nothing": ({"block.*.mlp.up": "colwise"}, "Did you mean 'blocks.*.mlp.up'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_refused_on_every_rank_with_its_reason(name):
    plan, reason = WRONG[name]
    with pytest.raises(LayoutError) as refusal:
        split_run(Net, tokens(40), plan=plan)
    assert reason in str(refusal.value)
    assert "exit codes [1, 1]" in refusal.value.__notes__[0]  # each said so by itself; none was killed waiting


def test_heads_that_do_not_divide_are_refused_with_the_degrees_that_fit():
    with pytest.raises(LayoutError, match="tp2"):
        split_run(lambda: Net(heads=2), tokens(40), "tp4", plan=PLAN)


def test_three_heads_on_two_ranks_follow_a_plan_unevenly():
    assert_same_split(lambda: Net(heads=3), tokens(40), plan=PLAN)


class Planned(jobs.Points):
    """A job with a plan."""

    def tensor_plan(self) -> Mapping[str, str]:
        return {"0": "colwise", "2": "rowwise"}


def test_the_plan_of_a_job_is_followed():
    (reference,) = record(Planned)
    found = record(Planned, "tp2")
    assert_same_training(found, reference)
    assert any("tensor  1 regions" in note for note in found[0].notes)


def test_a_wrong_plan_of_a_job_is_refused_before_the_first_step(tmp_path):
    class Wrong(Planned):
        def tensor_plan(self) -> Mapping[str, str]:
            return {"2": "rowwise"}

    with pytest.raises(LayoutError, match="does not compute"):
        record(Wrong, "tp2", on_step=lambda run: (tmp_path / "stepped").touch())
    assert not (tmp_path / "stepped").exists()


def test_sizes_that_are_spelled_out_cannot_be_compiled_and_are_refused():
    with pytest.raises(LayoutError, match=r"spells out sizes of the whole model.*Drop compile"):
        split_run(lambda: Attention(4), sequences, "tp2:compile=block")
