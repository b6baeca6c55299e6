"""Any kind of model is the same training in any layout, to 1e-10 in float64, or is refused before its first step."""

from pathlib import Path

import pytest
from matrix import LAYOUTS, fill
from zoo import ZOO

TABLE = Path(__file__).parents[2] / "docs" / "generality.md"

# What is refused, and a part of the reason: (kind, layout) -> text. Every other cell is verified.
REFUSED = {("LSTM language model", layout): "splits nothing of this model" for layout in LAYOUTS if "tp2" in layout}
# All cells are filled by benchmarks/generality.py; here those that differ in what they run.
TRIED = ("dp2", "fsdp2.tp2", "pp2")
DEAR = {("ResNet-18", "fsdp2.tp2")}  # sixty convolutions; "CNN with BatchNorm" has three


# torch says so whenever its encoder evaluates a batch with padding.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=pytest.mark.drill if (kind, layout) in DEAR else ())
        for kind in ZOO
        for layout in TRIED
    ],
)
def test_a_kind_of_model_is_verified_in_a_layout_or_refused_before_step_one(kind, layout):
    cell = fill(kind, layout)
    expected = REFUSED.get((kind, layout))
    if expected is None:
        assert not cell.refusal
    else:
        assert expected in cell.refusal


@pytest.mark.parametrize(
    "kind", ["CNN with BatchNorm", pytest.param("Mixtral (transformers)", marks=pytest.mark.drill)]
)
def test_three_axes_in_eight_processes_are_the_same_training(kind):
    assert fill(kind, "dp2.fsdp2.tp2").error is not None


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["encoder-decoder (nn.Transformer)", "Llama (transformers)"])
def test_a_pipeline_beside_two_axes_is_the_same_training(kind):
    assert fill(kind, "pp2.dp2.tp2").error is not None


def test_the_table_in_the_documents_has_every_cell_and_refuses_the_same():
    lines = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("|")]
    (_, *layouts), _, *rows = lines
    said = {(kind, layout): cell for kind, *cells in rows for layout, cell in zip(layouts, cells, strict=True)}
    assert list(said) == [(kind, layout) for kind in ZOO for layout in LAYOUTS]
    assert {cell for cell, text in said.items() if text.startswith("refused: ")} == set(REFUSED)
    assert all(text.startswith("verified (") for cell, text in said.items() if cell not in REFUSED)
