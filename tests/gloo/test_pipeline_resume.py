"""A checkpoint knows nothing of stages: what a pipeline saved any layout goes on with, and the other way round."""

import os
import shutil
from dataclasses import dataclass

import pytest
import torch
from ranks import run_processes
from torch import nn
from trainings import Record, assert_same_training, record, rest_of_run, walk
from zoo import VOCABULARY, Text, TiedGPT

from shoal.checkpoint.export import export
from shoal.layout import Layout
from shoal.run import assemble
from shoal.world import Place, World

LAYOUTS = ["lone", "fsdp2", "dp2.tp2", "pp2:micro=2", "pp2.fsdp2:micro=4,schedule=zbv", "pp2.dp2:micro=4,virtual=2"]
STEP = 2


def job():
    return TiedGPT(width=16, heads=2, depth=4, steps=4)


@pytest.fixture(scope="module")
def whole():
    return record(job)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, whole):
    """A run of each layout, of which the checkpoint after two steps is left."""
    folders = {}
    for layout in LAYOUTS:
        folders[layout] = folder = tmp_path_factory.mktemp("run")
        assert_same_training(record(job, layout, folder=folder, save_every=STEP), whole)
        shutil.rmtree(folder / "checkpoints" / "step_000004")
    return folders


DRILL = "SHOAL_DRILL" in os.environ  # every pair: make proof
AFTER = LAYOUTS if DRILL else ["lone", "fsdp2", "pp2.fsdp2:micro=4,schedule=zbv"]


@pytest.mark.parametrize("after", AFTER)
def test_any_layout_goes_on_with_what_any_other_has_saved(after, saved, whole):
    befores = LAYOUTS if DRILL or "pp" not in after else ["fsdp2"]  # a reader knows nothing of who wrote

    def rank(rank: int, size: int, rendezvous: str) -> list[Record]:
        found = []
        for number, before in enumerate(befores):
            place = Place(
                rank=rank,
                size=size,
                local_rank=rank,
                local_size=size,
                rendezvous=f"{rendezvous}_{number}",
                source="shoal",
            )
            with World.open(after, place=place) as world:
                found.append(walk(assemble(job(), world, quiet=True, resume=saved[before])))
        return found

    for found in run_processes(rank, Layout.parse(after).num_ranks, time_limit_s=100):
        for seen in found:
            assert_same_training([seen], rest_of_run(STEP, whole))


def test_the_weights_of_a_pipeline_load_in_plain_pytorch(saved, whole, tmp_path):
    export(saved["pp2:micro=2"], tmp_path / "model.pt")
    model = job().model().double()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert model.head.weight is model.token.weight


def test_a_pipeline_starts_from_plain_weights(tmp_path):
    torch.manual_seed(5)
    torch.save(job().model().double().state_dict(), tmp_path / "model.pt")
    (reference,) = record(job, weights=tmp_path / "model.pt")
    assert_same_training(record(job, "pp2:micro=2", weights=tmp_path / "model.pt"), reference)


class Scaled(nn.Module):
    """Between its stages are parameters without dimensions: Adam's count of steps has the shape that they have."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.ups = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(4))
        self.scales = nn.ParameterList(torch.tensor(0.5 + number) for number in range(4))

    def forward(self, tokens):
        x = self.token(tokens)
        for up, down, scale in zip(self.ups, self.downs, self.scales, strict=True):
            x = x + scale * down(torch.relu(up(x)))
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Scalars(Text):
    steps: int = 4

    def model(self):
        return Scaled()

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=0.01)


@pytest.mark.parametrize(
    ("before", "after"),
    [("pp2:micro=2", "lone"), ("lone", "pp4:micro=4"), ("pp2.tp2:micro=2", "pp2.tp2:micro=2,schedule=gpipe")],
)
def test_parameters_without_dimensions_and_their_state_go_on(before, after, tmp_path):
    (whole,) = record(Scalars)
    assert_same_training(record(Scalars, before, folder=tmp_path / "run", save_every=STEP), whole)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004")
    found = record(Scalars, after, folder=tmp_path / "next", resume=str(tmp_path / "run"))
    assert_same_training(found, rest_of_run(STEP, whole))
