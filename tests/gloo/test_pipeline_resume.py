"""A checkpoint knows nothing of stages: what a pipeline saved any layout goes on with, and the other way round."""

import shutil

import pytest
import torch
from ranks import run_processes
from trainings import Record, assert_same_training, record, rest_of_run, walk
from zoo import TiedGPT

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


@pytest.mark.parametrize("after", LAYOUTS)
def test_any_layout_goes_on_with_what_any_other_has_saved(after, saved, whole):
    def rank(rank: int, size: int, rendezvous: str) -> list[Record]:
        found = []
        for number, before in enumerate(LAYOUTS):
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
