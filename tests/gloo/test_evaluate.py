"""Evaluation: the figures of one process, at the price of one, in any layout that cuts the model or the batch."""

from dataclasses import dataclass

import jobs
import pytest
import torch
import torch.nn.functional as F
from ranks import run_processes
from torch import Tensor, nn

from shoal.evaluate import evaluate
from shoal.job import Sum, mean_loss
from shoal.layout import Layout
from shoal.parallel.place import placement_of
from shoal.run import Run, assemble
from shoal.world import Place, World


def in_layout(layout, job, look):
    """What `look` finds of a run, rank by rank."""

    def rank(rank, size, rendezvous):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous)
        with World.open(layout, place=place) as world:
            run = assemble(job, world, quiet=True)
            found = look(run)
            run.close()
            return found

    return run_processes(rank, Layout.parse(layout).num_ranks)


def alone(job, look):
    with World.open("lone") as world:
        run = assemble(job, world, quiet=True)
        found = look(run)
        run.close()
        return found


def figures_of(run: Run, **options):
    data = options.pop("data", run.evaluation)
    found = evaluate(run.job, run.model, data, run.world, **options)
    return {f"{name}.{at}": v for name, figure in found.items() for at, v in enumerate(figure.flatten().tolist())}


@pytest.mark.parametrize(("layout", "chunks"), [("pp2:micro=2", [8, 8, 2]), ("pp2:micro=3", [9, 9, 9])])
def test_batches_follow_each_other_through_the_stages_until_they_are_filled(layout, chunks):
    def look(run):
        seen, pipeline = [], placement_of(run.model).pipeline
        if pipeline is not None:
            through = pipeline.run
            pipeline.run = lambda calls, *rest, **named: (seen.append(len(calls)), through(calls, *rest, **named))
        return seen, figures_of(run, data=run.data, num_steps=9)

    job = jobs.Tokens(batch_size=5)
    _, expected = alone(job, look)
    for seen, figures in in_layout(layout, job, look):
        assert seen == chunks
        assert figures == pytest.approx(expected, rel=1e-12)


@dataclass(frozen=True, kw_only=True)
class Points(jobs.Points):
    """Held-out batches of 16 and one of 5."""

    batch_size: int = 16
    steps: int = 1

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def evaluation(self):
        return jobs.points(21)


@pytest.mark.parametrize(
    ("layout", "forwards"),
    [
        ("lone:micro=8", [[8, 8, 2, 3]]),  # a part may be four times as large as in training
        ("dp2:micro=8", [[4, 4, 1, 1], [4, 4, 1, 2]]),
        ("fsdp2:micro=8", [[4, 4, 1, 1], [4, 4, 1, 2]]),
        ("fsdp2:micro=16", [[2, 2, 2, 2, 1, 1, 1], [2, 2, 2, 2, 1, 1, 1]]),  # the last of rank 0 is a stand-in
        ("pp2:micro=4", [[16, 5]] * 2),
        ("pp2:micro=8", [[8, 8, 2, 3]] * 2),
        ("pp2.fsdp2:micro=8", [[4, 4, 1, 1], [4, 4, 1, 2]] * 2),
    ],
)
def test_no_rank_computes_more_in_evaluation_than_its_samples(layout, forwards):
    def look(run):
        seen = []
        hook = run.model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
        figures = figures_of(run)
        hook.remove()
        return seen, figures

    _, expected = alone(Points(), look)
    found = in_layout(layout, Points(), look)
    assert [seen for seen, _ in found] == forwards
    for _, figures in found:
        assert figures == pytest.approx(expected, rel=1e-12)


class Signs(nn.Module):
    """Draws a sign for each sample, and takes it off again in another stage: the same one leaves nothing behind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Drawing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, (len(x), 1)) * 2.0 - 1
        x = self.blocks[0](x) * signs
        x = self.blocks[1](x)
        return self.blocks[2](x) * signs


class Drawing(nn.Module):
    """Linear, and it draws, so that ranks with more of them, or with others, are elsewhere in their streams."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) + 0 * torch.rand_like(x)


class Masks(Signs):
    """Dropout that stays on in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), training=True)


@dataclass(frozen=True, kw_only=True)
class Random(Points):
    """Of a model that draws in evaluation."""

    masks: bool = False

    def model(self) -> nn.Module:
        return Masks() if self.masks else Signs()

    def loss(self, output: Tensor, batch) -> Sum:
        return mean_loss((output - 1).square().mean(1))

    def metrics(self, output: Tensor, batch):
        return {}


@pytest.mark.parametrize("layout", ["pp2:micro=8", "pp2:micro=8,schedule=interleaved,virtual=1"])
def test_what_a_model_draws_between_its_modules_is_the_same_in_all_stages(layout):
    points = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def look(run):
        found = [figures_of(run), figures_of(run)]
        with torch.no_grad():
            called = [run.model(points) for _ in range(2)]
        return found, torch.stack(called)

    expected, called = alone(Random(), look)
    for figures, own in in_layout(layout, Random(), look):
        for one, other in zip(figures, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-12)
        assert torch.allclose(own, called, rtol=1e-12, atol=0)


def test_masks_drawn_in_evaluation_repeat_themselves_and_differ_from_call_to_call_and_part_to_part():
    points = torch.ones(5, 4, dtype=torch.float64)

    def look(run):
        parts, figures = [], [figures_of(run), figures_of(run)]
        before = torch.get_rng_state()
        with torch.no_grad():
            parts = [run.model(points) == 0 for _ in range(2)]
        return figures, torch.stack(parts), torch.equal(before, torch.get_rng_state())

    (first, one, same), (second, other, _) = in_layout("pp2:micro=8", Random(masks=True), look)
    assert first[0] == first[1] == second[0]
    assert torch.equal(one, other)  # all ranks have the output
    assert not torch.equal(one[0], one[1])
    assert same  # a call leaves the streams of whoever makes it alone
