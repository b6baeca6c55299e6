"""The law: a training in dpN is the training in one process; every loss, gradient, weight and figure in float64."""

import jobs
import pytest
import torch
from torch import nn
from trainings import assert_same_training, record


@pytest.mark.parametrize("layout", ["dp2", "dp3", "dp4"])
@pytest.mark.parametrize("job", [jobs.Points, jobs.Normed, jobs.Adamant, jobs.Tokens], ids=lambda j: j.__name__)
def test_dp_is_the_same_training_as_lone(job, layout):
    (reference,) = record(job)
    assert_same_training(record(job, layout), reference)


@pytest.mark.parametrize("layout", ["lone:micro=2", "lone:micro=3", "dp2:micro=2", "dp3:micro=2"])
@pytest.mark.parametrize("job", [jobs.Adamant, jobs.Tokens], ids=lambda j: j.__name__)
def test_accumulation_is_the_same_training(job, layout):
    (reference,) = record(job)
    assert_same_training(record(job, layout), reference)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_ranks_without_samples_take_part_with_weight_zero(batch_size):
    def job():
        return jobs.Normed(batch_size=max(2, batch_size), num_samples=2 * max(2, batch_size) + 2)

    (reference,) = record(job)
    assert_same_training(record(job, "dp4"), reference)


def test_ranks_without_samples_in_a_model_without_batch_norm():
    def job():
        return jobs.Tokens(batch_size=2, num_samples=5)

    (reference,) = record(job)
    assert_same_training(record(job, "dp4"), reference)


@pytest.mark.parametrize("layout", ["dp2", "dp4", "dp2:micro=2"])
def test_a_parameter_that_nobody_uses_keeps_none_and_one_that_some_use_gets_their_sum(layout):
    (reference,) = record(jobs.Branching)
    used = [grads["rare.weight"] is not None for grads in reference.grads]
    assert True in used
    assert False in used
    assert all(grads["never.weight"] is None for grads in reference.grads)
    assert_same_training(record(jobs.Branching, layout), reference)


@pytest.mark.parametrize("layout", ["dp2", "dp3"])
def test_sparse_gradients_are_reduced_and_clipped(layout):
    (reference,) = record(jobs.SparseRows)
    assert_same_training(record(jobs.SparseRows, layout), reference)


def test_a_parameter_that_is_unfrozen_later_is_reduced_from_then_on():
    class Thawing(jobs.Points):
        def model(self):
            model = super().model()
            model[0].requires_grad_(False)
            return model

    def thaw(run):
        if run.step == 2:
            run.model[0].requires_grad_(True)

    (reference,) = record(Thawing, on_step=thaw)
    assert reference.grads[1]["0.weight"] is None
    assert reference.grads[2]["0.weight"] is not None
    assert_same_training(record(Thawing, "dp2", on_step=thaw), reference)


def test_a_sum_loss_weighs_every_token_once_however_the_sequences_are_dealt():
    """D001: four sequences of 1, 2, 3 and 5 tokens, whole or one by one."""

    def job():
        return jobs.Tokens(batch_size=4, num_samples=4, steps=1)

    (whole,) = record(job)
    (single,) = record(job, "lone:micro=4")
    assert_same_training([single], whole)
    assert_same_training(record(job, "dp4"), whole)


def test_one_optimizer_step_and_one_schedule_step_per_global_batch_whatever_the_accumulation():
    """D005: five samples, three micro-batches."""

    class Stepped(jobs.Points):
        def scheduler(self, optimizer):
            return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    (seen,) = record(lambda: Stepped(batch_size=3, num_samples=5, steps=4), "lone:micro=3")
    assert seen.lrs == [0.1, 0.05, 0.025, 0.0125]


@pytest.mark.parametrize("value", ["fp32", "bf16", "fp16"])
def test_lower_precision_stays_close_to_lone_from_the_first_step_on(value):
    def job():
        return jobs.Adamant(precision=value, clip_grad_norm=1.0)

    class Floats(jobs.Adamant):
        def data(self):
            inputs, targets = super().data().tensors
            return torch.utils.data.TensorDataset(inputs.float(), targets)

        evaluation = data

    def made():
        return Floats(precision=value, clip_grad_norm=1.0)

    (reference,) = record(made)
    for seen in record(made, "dp2"):
        assert seen.losses == pytest.approx(reference.losses, rel={"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3}[value])
    assert all(tensor.dtype == torch.float32 for tensor in reference.state.values())


def test_replicas_draw_different_dropout_streams_and_a_rerun_draws_the_same():
    class Dropping(jobs.Points):
        def model(self):
            return nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3))

    masks = []

    def job():
        return Dropping(steps=2)

    def watch(run):
        if run.step == 0:
            run.model[1].register_forward_hook(lambda m, i, o: masks.append((o == 0)[0].tolist()))

    def trained():
        found = record(job, "dp2", on_step=watch)
        return [seen.losses for seen in found]

    first, second = trained(), trained()
    assert first == second
    (lone,) = record(job)
    assert lone.losses[0] != first[0][0]


@pytest.mark.parametrize("layout", ["lone", "dp2"])
def test_a_norm_that_the_job_froze_stays_frozen_also_after_an_evaluation(layout):
    class Frozen(jobs.Normed):
        def model(self):
            model = super().model()
            model[1].eval()
            return model

    def evaluate_first(run):
        if run.step == 2:
            run.evaluate()
        assert not run.model[1].training
        assert run.model[0].training

    (reference,) = record(Frozen, on_step=evaluate_first)
    assert int(reference.state["1.num_batches_tracked"]) == 0
    assert_same_training(record(Frozen, layout, on_step=evaluate_first), reference)
