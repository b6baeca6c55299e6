"""A whole run is assembled and steps in a world of thousands, in this one process: the same set-up as a real one."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from shoal.job import Job, mean_loss
from shoal.run import assemble
from shoal.world import Place, World


@dataclass(frozen=True, kw_only=True)
class Points(Job):
    batch_size: int = 6_144
    steps: int = 3

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def data(self):
        return TensorDataset(torch.ones(20_000, 4), torch.zeros(20_000, dtype=torch.int64))

    def loss(self, output, batch):
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-3)


@pytest.mark.parametrize("rank", [0, 1_000, 3_071])
def test_a_rank_of_3072_takes_its_two_samples_and_steps(rank):
    place = Place(rank=rank, size=3_072, local_rank=rank % 8, local_size=8, num_nodes=384, source="flags")
    with World.open("dp3072", kind="fake", place=place) as world:
        run = assemble(Points(), world, quiet=True)
        results = [step() for step in run.steps()]
        run.close()
    assert [result.step for result in results] == [1, 2, 3]
    assert run.ledger.num_data == 3_072
    assert "2 per micro-batch x 1 accumulated x 3072 data ranks = 6144 samples per step" in str(run.ledger)
    assert all(param.grad is not None for param in run.model.parameters())
