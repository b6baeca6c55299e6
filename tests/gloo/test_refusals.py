"""What cannot obey the law is refused with a lesson, on every rank, before a weight changes."""

import contextlib
import itertools

import jobs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_processes
from torch import nn
from trainings import assert_same_training, record

from shoal.errors import DataError, JobError, LayoutError, NumericsError, ShoalError, WorldError
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
        (RankShifted, WorldError, "do not agree on the first, middle and last sample"),
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


class ArraysShifted(jobs.Points):
    """The same in arrays and plain numbers."""

    def data(self):
        inputs, targets = jobs.points(24).tensors
        order = np.random.RandomState(rank_of_this_process()).permutation(24)
        return [(inputs[k].numpy(), int(targets[k])) for k in order]


class SelfSharing(torch.utils.data.IterableDataset):
    """D019: deals itself out by rank, and would be dealt out again."""

    def __iter__(self):
        plain, step = jobs.points(24), 1 + torch.distributed.is_initialized()
        for index in range(rank_of_this_process(), 24, step):
            yield plain[index]


class SharedStream(jobs.Points):
    def data(self):
        return SelfSharing()


class OwnGenerator(torch.utils.data.Dataset):
    """D022: numpy's own recommendation, and out of reach of any seed."""

    def __init__(self):
        self.draw = np.random.default_rng(0)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        inputs, target = jobs.points(24)[index]
        return inputs + self.draw.normal(), target


class OwnDraws(jobs.Points):
    def data(self):
        return OwnGenerator()


@pytest.mark.parametrize(
    ("job", "match"),
    [
        (ArraysShifted, "do not agree on the first, middle and last sample"),
        (SharedStream, "do not agree on the samples of the first global batch"),
        (OwnDraws, "a generator of its own"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_data_that_depends_on_the_rank_is_refused_whatever_it_is_made_of(job, match):
    refused(job, "dp2", ShoalError, match)


def test_a_data_set_with_its_own_generator_may_train_alone_and_is_told():
    (seen,) = record(OwnDraws)
    assert any("a generator of its own" in note for note in seen.notes)
    refused(OwnDraws, "lone:workers=1", DataError, "a generator of its own")


def test_one_random_split_in_data_and_in_evaluation_shares_no_sample():
    """D018."""

    class Splitting(jobs.Points):
        def data(self):
            return torch.utils.data.random_split(jobs.points(24), [16, 8])[0]

        def evaluation(self):
            return torch.utils.data.random_split(jobs.points(24), [16, 8])[1]

    with World.open("lone") as world:
        run = assemble(Splitting(), world, quiet=True)
        trained = {i for batch in itertools.islice(run.data.batches(), 3) for i in batch.sample_ids}
        train_part, held_out = job_parts(Splitting())
    assert trained == set(range(16))
    assert not set(train_part.indices) & set(held_out.indices)


def job_parts(job):
    from shoal.step import seed_everything

    seed_everything(job.seed, "data")
    train_part = job.data()
    seed_everything(job.seed, "data")
    return train_part, job.evaluation()


class MeanAsSum(jobs.Points):
    """D001: round the refusal of a scalar."""

    def loss(self, output, batch):
        return Sum(F.cross_entropy(output, batch[1]), 1)


class Contrasting(jobs.Points):
    """D048: compares samples with each other."""

    def loss(self, output, batch):
        return Sum(F.cross_entropy(output @ output.T, torch.arange(len(output)), reduction="sum"), len(output))


class PenaltyPerBatch(jobs.Points):
    def loss(self, output, batch):
        loss = super().loss(output, batch)
        return Sum(loss.value + 1.0, loss.count)


class Maximum(jobs.Points):
    """D015."""

    def metrics(self, output, batch):
        return {"largest": Sum(output.max(), 1)}


@pytest.mark.parametrize("job", [MeanAsSum, Contrasting, PenaltyPerBatch, Maximum], ids=lambda job: job.__name__)
@pytest.mark.parametrize("layout", ["dp2", "lone:micro=2"])
def test_what_does_not_add_up_over_parts_is_refused_where_there_are_parts(job, layout):
    refused(job, layout, JobError, "does not add up")
    record(job)  # alone it is what it is


def test_a_loss_that_draws_random_numbers_or_fails_on_a_cut_batch_is_left_alone():
    class Drawing(jobs.Points):
        def loss(self, output, batch):
            return super().loss(output + torch.randn_like(output), batch)

    class Uncut(jobs.Points):
        def loss(self, output, batch):
            assert len(output) > 2
            return super().loss(output, batch)

        def evaluation(self):
            return None

    record(lambda: Drawing(batch_size=8), "dp2")
    record(lambda: Uncut(batch_size=8), "dp2")


def test_a_schedule_that_waits_for_a_figure_is_refused():
    """D042."""

    class Plateau(jobs.Points):
        def scheduler(self, optimizer):
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    refused(Plateau, "lone", JobError, "ReduceLROnPlateau")


def test_a_parameter_that_the_forward_replaces_is_found_after_step_one():
    """D064."""

    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            if not hasattr(self, "done"):
                self.done = True
                self.linear.weight = nn.Parameter(self.linear.weight.detach().clone())
            return self.linear(x)

    class Replaced(jobs.Points):
        def model(self):
            return Replacing()

    refused(Replaced, "lone", JobError, "no parameter of the model")


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_bias_before_batch_norm_has_no_gradient_to_speak_of_and_may_stay(precision):
    class Biased(jobs.Points):
        def model(self):
            return nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3))

        def data(self):
            inputs, targets = jobs.points(24).tensors
            return torch.utils.data.TensorDataset(inputs.float(), targets)

        evaluation = data

    record(lambda: Biased(precision=precision), "dp2")


def test_a_caught_error_does_not_let_a_rank_leave_its_step_out():
    """D079: every rank ends, the one that caught with the reason."""

    class Failing(jobs.Points):
        def loss(self, output, batch):
            if rank_of_this_process() == 1 and not caught:
                caught.append(True)
                raise RuntimeError("out of memory")
            return super().loss(output, batch)

        def evaluation(self):
            return None

    caught = []

    def loop(rank, size, rendezvous):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("dp2", place=place) as world:
            run = assemble(Failing(batch_size=8), world, quiet=True)
            for step in run.steps():
                with contextlib.suppress(RuntimeError):
                    step()

    with pytest.raises(WorldError, match="raised an error that was caught"):
        run_processes(loop, 2)


def test_a_last_batch_of_one_sample_is_told_of_where_a_norm_needs_two():
    """D106."""
    with World.open("lone") as world:
        run = assemble(jobs.Normed(num_samples=15), world, quiet=True)
    assert any("the last batch of every epoch has 1 sample" in note for note in run.recorder.notes)


def test_a_stand_in_stays_out_of_local_statistics():
    """Two samples on three ranks: rank 0 has none, and its statistics are the ones that are kept."""

    class Locally(jobs.Points):
        def model(self):
            return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 3))

    for seen in record(lambda: Locally(batch_norm="local", batch_size=2, num_samples=2, steps=1), "dp3"):
        assert int(seen.state["1.num_batches_tracked"]) == 0
        assert not seen.state["1.running_mean"].any()


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
        assert int(seen.state["1.num_batches_tracked"]) == 0  # both were skipped, and left no trace


def test_batch_statistics_in_evaluation_are_refused_where_a_layout_would_cut_the_batch():
    class Untracked(jobs.Points):
        def model(self):
            return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))

    class PerSample(jobs.Points):
        def model(self):
            return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(4, 3))

    refused(Untracked, "dp2", JobError, "keeps no running statistics")
    refused(lambda: Untracked(batch_norm="local"), "lone:micro=5", JobError, "keeps no running statistics")
    record(Untracked)
    assert_same_training(record(PerSample, "dp2"), record(PerSample)[0])


def test_a_model_is_placed_once():
    from shoal.parallel.place import place

    with World.open("lone") as world:
        model = place(nn.Linear(2, 2), world)
        with pytest.raises(JobError, match="placed already"):
            place(model, world)


@pytest.mark.parametrize("layout", ["cp2", "dp4.ep2"])
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


# --- what a hostile tester found


class Chosen(nn.Module):
    """Ranks draw different numbers, and so call different norms."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head((self.first if rank_of_this_process() == 0 else self.second)(x))


def test_statistics_of_two_norms_are_never_merged():
    class Choosing(jobs.Points):
        def model(self):
            return Chosen()

    refused(Choosing, "dp2", JobError, "some ranks are in the BatchNorm '(first|second)' while this one is in")
    record(Choosing)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_refused_where_they_would_see_a_part(register):
    class Hooked(jobs.Points):
        def model(self):
            model = super().model()
            hook = (lambda grad: grad.clamp(-0.1, 0.1)) if register == "register_hook" else (lambda param: None)
            getattr(model[0].weight, register)(hook)
            return model

    refused(Hooked, "dp2", JobError, "0.weight has a gradient hook")
    refused(Hooked, "lone:micro=2", JobError, "0.weight has a gradient hook")
    record(Hooked)


def test_a_buffer_that_every_forward_moves_is_refused_under_micro_batches():
    class Spectral(jobs.Points):
        def model(self):
            return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3))

    refused(lambda: Spectral(batch_size=8), "dp2:micro=2", JobError, "once for every micro-batch")
    (reference,) = record(Spectral)
    assert_same_training(record(Spectral, "dp2"), reference)


@pytest.mark.parametrize("layout", ["lone", "dp2"])
def test_a_skipped_step_leaves_no_trace_in_running_statistics(layout):
    class NormedPoison(Poisoned):
        def model(self):
            return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

        def evaluation(self):
            return None

    for seen in record(lambda: NormedPoison(nonfinite="skip", steps=4), layout):
        assert sum("skipped" in note for note in seen.notes) == 1
        assert int(seen.state["1.num_batches_tracked"]) == 3
        assert all(bool(tensor.isfinite().all()) for tensor in seen.state.values())


def test_complex_parameters_are_widened_too():
    class Phased(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(self.weight.dtype) @ self.weight).abs()

    class Phases(jobs.Points):
        def model(self):
            return Phased()

    (reference,) = record(Phases)
    assert reference.state["weight"].dtype == torch.complex128
    assert_same_training(record(Phases, "dp2"), reference)


def test_a_group_that_stands_still_may_stand_still():
    class Discriminative(jobs.Points):
        def optimizer(self, params):
            return torch.optim.AdamW(
                [{"params": params[2:]}, {"params": params[:2], "lr": 0.0, "weight_decay": 0.0}], lr=1e-3
            )

    record(Discriminative)


class Plain:
    def __init__(self, logits):
        self.logits = logits


def test_outputs_whose_tensors_cannot_be_found_are_refused():
    class Wrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return Plain(self.linear(x)) if self.wraps else (x, self.linear.weight)

    class Wrapped(jobs.Points):
        wraps = True

        def model(self):
            model = Wrapping()
            model.wraps = self.wraps
            return model

        def loss(self, output, batch):
            logits = output.logits if self.wraps else output[0] @ output[1].T
            return super().loss(logits, batch)

        def evaluation(self):
            return None

    class Handing(Wrapped):
        wraps = False

    refused(Wrapped, "dp2", JobError, "returns a Plain, whose tensors \\(logits\\)")
    refused(Handing, "dp2", JobError, "hands out a parameter")


def test_a_sparse_table_that_some_ranks_do_not_use_is_reduced():
    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 3, sparse=True), nn.Linear(4, 3)

        def forward(self, x):
            output = self.head(x)
            large = x[:, 0] > 0.9
            if large.any():
                rows = self.table((x[large, 1].abs() * 3).long().clamp(max=8))
                output = output.index_add(0, large.nonzero()[:, 0], rows)
            return output

    class Looked(jobs.Points):
        def model(self):
            return Looking()

        def optimizer(self, params):
            return torch.optim.SGD(params, lr=0.1)

    (reference,) = record(lambda: Looked(batch_size=4))
    used = [grads["table.weight"] is not None for grads in reference.grads]
    assert True in used
    assert False in used
    assert_same_training(record(lambda: Looked(batch_size=4), "dp2"), reference)


class Closure(jobs.Points):
    def optimizer(self, params):
        return torch.optim.LBFGS(params)


class NoMetrics(jobs.Points):
    def metrics(self, output, batch):
        return None


class NoCount(jobs.Points):
    def loss(self, output, batch):
        return Sum(output.sum(), None)


class LearnedCount(jobs.Points):
    def loss(self, output, batch):
        return Sum(output.sum(), output.square().sum())


class NoRate(jobs.Points):
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=float("nan"))


@pytest.mark.parametrize(
    ("job", "match"),
    [
        (Closure, "a closure"),
        (NoMetrics, "must be a dict of Sums"),
        (NoCount, "whose count is NoneType"),
        (LearnedCount, "whose count depends on parameters"),
        (NoRate, "the learning rate of step 1 is nan"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_more_mistakes_in_a_job_are_lessons(job, match):
    refused(job, "lone", JobError, match)
