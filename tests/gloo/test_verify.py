"""shoal verify: healthy layouts are the same training, planted mistakes are found and explained, in real processes."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked import start, well
from ranks import run_processes
from torch import nn

import shoal
from shoal.job import Sum
from shoal.layout import Layout
from shoal.verbs.verify import Recording, command, compare_runs
from shoal.verbs.verify.command import prepared, record, verify
from shoal.verbs.verify.mutants import MUTANTS
from shoal.verbs.verify.passes import Plan
from shoal.verbs.verify.plant import swapped
from shoal.verbs.verify.probes import Words
from shoal.verbs.verify.selftest import HEALTHY, Bench, self_test
from shoal.world import Place, World


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Trials that share what one process computes."""
    with prepared("shoal.verbs.verify.probes:Words", {}):
        yield Bench(tmp_path_factory.mktemp("verify"))


# Of those in a pipeline, what has no like in another layout; `make drill` takes all.
ONLY_IN_STAGES = (
    "targets of another micro-batch",
    "gradients of a stage divided again",
    "tied weight not reduced across stages",
    "a stage clips by its own norm",
    "the same dropout in all stages",
    "a trial forward moves statistics",
)


def planted(mutant: Any) -> Any:
    is_dear = mutant.layout.startswith("pp") and mutant.name not in ONLY_IN_STAGES
    return pytest.param(mutant, marks=pytest.mark.drill if is_dear else (), id=mutant.name.replace(" ", "-"))


@pytest.mark.parametrize("mutant", [planted(mutant) for mutant in MUTANTS])
def test_a_planted_mistake_is_caught_and_explained(bench, mutant):
    trial = bench.plant(mutant)
    assert trial.passed, trial.sentence
    assert trial.explained, trial.sentence


# Of the healthy runs of the self-test those that differ most; `make drill` takes all.
LEFT_ALONE = (
    ("words", "fsdp2.tp2", 0),
    ("words", "dp2:zero=1", 2),
    ("words", "lone:micro=3", 2),
    ("words", "pp2:micro=5,schedule=zbv", 0),
    ("pixels", "dp4", 0),
)


@pytest.mark.parametrize(
    ("job", "layout", "seed"),
    [pytest.param(*run, marks=() if run in LEFT_ALONE else pytest.mark.drill) for run in dict.fromkeys(HEALTHY)],
)
def test_a_healthy_run_raises_no_alarm(bench, job, layout, seed):
    trial = bench.leave_alone(job, layout, seed)
    assert trial.passed, trial.sentence


def test_the_self_test_counts_what_it_caught_and_its_false_alarms():
    said: list[str] = []
    names = ("gradients reduced twice", "BatchNorm not synchronised")
    done = self_test(show=said.append, only=names, healthy=(("words", "dp2", 0),))
    assert (done.count(planted=True), done.count(planted=False), done.exit_code) == ((2, 2), (1, 1), 0)
    assert "2 of 2 planted mistakes caught, 2 of them explained; 0 false alarms in 1 healthy runs" in str(done)
    assert len(said) == 3


@dataclass(frozen=True, kw_only=True)
class Multiplied(jobs.Points):
    """D007: "the loss must be scaled by the number of processes", says many a tutorial; no check can see it alone."""

    def loss(self, output: Any, batch: Any) -> Sum:
        loss = super().loss(output, batch)
        size = dist.get_world_size() if dist.is_initialized() else 1
        return Sum(loss.value * size, loss.count)


def test_a_loss_that_is_scaled_by_the_number_of_processes_is_found():
    report = command(Multiplied(), "dp2")
    assert (report.verdict, report.exit_code) == ("wrong", 1)
    assert "the loss is" in report.sentence
    assert "twice the reference" in report.sentence
    assert command(Multiplied(), "lone:micro=2").verdict == "same"


@pytest.mark.parametrize("job", [jobs.Points, jobs.Normed, jobs.Adamant, jobs.Tokens, jobs.Branching, jobs.SparseRows])
def test_jobs_that_data_parallelism_finds_hard_are_the_same(job):
    report = command(job(), "dp3")
    assert report.verdict == "same", str(report)


@dataclass(frozen=True, kw_only=True)
class Dropping(jobs.Points):
    precision: Any = "fp32"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3), Unused())

    def data(self) -> Any:
        inputs, targets = super().data().tensors
        return torch.utils.data.TensorDataset(inputs.float(), targets)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_what_was_not_covered_is_said():
    report = command(Dropping(), "dp2")
    assert report.verdict == "same"
    said = "\n".join(report.uncovered)
    assert "modules that were never executed: 3.never" in said
    assert "parameters that got no gradient: 3.never.weight, 3.never.bias" in said
    assert "dropout, which was switched off: dropout (p=0.5)" in said
    assert "evaluation mode" in said
    assert "kernels" in said


@dataclass(frozen=True, kw_only=True)
class Sharing(jobs.Points):
    """Blocks that call one and the same activation and dropout: of those calls each stage sees some."""

    def model(self) -> nn.Module:
        act, drop = nn.GELU(), nn.Dropout(0.2)
        blocks = [nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8), act) for _ in range(3)]
        return nn.Sequential(nn.Linear(4, 8), drop, blocks[0], drop, blocks[1], drop, blocks[2], nn.Linear(8, 3))


@pytest.mark.parametrize("layout", ["pp2", "pp2.dp2:micro=4,schedule=zbv"])
def test_calls_of_a_module_that_several_stages_share_are_put_beside_their_own(layout):
    report = command(Sharing(), layout)
    assert report.verdict == "same", str(report)
    assert not any("could not be put beside" in what for what in report.uncovered), report.uncovered
    assert not any("one process executes" in what for what in report.uncovered), report.uncovered


def test_what_leaves_a_stage_is_compared_where_it_is_made():
    report = command(jobs.Points(), "pp2")
    assert report.verdict == "same"
    assert not any("a stage hands to the next" in what for what in report.uncovered)


@dataclass(frozen=True, kw_only=True)
class Drawing(jobs.Points):
    """Draws numbers that no switch turns off."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), Noise(), nn.Linear(8, 3))


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x)


def test_random_numbers_of_a_forward_are_the_reason_that_is_named():
    report = command(Drawing(), "dp2")
    assert report.verdict == "wrong"
    assert "the output of 1 is not that of one process: 1 draws random numbers" in report.sentence


def rounded_gradients() -> contextlib.AbstractContextManager[None]:
    """A reduction in bfloat16, in the job's own precision alone: float64 cannot show it."""

    def make(old: Any) -> Any:
        def advance(step: Any) -> None:
            for param in step._params if step._job.precision == "fp32" else ():
                param.grad.copy_(param.grad.bfloat16())
            old(step)

        return advance

    return swapped(shoal.step.Step, "_advance", make)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Plan, Path]]:
    """What is planned, and what one process made of it, in the job's own precision too."""
    with prepared(Words(), {}) as job:
        plan, folder = Plan(job=job), tmp_path_factory.mktemp("reference")
        record(plan, "lone", folder)
        yield plan, folder


@pytest.mark.parametrize("planted", [False, True])
def test_numerics_that_differ_are_told_apart_from_what_is_wrong(reference, tmp_path, planted):
    plan, folder = reference
    patch = rounded_gradients if planted else contextlib.nullcontext
    report = verify(plan, Layout.parse("dp2"), folder, tmp_path, patch=patch)
    assert (report.verdict, report.exit_code) == ("same", 0)
    assert report.numerics is not None
    assert report.numerics.differ is planted, str(report.numerics)
    assert ("numerics differ" in str(report)) is planted


@pytest.mark.parametrize(
    ("job", "layout", "why"),
    [
        (jobs.Normed, "dp2:micro=2", "would split the batch of the BatchNorm"),
        (jobs.Branching, "pp2", "2 stages need 2 parts that run one after the other"),
    ],
)
def test_what_is_refused_before_step_one_is_no_wrong_training(job, layout, why):
    report = command(job(), layout)
    assert (report.verdict, report.exit_code) == ("refused", 2)
    assert why in report.sentence


@dataclass(frozen=True, kw_only=True)
class Broken(jobs.Points):
    def loss(self, output: Any, batch: Any) -> Sum:
        if dist.is_initialized():
            raise RuntimeError("no loss today")
        return super().loss(output, batch)


def test_a_training_that_fails_is_said_so(capfd):
    report = command(Broken(), "dp2")
    assert (report.verdict, report.exit_code) == ("failed", 1)
    assert "in dp2: RuntimeError: no loss today" in report.sentence


def test_the_command_line_verifies_a_small_gpt(tmp_path: Path):
    fields = ("width=16", "depth=1", "heads=2", "context=16", "batch_size=6")
    words = ["verify gpt --layout pp2:micro=3 --json", *(f"--set {field}" for field in fields)]
    told = json.loads(well(start(" ".join(words), tmp_path).wait(100)).out)
    assert told["verdict"] == "same"
    assert told["worst"]["gradients"]["error"] < 1e-10
    assert told["numerics"]["differ"] is False
    assert [path.name.partition("_")[0] for path in tmp_path.iterdir()] == ["output"]  # what it said


def own_loop(world: World, folder: Path, *, reduced: bool) -> None:
    """Face B, recorded: a loop of one's own over the public pieces."""
    torch.manual_seed(0)
    model = shoal.place(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recording = Recording(folder, model, optimizer, world=world)
    for batch in shoal.share(jobs.points(24), world, batch_size=7, seed=3, epochs=1).batches():
        inputs, targets = batch.micro[0]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets, reduction="sum") * world.num_data / batch.num_global
        loss.backward()
        if not reduced and world.rank == 1:
            model[0].weight.grad.mul_(0.5)
        optimizer.step()
        recording.step(sample_ids=batch.sample_ids)
    recording.close()


@pytest.mark.parametrize("reduced", [True, False])
def test_a_loop_of_ones_own_is_compared_by_its_recordings(tmp_path, reduced):
    def rank(rank: int, size: int, rendezvous: str) -> None:
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("dp2" if size > 1 else "lone", place=place) as world:
            own_loop(world, tmp_path / str(size), reduced=reduced)

    run_processes(rank, 1)
    run_processes(rank, 2)
    report = compare_runs(tmp_path / "1", tmp_path / "2")
    if reduced:
        assert report.verdict == "same", report.sentence
        assert {"sample ids", "gradients", "optimizer state", "weights"} <= set(report.worst)
    else:
        assert report.sentence == "in step 1: the gradient of 0.weight on rank 1 is half of the reference: " + (
            "a sum over dp is missing, or it is divided by its size once too often."
        )
