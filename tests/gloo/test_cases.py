"""Failures that people met with other tools, acted out on this one; docs/cases.md has the whole list."""

import os
import re
import signal
import time
from dataclasses import dataclass

import jobs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_own_loop import in_world
from torch import nn
from trainings import assert_same_training, record

import shoal
from shoal.job import mean_loss
from shoal.launch import run_script, start, warm_up
from shoal.metrics.events import read_events
from shoal.parallel import replicate
from shoal.world import World

warm_up()
AFTER_THE_LIMIT_S = 5.0


def told(work, job, layout="dp2", *, limit_s=1.0):
    """Runs work(run) on two ranks that wait `limit_s` for each other; the outcome and what was shown."""
    shown: list[str] = []

    def rank(place):
        with World.open(layout, place=place, timeout_min=limit_s / 60, setup_min=2 * limit_s / 60) as world:
            work(shoal.assemble(job, world, quiet=True))

    outcome = start(rank, 2, screen=shown.append, show="none")
    return outcome, "\n".join(shown)


def walk_all(run):
    for step in run.steps():
        step()


# -- numbers --------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x), self.other(x)


@dataclass(frozen=True, kw_only=True)
class Heads(jobs.Points):
    """Two outputs; the loss takes the second one for `rare` samples only, or for none."""

    rare: bool = False

    def model(self):
        return TwoHeads()

    def loss(self, output, batch):
        losses = F.cross_entropy(output[0], batch[1], reduction="none")
        large = batch[0][:, 0] > 0.9
        if self.rare and large.any():
            losses = losses + large * output[1].square().sum(1)
        return mean_loss(losses)

    def metrics(self, output, batch):
        return {}


@pytest.mark.parametrize("layout", ["dp2", "dp2:micro=2"])
@pytest.mark.parametrize("rare", [False, True])
def test_an_output_that_the_loss_leaves_out_stops_no_reduction(rare, layout):
    """D100, D045: in all steps, or on some ranks in some steps."""
    (reference,) = record(lambda: Heads(rare=rare))
    used = {grads["other.weight"] is not None for grads in reference.grads}
    assert used == ({True, False} if rare else {False})
    assert_same_training(record(lambda: Heads(rare=rare), layout), reference)


class Overflowing(jobs.Adamant):
    """In fp16: the loss of sample 13 is too large for the scale; one rank has it."""

    def data(self):
        inputs, targets = jobs.points(24).tensors
        return torch.utils.data.TensorDataset(inputs.float(), targets, (torch.arange(24) == 13) * 1e4 + 1.0)

    def loss(self, output, batch):
        return mean_loss(F.cross_entropy(output.float(), batch[1], reduction="none") * batch[2])

    def evaluation(self):
        return None


def test_the_loss_scale_is_one_on_all_ranks_after_an_overflow_on_one():
    """D043, D044: scale and skipped steps are decided by gradients that are reduced already."""

    def trained(world):
        run = shoal.assemble(Overflowing(precision="fp16", steps=8), world, quiet=True)
        scales, skipped = [], []
        for step in run.steps():
            result = step()
            scales.append(run._engine.scaler.get_scale())
            skipped.append(bool(result.skipped))
        run.close()
        return scales, skipped, run.model[0].weight.detach().clone()

    (one, skipped, weight), (other, others_skipped, others_weight) = in_world("dp2", trained)
    assert True in skipped
    assert False in skipped
    assert min(one) < max(one)
    assert (one, skipped) == (other, others_skipped)
    assert torch.equal(weight, others_weight)


class Gather(torch.autograd.Function):
    """All ranks' rows; backward adds what every rank wants of this rank's."""

    @staticmethod
    def forward(ctx, own):
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.tensor_split(dist.get_world_size())[dist.get_rank()]


def gather_without_gradient(own):
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own.detach())
    rows[dist.get_rank()] = own
    return torch.cat(rows)


@pytest.mark.parametrize(("gather", "share"), [(Gather.apply, 1.0), (gather_without_gradient, 0.5)])
def test_a_contrastive_loss_over_all_ranks_needs_a_gather_that_has_a_gradient(gather, share):
    """D048, D049: then the whole loss, computed on every rank, has the gradient of one process; else the half."""

    def gradient(world):
        torch.manual_seed(0)
        model = shoal.place(nn.Linear(4, 3).double(), world)
        own = model(jobs.points(8).tensors[0].tensor_split(world.size)[world.rank])
        embedded = own if world.kind == "lone" else gather(own)
        F.cross_entropy(embedded @ embedded.T, torch.arange(8).roll(4)).backward()
        return model.weight.grad.clone()

    (reference,) = in_world("lone", gradient)
    for grad in in_world("dp2", gradient):
        assert torch.allclose(grad, share * reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("micro", [3, 64])
def test_more_micro_batches_than_samples_still_make_every_step(micro):
    """D005: five samples; the sixth micro-batch does not exist, the step does."""

    def job():
        return jobs.Points(batch_size=5, num_samples=5, steps=3)

    (reference,) = record(job)
    assert_same_training(record(job, f"lone:micro={micro}"), reference)


def test_the_logged_loss_is_that_of_the_global_batch(tmp_path):
    """D069, D015: batches of 7 over two ranks, so that a mean of the ranks' means would differ."""

    def logged(layout):
        record(jobs.Points, layout, folder=tmp_path / layout)
        return [
            event["train/loss"] for event in read_events(tmp_path / layout / "metrics.jsonl") if "train/loss" in event
        ]

    lone = logged("lone")
    assert len(lone) == 5
    assert logged("dp2") == pytest.approx(lone, rel=1e-12)


def test_what_the_forward_writes_on_the_module_stays():
    """D068: every rank runs the user's own module, no throw-away replica of it."""

    class Counter(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    class Counted(jobs.Points):
        def model(self):
            return Counter(4, 3)

    def trained(world):
        run = shoal.assemble(Counted(steps=4), world, quiet=True)
        walk_all(run)
        run.close()
        return run.model.calls

    assert in_world("dp2", trained) == [5, 5]  # four steps, and the look at the metrics before them


@pytest.mark.parametrize("bucket_mb", [0.0001, 1000])
def test_the_size_of_the_buckets_changes_no_number(bucket_mb, monkeypatch):
    """D170, D171: nobody sets it, since only time depends on it."""
    (reference,) = record(jobs.Tokens)
    monkeypatch.setitem(replicate._BUCKET_MB, "gloo", bucket_mb)
    assert_same_training(record(jobs.Tokens, "dp2"), reference)


# -- ranks that part ------------------------------------------------------------------------------------


def test_a_loop_that_stops_at_a_loss_stops_on_all_ranks_at_one_step():
    """D077: what a step and an evaluation give is equal on all ranks, so a decision upon it is too."""

    def trained(world):
        run = shoal.assemble(jobs.Points(steps=30), world, quiet=True)
        first = run.evaluate()["loss"]
        for step in run.steps():
            result = step()
            if result.loss < 1.0 and run.evaluate()["loss"] < first:
                break
        run.close()
        world.barrier()
        return run.step, float(result.loss)

    one, other = in_world("dp2", trained)
    assert one == other
    assert 1 < one[0] < 30


def test_a_call_that_rank_0_makes_alone_ends_at_the_limit_with_both_places():
    """D073: the classic `if rank == 0: save()`, with a call that all ranks must make."""

    def work(run):
        for step in run.steps():
            step()  # where rank 1 is
            if run.world.rank == 0:
                run.evaluate()  # where rank 0 is

    outcome, shown = told(work, jobs.Points(steps=9))
    assert outcome.exit_code == 1
    assert outcome.seconds < 1.0 + AFTER_THE_LIMIT_S
    assert "step()  # where rank 1 is" in shown
    assert re.search(r"rank 0: .*, at .*test_cases.py:\d+ in work", shown)


def test_a_sample_that_never_comes_is_shown_with_its_rank_and_line():
    """D097: the others wait at the limit; whoever hangs is named, and where."""

    class Stuck(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            if index == 13:
                time.sleep(600)
            return jobs.points(24)[index]

    class Sticking(jobs.Points):
        def data(self):
            return Stuck()

    outcome, shown = told(walk_all, Sticking(batch_size=8, steps=3))
    assert outcome.exit_code == 1
    assert outcome.seconds < 1.0 + AFTER_THE_LIMIT_S
    assert re.search(r"was still running, in step 2, data.*, at .*test_cases.py:\d+ in __getitem__; it", shown)


def test_a_script_that_cannot_start_is_started_once(tmp_path):
    """D144: nothing restarts a mistake."""
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\nimport nothing_of_this_name\n")
    shown: list[str] = []
    outcome = run_script(script, (), 1, screen=shown.append, show="none")
    assert outcome.exit_code == 1
    assert (tmp_path / "starts").read_text() == "x"
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in "\n".join(shown)


# -- data -----------------------------------------------------------------------------------------------


def test_a_job_may_hold_what_no_pickle_can():
    """D094: lambdas in model, data and collate, in ranks and in loader workers."""

    class Unpicklable(jobs.Points):
        def model(self):
            model = super().model()
            model.scale = lambda x: 2 * x
            model.register_forward_pre_hook(lambda module, args: module.scale(args[0]))
            return model

        def data(self):
            plain = jobs.points(24)
            Rows = type("Rows", (), {"__len__": lambda _: 24, "__getitem__": lambda _, index: plain[index]})  # noqa: N806
            return Rows()

    (reference,) = record(Unpicklable)
    assert_same_training(record(Unpicklable, "dp2:workers=1"), reference)


def test_a_loader_worker_that_dies_of_full_shared_memory_says_so():
    """D095: the kernel sends SIGBUS; here the sample does."""

    class Bursting(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            if index == 13:
                signal.signal(signal.SIGBUS, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGBUS)
            return jobs.points(24)[index]

    class Burst(jobs.Points):
        def data(self):
            return Bursting()

    with pytest.raises(RuntimeError, match=r"Bus error[\s\S]*shared memory"):
        record(Burst, "dp2:workers=1")


def test_slow_data_show_as_data_wait(tmp_path):
    """D168: of the slowest rank, as a share of the time."""

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            time.sleep(0.02)
            return jobs.points(24)[index]

    class Slowly(jobs.Points):
        def data(self):
            return Slow()

    record(lambda: Slowly(batch_size=8), "dp2", folder=tmp_path)
    waits = [event["perf/data_wait"] for event in read_events(tmp_path / "metrics.jsonl") if "perf/data_wait" in event]
    assert max(waits) > 0.5
