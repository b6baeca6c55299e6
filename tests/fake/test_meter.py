"""The meter counts what a rank computes, holds and sends; small cases, by hand."""

import pytest
import torch
import torch.distributed as dist

from shoal.dry import dry_run, has_numbers
from shoal.metrics.meter import metering
from shoal.world import Place, World

FLOAT, KILO = 4, 1000


def at(rank, layout_size):
    return Place(rank=rank, size=layout_size, local_size=layout_size, local_rank=rank, source="flags")


@pytest.fixture
def world():
    with World.open("pp2.dp2.tp2", kind="fake", place=at(5, 8)) as opened:
        yield opened


def metered(world, known=None, gradients=lambda: ()):
    return metering(world, known or {}, gradients)


@pytest.mark.parametrize("dry", [False, True])
def test_memory_is_counted_from_when_it_is_made_to_when_it_is_let_go(world, dry):
    with dry_run() if dry else torch.no_grad():
        weight = torch.ones(KILO)
        with metered(world, {"parameters": [weight]}) as found:
            double = weight * 2
            view = double[10:20]  # no memory of its own
            triple = weight * 3
            del double, triple
            assert found.live_bytes == {"parameters": FLOAT * KILO, "activations": FLOAT * KILO}
            del view
            assert found.live_bytes["activations"] == 0
            last = weight + 1
    assert has_numbers(last) is not dry
    assert found.peak_bytes["parameters"] == FLOAT * KILO
    assert found.peak_bytes["activations"] == 2 * FLOAT * KILO
    assert found.peak_total_bytes == 3 * FLOAT * KILO


def test_gradients_are_told_from_activations_at_the_peak(world):
    weight = torch.ones(KILO, requires_grad=True)
    with metered(world, {"parameters": [weight]}, lambda: [weight.grad] if weight.grad is not None else []) as found:
        (weight * 2).sum().backward()
        scratch = torch.ones(10 * KILO)
    assert scratch.numel() == 10 * KILO
    assert found.peak_bytes["gradients"] == FLOAT * KILO
    assert found.peak_bytes["activations"] == 10 * FLOAT * KILO


def test_a_product_and_its_backward_are_three_products(world):
    x, w = torch.ones(8, 16, requires_grad=True), torch.ones(16, 32, requires_grad=True)
    with metered(world) as found:
        (x @ w).sum().backward()
    assert found.flops.model == 3 * 2 * 8 * 16 * 32


@pytest.mark.parametrize(
    ("axes", "size", "name"), [(("tp",), 2, "tp"), (("dp",), 2, "dp"), (("dp", "tp"), 4, "dp+tp"), (("pp",), 2, "pp")]
)
def test_messages_are_counted_by_axis_as_a_ring_sends_them(world, axes, size, name):
    group = world.axis_group(*axes)
    own = torch.ones(size * KILO)
    with metered(world) as found:
        dist.all_reduce(own, group=group)
        dist.all_gather([torch.empty(KILO) for _ in range(size)], torch.ones(KILO), group=group)
        dist.reduce_scatter(torch.empty(KILO), list(own.chunk(size)), group=group)
    part = FLOAT * KILO
    assert found.sent_bytes == {name: (2 + 1 + 1) * (size - 1) * part}


def test_what_is_sent_counts_and_what_arrives_does_not(world):
    group = world.axis_group("pp")
    peer = dist.get_global_rank(group, 0)
    with metered(world) as found:
        dist.send(torch.ones(KILO), peer, group=group)
        dist.recv(torch.empty(KILO), peer, group=group)
    assert found.sent_bytes == {"pp": FLOAT * KILO}
