"""threadsN: replicas in threads are the training of one process, again bit for bit in every run, or refused."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jobs
import pytest
import torch
from torch import nn
from trainings import assert_same_training, checkpoint_steps, record, rest_of_run
from zoo import ZOO, Convolutions

from shoal.errors import JobError, LayoutError, NumericsError
from shoal.job import Sum
from shoal.metrics.flops import count_flops
from shoal.models.digits import Digits
from shoal.run import assemble
from shoal.verbs.verify import command as verify
from shoal.world import World

SHIPPED = ("transformers",)  # not torch's own: one of them is enough, since importing it takes seconds
KINDS = [name for name in ZOO if name == "BERT (transformers)" or not any(word in name for word in SHIPPED)]


def assert_equal_to_the_bit(seen, reference):
    assert (seen.losses, seen.norms) == (reference.losses, reference.norms)
    assert seen.state.keys() == reference.state.keys()
    assert all(torch.equal(tensor, reference.state[name]) for name, tensor in seen.state.items())


def refused(job, error, match, layout="threads2"):
    with pytest.raises(error, match=match) as caught:
        record(job, layout)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def num_replica_threads():
    return sum(thread.name.startswith("shoal-replica") for thread in threading.enumerate())


# --- the same training


@pytest.mark.parametrize("layout", ["threads2", "threads3", "threads4"])
@pytest.mark.parametrize(
    "job",
    [jobs.Points, jobs.Normed, jobs.Adamant, jobs.Tokens, jobs.Branching, jobs.SparseRows],
    ids=lambda j: j.__name__,
)
def test_replicas_in_threads_are_the_same_training_as_lone(job, layout):
    (reference,) = record(job)
    assert_same_training(record(job, layout), reference)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_model_trains_in_threads_as_in_one_process(kind):
    (reference,) = record(ZOO[kind])
    assert_same_training(record(ZOO[kind], "threads2"), reference)


def test_digits_trains_in_threads_as_in_one_process():
    def job():
        return Digits(steps=3, width=4, precision="fp64")

    (reference,) = record(job)
    assert_same_training(record(job, "threads2"), reference)


@pytest.mark.parametrize("job", [jobs.Normed, jobs.Tokens], ids=lambda j: j.__name__)
def test_threads_without_samples_stay_out_of_the_step(job):
    def few():
        return job(batch_size=3, num_samples=8)

    (reference,) = record(few)
    assert_same_training(record(few, "threads5"), reference)


def test_what_the_loop_changes_between_steps_holds_in_every_replica():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.scale = nn.Linear(4, 8), nn.Linear(8, 3), 1.0

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)) * self.scale)

    class Changing(jobs.Points):
        def model(self):
            model = Scaled()
            model.first.requires_grad_(False)
            return model

    def change(run):
        run.model.scale = 1.0 + run.step
        if run.step == 2:
            run.model.first.requires_grad_(True)
        if run.step == 3:
            run.model.last.register_forward_hook(lambda module, args, output: output * 2)

    (reference,) = record(Changing, on_step=change)
    assert reference.grads[1]["first.weight"] is None
    assert_same_training(record(Changing, "threads3", on_step=change), reference)


def test_what_a_forward_leaves_on_a_module_does_not_hinder_the_next_step():
    class Remembering(nn.Linear):
        def forward(self, x):
            self.last, self.all = super().forward(x), [*getattr(self, "all", [])[-1:], x * self.weight.sum()]
            return self.last

    class Kept(jobs.Points):
        def model(self):
            return nn.Sequential(Remembering(4, 8), nn.Tanh(), nn.Linear(8, 3))

    (reference,) = record(Kept)
    assert_same_training(record(Kept, "threads2"), reference)


def test_local_statistics_are_those_of_the_first_replica_as_of_the_first_rank():
    def job():
        return jobs.Normed(batch_norm="local", batch_size=8)

    assert_same_training(record(job, "threads2"), record(job, "dp2")[0])


@pytest.mark.parametrize("layout", ["lone", "threads2"])
def test_a_step_that_is_skipped_leaves_no_trace(layout):
    class Poisoned(jobs.Normed):
        def data(self):
            inputs, targets = super().data().tensors
            inputs[5] = torch.nan
            return torch.utils.data.TensorDataset(inputs, targets)

    (seen,) = record(lambda: Poisoned(nonfinite="skip", steps=4), layout)
    assert [loss == loss for loss in seen.losses].count(False) == 1
    assert all(bool(tensor.isfinite().all()) for tensor in seen.state.values())
    assert "the loss is not finite" in refused(Poisoned, NumericsError, "samples", layout)


def test_what_is_counted_in_a_step_counts_every_replica():
    def flops(layout):
        with World.open(layout, device="cpu") as world:
            run = assemble(jobs.Tokens(), world, quiet=True)
            with count_flops() as count:
                next(run.steps())()
            run.close()
        return count.model

    assert flops("threads3") == flops("lone") > 0


def test_the_threads_end_with_the_world():
    before = num_replica_threads()
    with World.open("threads3", device="cpu") as world:
        run = assemble(jobs.Points(), world, quiet=True)
        next(run.steps())()
        run.close()
        assert num_replica_threads() == before + 2
    assert num_replica_threads() == before


def test_verify_finds_threads_to_be_the_same_training():
    report = verify(jobs.Normed(), "threads2")
    assert (report.verdict, report.findings) == ("same", [])


# --- the same again


@pytest.mark.parametrize(("job", "precision"), [(Convolutions, "fp64"), (jobs.Tokens, "fp64"), (jobs.Tokens, "bf16")])
def test_a_run_repeats_bit_for_bit(job, precision):
    def made():
        return job(precision=precision, steps=4)

    (first,), (second,) = record(made, "threads3"), record(made, "threads3")
    assert_equal_to_the_bit(second, first)


def test_a_resume_goes_on_bit_for_bit_and_in_another_layout(tmp_path):
    (whole,) = record(jobs.Normed, "threads2", folder=tmp_path / "a", save_every=2, keep=9)
    assert checkpoint_steps(tmp_path / "a") == [2, 4, 5]
    start = tmp_path / "a" / "checkpoints" / "step_000002"
    (rest,) = record(jobs.Normed, "threads2", resume=start)
    assert_equal_to_the_bit(rest, rest_of_run(2, whole))
    assert_same_training(record(jobs.Normed, resume=start), rest_of_run(2, whole))


class Dropping(jobs.Points):
    def model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))


def test_replicas_draw_what_ranks_draw_one_after_the_other():
    (seen,), (again,) = record(Dropping, "threads2"), record(Dropping, "threads2")
    assert_same_training([seen], record(Dropping, "dp2")[0])
    assert_equal_to_the_bit(again, seen)
    assert record(Dropping)[0].losses[0] != seen.losses[0]
    assert any("run one after the other" in note for note in seen.notes)
    assert not any("run one after the other" in note for note in record(jobs.Points, "threads2")[0].notes)


def python_noise(x):
    return x * (1.0 + random.random())


def noise_from_a_stream_that_is_put_back(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x + torch.rand(x.shape, dtype=x.dtype)


@pytest.mark.parametrize("noise", [python_noise, noise_from_a_stream_that_is_put_back])
def test_chance_is_found_wherever_it_comes_from(noise):
    class Noisy(nn.Sequential):
        def forward(self, x):
            return super().forward(noise(x))

    class Noise(jobs.Points):
        def model(self):
            return Noisy(nn.Linear(4, 3))

        def evaluation(self):
            return None  # it would draw too, otherwise in each layout

    (seen,) = record(Noise, "threads2")
    assert any("run one after the other" in note for note in seen.notes)
    assert_same_training([seen], record(Noise, "dp2")[0])


def test_who_begins_to_draw_later_is_refused():
    class Late(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += self.training
            return super().forward(x * torch.rand(()) if self.calls > 2 else x)

    class Starting(jobs.Points):
        def model(self):
            return Late(4, 3)

    refused(Starting, JobError, "in the first it did not")


# --- failures


class Fragile(jobs.Points):
    """Sample 3 breaks the forward, in front of a BatchNorm in which the other replica waits."""

    def model(self):
        class Check(nn.Module):
            def forward(self, x):
                if bool((x == 9).any()):
                    raise ZeroDivisionError("a sample that nobody expected")
                return x

        return nn.Sequential(Check(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def data(self):
        inputs, targets = jobs.points(4).tensors
        inputs[3] = 9
        return torch.utils.data.TensorDataset(inputs, targets)

    def evaluation(self):
        return None


def test_the_failure_of_a_replica_comes_out_with_its_samples():
    with pytest.raises(ZeroDivisionError, match="nobody expected") as caught:
        record(lambda: Fragile(batch_size=4), "threads2")
    told = "\n".join(caught.value.__notes__)
    assert "of 2, with the samples" in told
    assert "in Check" in told or "raise ZeroDivisionError" in told  # the user's own line


def test_replicas_in_different_norms_are_an_error_and_no_hang():
    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.norm(x) if bool(x[0, 0] > 0) else x)

    class Chosen(jobs.Points):
        def model(self):
            return Choosing()

        def evaluation(self):
            return None

    refused(Chosen, JobError, "that another one does not come to")


LOCK = threading.Lock()  # of the user's, for all replicas


class Guarded(nn.Module):
    """A norm under a lock that all replicas need."""

    def __init__(self, first=True):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.first = first  # in the first step, when replicas take turns; or in a later one, side by side
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        if not self.first and self.steps < 3:
            return self.head(self.norm(x))
        with LOCK:
            return self.head(self.norm(x))


@pytest.mark.parametrize("first", [True, False])
def test_a_norm_under_a_lock_that_the_others_need_is_an_error_and_no_hang(first, monkeypatch):
    monkeypatch.setattr("shoal.parallel.stillness.STILL_S", 0.5)

    class UnderLock(jobs.Points):
        def model(self):
            return Guarded(first)

        def evaluation(self):
            return None

    told = refused(UnderLock, JobError, r"waits in the BatchNorm 'norm' for replica . *, which stands still at ")
    assert "test_threads.py:" in told
    assert "in forward" in told
    assert not LOCK.locked()


@pytest.mark.parametrize("swallowed", [True, False])
def test_a_norm_in_a_thread_of_the_forward_s_own_is_an_error_and_no_hang(swallowed):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                made = pool.submit(self.norm, x)
            return self.head(x if swallowed and made.exception() else made.result())

    class Branches(jobs.Points):
        def model(self):
            return Branch()

        def evaluation(self):
            return None

    refused(Branches, JobError, "the BatchNorm 'norm' is called in a thread that the forward itself has started")


def test_who_computes_for_long_does_not_stand_still(monkeypatch):
    """Longer than the limit, between two norms, with the other replica waiting."""
    monkeypatch.setattr("shoal.parallel.stillness.STILL_S", 0.2)
    monkeypatch.setattr("shoal.parallel.meeting.LOOK_S", 0.02)

    class Working(jobs.Points):
        def model(self):
            return Works()

        def evaluation(self):
            return None

    assert len(record(lambda: Working(steps=1), "threads2")) == 1


class Works(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            end = time.thread_time() + 0.5
            while time.thread_time() < end:
                pass
        return self.head(self.norm(x))


# --- refused, with the reason


class Counting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class Renormalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, max_norm=0.1), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table((x[:, 0] > 0).long()))


class Locked(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lock = threading.Lock()


class Hooked(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.register_hook(lambda grad: grad * 2)


class Borrowing(nn.Linear):
    """A buffer that has its value back at the end."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training and self.weight.grad is None and torch.is_grad_enabled():
            self.seen.add_(1).sub_(1)
        return super().forward(x)


class Scratching(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scratch = torch.zeros(4)

    def forward(self, x):
        self.scratch += 1
        return super().forward(x)


class Shrinking(nn.Linear):
    def forward(self, x):
        self.weight.data.mul_(0.9)
        return super().forward(x)


class Rebuilt(nn.Linear):
    def __deepcopy__(self, memo):
        return Rebuilt(self.in_features, self.out_features)


class Special(nn.Parameter):
    pass


class Particular(nn.Linear):
    """What it computes depends on the class of its parameter."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight = Special(self.weight.detach())

    def forward(self, x):
        return super().forward(x) * (2.0 if isinstance(self.weight, Special) else 1.0)


class Adding(nn.Linear):
    """Reads a parameter in an operation that writes, and writes nothing of it."""

    def forward(self, x):
        out = x @ self.weight.T
        out += self.bias
        return out


def test_a_parameter_may_be_read_by_an_operation_that_writes_elsewhere():
    class Given(jobs.Points):
        def model(self):
            return Adding(4, 3)

    (reference,) = record(Given)
    assert_same_training(record(Given, "threads2"), reference)


def test_a_parameter_of_a_class_of_its_own_is_one_in_every_replica():
    class Given(jobs.Points):
        def model(self):
            return Particular(4, 3)

    (reference,) = record(Given)
    assert_same_training(record(Given, "threads3"), reference)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda: Borrowing(4, 3), "writes into seen, in place, and the replicas share it"),
        (lambda: Scratching(4, 3), "writes into scratch, in place, and the replicas share it"),
        (lambda: Shrinking(4, 3), "writes into the parameter weight"),
        (lambda: Rebuilt(4, 3), "makes new parameters"),
        (lambda: Counting(4, 3), "writes into seen, in place, and the replicas share it"),
        (Renormalised, "writes into the parameter table.weight"),
        (lambda: Locked(4, 3), "Locked cannot be copied"),
        (lambda: Hooked(4, 3), "has a gradient hook"),
    ],
    ids=["scratch buffer", "scratch", "data", "deepcopy", "buffer", "parameter", "lock", "hook"],
)
def test_a_model_that_replicas_would_train_otherwise_is_refused(model, match):
    @dataclass(frozen=True, kw_only=True)
    class Given(jobs.Points):
        def model(self) -> Any:
            return model()

    refused(Given, JobError, match)


def test_a_loss_that_does_not_add_up_is_refused():
    class Mean(jobs.Points):
        def loss(self, output, batch):
            return Sum(super().loss(output, batch).mean(), 1)

    refused(Mean, JobError, "does not add up")


@pytest.mark.parametrize("option", ["micro=2", "recompute=block", "compile=block"])
def test_options_that_make_no_sense_in_threads_are_refused(option):
    refused(jobs.Points, LayoutError, option.partition("=")[0], f"threads2:{option}")


def test_shapes_alone_have_no_threads():
    with World.open("threads2", kind="fake") as world, pytest.raises(LayoutError, match="not on shapes alone"):
        assemble(jobs.Points(), world, quiet=True)
