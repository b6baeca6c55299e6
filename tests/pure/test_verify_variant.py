"""The job as verification runs it is the user's job but for what was asked."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from shoal.job import Job, Params, Sum, identity, mean_loss
from shoal.verbs.verify.variant import nudged, variant


@dataclass(frozen=True, kw_only=True)
class Small(Job):
    batch_size: int = 2
    steps: int = 3
    width: int = 4

    def model(self):
        return nn.Linear(self.width, 1)

    def data(self):
        return [(torch.ones(self.width), torch.ones(1))] * 4

    def loss(self, output, batch):
        return mean_loss((output - batch[1]).square())

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.1)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def evaluation(self):
        return self.data()


def test_only_what_was_asked_is_changed():
    job = Small(width=6)
    found = variant(job, precision="fp64", sgd=True)
    assert isinstance(found, Small)
    assert identity(found) == {**identity(job), "precision": "fp64"}
    assert found.model().weight.shape == (1, 6)
    assert isinstance(found.loss(torch.ones(2, 1), (None, torch.ones(2, 1))), Sum)
    assert isinstance(found.optimizer(Params({"w": nn.Parameter(torch.ones(1))})), torch.optim.SGD)
    assert found.scheduler(None) is None
    assert found.evaluation() is None
    assert job.precision == "fp32"
    assert isinstance(job.optimizer([nn.Parameter(torch.ones(1))]), torch.optim.AdamW)


def test_without_sgd_the_optimizer_stays_the_jobs():
    found = variant(Small(), precision="fp64")
    assert isinstance(found.optimizer([nn.Parameter(torch.ones(1))]), torch.optim.AdamW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nudge_moves_every_weight_to_its_neighbour(dtype):
    model = nn.Linear(50, 3).to(dtype)
    before = model.weight.detach().clone()
    nudged(model, 0, dtype)
    up, down = (torch.nextafter(before, torch.full_like(before, limit)) for limit in (torch.inf, -torch.inf))
    after = model.weight.detach()
    assert bool(((after == up) | (after == down)).float().mean() > 0.97)  # at a power of two the ulp below is half
    assert bool((after != before).all())
    assert bool((after == up).any() and (after == down).any())


def test_two_nudges_differ_and_zeros_stay():
    models = [nudged(nn.Linear(20, 2), seed, torch.float32) for seed in (0, 0, 1)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        nn.init.constant_(model.weight, 0.3)
        nn.init.zeros_(model.bias)
        nudged(model, seed, torch.float32)
        assert not model.bias.any()
    assert torch.equal(models[0].weight, models[1].weight)
    assert not torch.equal(models[0].weight, models[2].weight)


def test_a_nudge_of_half_precision_is_as_wide_as_its_ulp():
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 1.5)
    nudged(model, 0, torch.bfloat16)
    assert torch.equal((model.weight - 1.5).abs(), torch.full_like(model.weight, torch.finfo(torch.bfloat16).eps))


def test_a_job_that_starts_elsewhere_by_one_ulp_is_told_so():
    torch.manual_seed(0)
    straight = Small().model()
    torch.manual_seed(0)
    moved = variant(Small(), precision="fp32", nudge=0).model()
    assert 0 < float((moved.weight - straight.weight).detach().abs().max()) < 1e-6
