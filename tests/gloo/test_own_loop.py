"""Face B: the pieces in a loop of the user's own; a placed model is still the user's module."""

import copy

import jobs
import pytest
import torch
import torch.nn.functional as F
from ranks import run_processes
from torch import nn
from torch.profiler import ProfilerActivity, profile
from trainings import distance

import shoal
from shoal.layout import Layout
from shoal.world import Place, World


def in_world(layout, fn):
    def rank(rank, size, rendezvous):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open(layout, place=place) as world:
            return fn(world)

    return run_processes(rank, Layout.parse(layout).num_ranks)


def build(make=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))):
    torch.manual_seed(0)
    return make().double()


def own_loop(world):
    model = shoal.place(build(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = shoal.share(jobs.points(24), world, batch_size=6, seed=3, epochs=2)
    norms = []
    for batch in data.batches():
        (inputs, targets) = batch.micro[0]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets, reduction="sum") * world.num_data / batch.num_global
        loss.backward()
        norms.append(float(shoal.clip_grad_norm_(model, 0.5)))
        optimizer.step()
    return norms, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_pieces_give_the_same_training_as_one_process():
    ((norms, state),) = in_world("lone", own_loop)
    assert len(norms) == 8
    for their_norms, their_state in in_world("dp2", own_loop):
        assert torch.allclose(torch.tensor(their_norms), torch.tensor(norms), rtol=1e-12)
        assert list(their_state) == list(build().state_dict())  # no wrapper, no prefix
        assert all(distance(their_state[name], state[name]) < 1e-10 for name in state)


def test_a_rank_may_evaluate_alone_and_look_at_gradients_alone():
    """D075: with a wrapper, the others would be waited for."""

    def alone(world):
        model = shoal.place(build(), world)
        model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
        found = None
        if world.rank == 0:
            model.eval()
            inputs = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
            model(inputs).sum().backward()
            found = inputs.grad
        world.barrier()
        return found is not None

    assert in_world("dp2", alone) == [True, False]


def test_two_forwards_before_one_backward_are_reduced_once():
    """D101: the siamese pattern, with a buffer that the forward multiplies by."""

    class Twin(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):
            return self.linear(x) * self.scale

    def siamese(world):
        model = shoal.place(build(Twin), world)
        inputs = jobs.points(8).tensors[0].tensor_split(world.size)[world.rank]
        ((model(inputs) - model(inputs.flip(1))).square().sum() * world.num_data).backward()
        return [p.grad.clone() for p in model.parameters()]

    (reference,) = in_world("lone", siamese)
    for grads in in_world("dp2", siamese):
        for grad, expected in zip(grads, reference, strict=True):
            assert torch.allclose(grad, expected, rtol=1e-12, atol=1e-12)


def test_a_deep_copy_of_a_placed_model_is_a_plain_module():
    """D062: an average of the weights is kept by copying the model; it must neither reduce nor be reduced."""

    def averaged(world):
        model = shoal.place(build(lambda: nn.Linear(4, 3)), world)
        average = copy.deepcopy(model)
        average(torch.ones(2, 4, dtype=torch.float64) * world.rank).sum().backward()
        return float(average.weight.grad[0, 0])

    assert in_world("dp2", averaged) == [0.0, 2.0]


def test_complex_parameters_are_reduced_and_clipped():
    """D104."""

    class Phase(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))

        def forward(self, x):
            return (x.to(torch.complex128) @ self.weight).abs()

    def step(world):
        torch.manual_seed(0)
        model = shoal.place(Phase(), world)
        inputs = jobs.points(8).tensors[0].tensor_split(world.size)[world.rank]
        (model(inputs).square().sum() * world.num_data).backward()
        norm = shoal.clip_grad_norm_(model, 0.1)
        return norm, model.weight.grad.clone()

    ((norm, grad),) = in_world("lone", step)
    for their_norm, their_grad in in_world("dp2", step):
        assert torch.allclose(their_norm, norm, rtol=1e-12)
        assert torch.allclose(their_grad, grad, rtol=1e-12)


def test_a_module_called_three_times_is_one_parameter():
    """D178."""

    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(3):
                x = torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)
            return x

    def step(world):
        model = shoal.place(build(Thrice), world)
        inputs = jobs.points(8).tensors[0].tensor_split(world.size)[world.rank]
        (model(inputs).square().sum() * world.num_data).backward()
        return model.linear.weight.grad.clone()

    (reference,) = in_world("lone", step)
    for grad in in_world("dp2", step):
        assert torch.allclose(grad, reference, rtol=1e-12)


@pytest.mark.parametrize("layout", ["dp2", "dp2:micro=2", "dp2:micro=4"])
def test_gradients_are_reduced_once_per_optimizer_step_however_many_micro_batches(layout):
    """D009, D174: counted. One bucket of gradients, which parameters were used, and the sums of the loss."""

    def count(world):
        run = shoal.assemble(jobs.Points(batch_size=8, steps=3), world, quiet=True)
        steps = run.steps()
        next(steps)()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            next(steps)()
        run.close()
        return sum(event.count for event in seen.key_averages() if event.key == "c10d::allreduce_")

    assert in_world(layout, count) == [3, 3]
