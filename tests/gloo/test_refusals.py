"""What cannot obey the law is refused with a lesson, on every rank, before a weight changes."""

import jobs
import pytest
import torch
import torch.nn.functional as F
from ranks import run_processes
from torch import nn
from trainings import record

from shoal.errors import JobError, LayoutError, NumericsError, ShoalError, WorldError
from shoal.job import Sum
from shoal.run import assemble
from shoal.world import Place, World


def refused(make_job, layout, error, match, **options):
    with pytest.raises(error, match=match) as caught:
        record(make_job, layout, **options)
    return str(caught.value)


def rank_of_this_process() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class RankSeeded(jobs.Points):
    """D053: replicas that start from other weights."""

    def model(self):
        torch.manual_seed(rank_of_this_process())
        return super().model()


class RankOrdered(jobs.Points):
    """D061: equal shapes registered in another order; torch would swap their values without a word."""

    def model(self):
        model = nn.Module()
        for name in ("a", "b") if rank_of_this_process() == 0 else ("b", "a"):
            model.register_module(name, nn.Linear(4, 4))
        return model


class RankCut(jobs.Points):
    """D017, D018: each rank drew its own data."""

    def data(self):
        return jobs.points(24 + rank_of_this_process())


class RankShifted(jobs.Points):
    def data(self):
        inputs, targets = jobs.points(24).tensors
        return torch.utils.data.TensorDataset(inputs + rank_of_this_process(), targets)


@pytest.mark.parametrize(
    ("job", "error", "match"),
    [
        (RankSeeded, JobError, r"0\.weight starts with other values on rank 1"),
        (RankOrdered, JobError, r"entry 0 is 'a\.weight .* on rank 0 and 'b\.weight .* on rank 1"),
        (RankCut, WorldError, "do not agree on the length of the data"),
        (RankShifted, WorldError, "do not agree on the first sample"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_differ_at_the_start_are_named(job, error, match):
    refused(job, "dp2", error, match)


def test_batch_norm_is_never_cut_into_micro_batches_unless_the_job_says_so():
    refused(jobs.Normed, "lone:micro=2", LayoutError, "BatchNorm.*batch_norm=local")
    refused(jobs.Normed, "dp2:micro=2", LayoutError, "BatchNorm.*batch_norm=local")
    local = record(lambda: jobs.Normed(batch_norm="local", batch_size=8), "dp2:micro=2")
    assert torch.equal(local[0].state["0.weight"], local[1].state["0.weight"])


def test_local_statistics_are_reconciled_before_they_are_saved_and_evaluated():
    """D030: evaluation must not depend on the rank that runs it."""
    local = record(lambda: jobs.Normed(batch_norm="local", batch_size=8), "dp2")
    assert torch.equal(local[0].state["1.running_mean"], local[1].state["1.running_mean"])
    assert local[0].evaluation["loss"] == local[1].evaluation["loss"]


class MeanLoss(jobs.Points):
    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])


class VectorLoss(jobs.Points):
    def loss(self, output, batch):
        return Sum(F.cross_entropy(output, batch[1], reduction="none"), len(output))


class FromScalar(jobs.Points):
    def loss(self, output, batch):
        from shoal.job import mean_loss

        return mean_loss(F.cross_entropy(output, batch[1]))


class Detached(jobs.Points):
    def loss(self, output, batch):
        return super().loss(output.detach(), batch)


class AllFrozen(jobs.Points):
    def model(self):
        return super().model().requires_grad_(False)


class NoModule(jobs.Points):
    def model(self):
        return lambda x: x


class Lazy(jobs.Points):
    def model(self):
        return nn.Sequential(nn.LazyLinear(3))


class StaleOptimizer(jobs.Points):
    """D063: the optimizer holds tensors that the model does not use."""

    def optimizer(self, params):
        return torch.optim.SGD([nn.Parameter(p.detach().clone()) for p in params], lr=0.1)


class NoOptimizer(jobs.Points):
    def optimizer(self, params):
        return lambda: None


class MeanMetric(jobs.Points):
    """D014: what is no sum cannot be added over ranks."""

    def metrics(self, output, batch):
        return {"auc": 0.5}


@pytest.mark.parametrize(
    ("job", "match"),
    [
        (MeanLoss, "returned Tensor, not a Sum"),
        (VectorLoss, r"value is \(.*\); it must be a 0-dim tensor"),
        (FromScalar, "lost its count"),
        (Detached, "depends on no trainable parameter"),
        (AllFrozen, "no trainable parameter"),
        (NoModule, "not a torch.nn.Module"),
        (Lazy, "lazy module"),
        (StaleOptimizer, "no parameter of the model"),
        (NoOptimizer, "must be a torch.optim.Optimizer"),
        (MeanMetric, "not a Sum"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("layout", ["lone", "dp2"])
def test_mistakes_in_a_job_are_lessons(job, match, layout):
    refused(job, layout, JobError, match)


class Counting(nn.Module):
    """A buffer that depends on the samples of this rank."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + x.detach().mean(0)  # re-assigned, not in place: D029
        return self.linear(x)


class Counted(jobs.Points):
    def model(self):
        return Counting()


def test_a_buffer_that_depends_on_a_rank_s_own_samples_is_refused_after_step_one():
    message = refused(Counted, "dp2", WorldError, "mean differs between rank 0 and ranks")
    assert "buffer" in message
    record(Counted)  # in one process there is nothing to differ


def test_an_update_on_one_rank_alone_is_found_after_step_one():
    class Meddled(jobs.Points):
        def optimizer(self, params):
            optimizer = super().optimizer(params)
            if rank_of_this_process() == 1:
                optimizer.register_step_post_hook(lambda *_: params[0].data.add_(1e-6))
            return optimizer

    refused(Meddled, "dp2", WorldError, r"after step 1 0\.weight differs between rank 0 and ranks \[1\]")


def test_an_optimizer_that_moves_nothing_is_found_after_step_one():
    class Idle(torch.optim.SGD):
        def step(self, closure=None):
            return None

    class Idling(jobs.Points):
        def optimizer(self, params):
            return Idle(params, lr=0.1)

    refused(Idling, "lone", NumericsError, "did not change a single bit")


def test_parameters_without_a_gradient_and_outside_the_optimizer_are_named():
    class Partly(jobs.Branching):
        def optimizer(self, params):
            return torch.optim.SGD([params.named["always.weight"], params.named["rare.weight"]], lr=0.1)

    (seen,) = record(Partly)
    assert any("not in the optimizer" in note and "always.bias" in note for note in seen.notes)
    assert any("got no gradient" in note and "never.weight" in note for note in seen.notes)


class Poisoned(jobs.Points):
    """Sample 13 makes the loss infinite."""

    where: str = "loss"

    def loss(self, output, batch):
        return super().loss(output, batch)

    def data(self):
        inputs, targets = jobs.points(24).tensors
        inputs[13] = float("nan")
        return torch.utils.data.TensorDataset(inputs, targets)


@pytest.mark.parametrize("layout", ["lone", "dp2", "dp3"])
def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_rank_step_and_sample(layout):
    """D044: it happens on one rank; all stop together, before the update."""
    message = refused(Poisoned, layout, NumericsError, "No weight was changed")
    step = int(message.split(":")[0].split()[1])
    assert 1 <= step <= 4
    assert "the loss is not finite on rank" in message
    assert "13" in message.split("samples")[1]


@pytest.mark.parametrize("layout", ["lone", "dp2"])
def test_such_steps_are_skipped_by_all_ranks_together_if_the_job_says_so(layout):
    def job():
        return Poisoned(nonfinite="skip", steps=4)

    found = record(job, layout)
    for seen in found:
        assert all(bool(tensor.isfinite().all()) for tensor in seen.state.values())
        assert torch.equal(seen.state["0.weight"], found[0].state["0.weight"])
        assert sum("skipped" in note for note in seen.notes) == 1


def test_a_gradient_that_is_not_finite_is_named_with_its_parameter():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 3))

        def forward(self, x):
            return x @ self.weight.square().sum().sqrt().expand(4, 3)  # the root of 0 has no slope

    class Rooted(jobs.Points):
        def model(self):
            return Root()

    refused(Rooted, "dp2", NumericsError, "the gradient of weight is not finite on rank 0")


@pytest.mark.parametrize("layout", ["lone", "dp4"])
def test_blame_meets_in_batch_norm_and_leaves_the_statistics_alone(layout):
    """Four ranks and three samples: one rank has none, and takes part all the same."""

    class Endless(jobs.Points):
        def model(self):
            return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

        def loss(self, output, batch):
            return Sum(super().loss(output, batch).value * float("inf"), len(output))

    found = record(lambda: Endless(batch_size=3, nonfinite="skip", steps=2), layout)
    for seen in found:
        assert sum("the loss is not finite on rank" in note for note in seen.notes) == 2
        assert int(seen.state["1.num_batches_tracked"]) == 2


def test_batch_statistics_in_evaluation_are_refused_where_ranks_would_share_them():
    class Untracked(jobs.Points):
        def model(self):
            return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))

    refused(Untracked, "dp2", JobError, "keeps no running statistics")
    record(Untracked)


def test_a_model_is_placed_once():
    from shoal.parallel.place import place

    with World.open("lone") as world:
        model = place(nn.Linear(2, 2), world)
        with pytest.raises(JobError, match="placed already"):
            place(model, world)


@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2", "threads2", "dp2:recompute=block"])
def test_what_this_version_cannot_run_is_said(layout):
    with World.open(layout, kind="fake") as world, pytest.raises(LayoutError, match="not available yet"):
        assemble(jobs.Points(), world, quiet=True)


def test_the_world_must_be_the_one_that_the_layout_needs():
    def open_dp4(rank, size, rendezvous):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous)
        with (
            pytest.raises(ShoalError, match="dp4 needs 4 processes, but this world has 2"),
            World.open("dp4", place=place),
        ):
            pass
        return True

    assert run_processes(open_dp4, 2) == [True, True]
