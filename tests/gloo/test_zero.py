"""ZeRO-1: the state of the optimizer lies with one owner per parameter, and the training is that of one process."""

import functools

import jobs
import pytest
import torch
from test_own_loop import in_world
from torch import nn
from trainings import assert_same_training, record

from shoal.errors import JobError
from shoal.parallel.zero import OwnedStates
from shoal.world import World

owned: dict[int, OwnedStates] = {}


def spread(run):
    """Before the first step of a run."""
    if run.step == 0:
        owned[0] = OwnedStates(run.optimizer, run.world)


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


@functools.cache
def optimized(kind, name):
    """A job with that optimizer, and what one process sees of it."""

    class Job(kind):
        def optimizer(self, params):
            return OPTIMIZERS[name](params)

    (reference,) = record(Job)
    return Job, reference


@pytest.mark.parametrize("layout", ["dp2", "dp3:micro=2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", [jobs.Tokens, jobs.Branching], ids=lambda kind: kind.__name__)
def test_it_is_the_same_training_as_lone(kind, name, layout):
    job, reference = optimized(kind, name)
    assert_same_training(record(job, layout, on_step=spread), reference)


def test_clipping_schedules_and_sparse_rows():
    for kind in (jobs.Adamant, jobs.SparseRows):
        (reference,) = record(kind)
        assert_same_training(record(kind, "dp3", on_step=spread), reference)


class Wide(nn.Module):
    """Sizes that a fair deal puts on three ranks as 48, 44 and 44 bytes."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(n) for n in (5, 12, 4, 6, 1, 4))
        self.parts.append(torch.tensor(1j))


def step_once(world, make=torch.optim.AdamW):
    model = Wide()
    optimizer = make(model.parameters(), lr=0.1)
    states = OwnedStates(optimizer, world)
    for param in model.parts:
        param.grad = torch.ones_like(param)
    optimizer.step()
    held = [name for name, param in model.named_parameters() if param in optimizer.state]
    return held, [states.owner(p) for p in model.parameters()], [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad])
def test_each_state_lies_on_its_owner_alone_and_the_deal_is_fair(make):
    found = in_world("dp3", lambda world: step_once(world, make))
    owners = found[0][1]
    assert owners == [2, 0, 2, 1, 1, 1, 2]
    for rank, (held, same, params) in enumerate(found):
        assert same == owners
        assert held == [f"parts.{place}" for place, owner in enumerate(owners) if owner == rank]
        assert all(map(torch.equal, params, found[0][2]))


def test_large_parameters_go_in_several_rounds(monkeypatch):
    monkeypatch.setattr("shoal.parallel.zero._BYTES_IN_FLIGHT", 3 * 20)
    ((_, _, expected),) = in_world("lone", step_once)
    for _, _, params in in_world("dp3", step_once):
        assert all(map(torch.equal, params, expected))


def test_gradients_are_there_again_after_the_step_and_a_parameter_may_join_later():
    def train(world):
        first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([first], lr=0.1, momentum=0.9)
        states = OwnedStates(optimizer, world)
        optimizer.add_param_group({"params": [second]})
        first.grad, second.grad = torch.ones(3), torch.ones(4)
        optimizer.step()
        return first.grad.sum(), second.grad.sum(), second.detach(), states.owner(second)

    for one, other, stepped, owner in in_world("dp2", train):
        assert (one, other, owner) == (3, 4, 1)
        assert torch.equal(stepped, torch.full((4,), 0.9))


class Foreign(torch.optim.SGD):
    pass


@pytest.mark.parametrize("make", [Foreign, torch.optim.LBFGS])
def test_an_optimizer_that_may_look_at_parameters_together_is_refused(make):
    with World.open("dp2", kind="fake") as world, pytest.raises(JobError, match=f"{make.__name__} may look at several"):
        OwnedStates(make([nn.Parameter(torch.ones(2))], lr=0.1), world)


def test_a_closure_is_refused():
    with World.open("dp2", kind="fake") as world:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        OwnedStates(optimizer, world)
        with pytest.raises(JobError, match=r"optimizer.step\(closure\)"):
            optimizer.step(lambda: 0.0)
