"""Resume is exact: the steps after it are those of the run that was never interrupted, bit for bit."""

import functools
import random
import shutil
from dataclasses import dataclass

import jobs
import numpy as np
import pytest
import torch
from torch import nn
from trainings import Record, assert_same_training, checkpoint_steps, record, rest_of_run

from shoal.checkpoint import Writer
from shoal.errors import CheckpointError, ShoalError
from shoal.run import assemble
from shoal.world import World

STEPS = 10  # of 4 per epoch, so that steps 4 and 8 end an epoch with a ragged batch


class Noisy:
    """Augments with all three global generators."""

    def __init__(self, plain):
        self._plain = plain

    def __len__(self):
        return len(self._plain)

    def __getitem__(self, index):
        inputs, target = self._plain[index]
        noise = torch.randn(4, dtype=torch.float64) + random.random() + np.random.rand()
        return inputs + 0.1 * noise, target


@dataclass(frozen=True, kw_only=True)
class Whole(jobs.Adamant):
    """Everything that has a state: dropout, BatchNorm, AdamW, a schedule, augmentation."""

    steps: int = STEPS

    def model(self):
        return nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)
        )

    def data(self):
        return Noisy(jobs.points(self.num_samples))

    def evaluation(self):
        return jobs.points(11)


def stop_at(step: int):
    def stop(run):
        if run.step == step:
            raise KeyboardInterrupt

    return stop


def interrupted(layout: str, step: int, folder) -> None:
    """Leaves a checkpoint of `step` and a run that died after it."""
    with pytest.raises((KeyboardInterrupt, AssertionError)):
        record(Whole, layout, on_step=stop_at(step), folder=folder, save_every=1)


@pytest.mark.parametrize("layout", ["lone", "dp2", pytest.param("dp2:workers=2", marks=pytest.mark.drill)])
def test_resume_at_every_step_is_bit_equal(layout, tmp_path):
    whole = record(Whole, layout)
    saved = record(Whole, layout, folder=tmp_path / "saved", save_every=1, keep=STEPS)
    assert_bit_equal(saved, whole, 0)
    for step in range(1, STEPS):
        folder, name = tmp_path / f"{step}", f"checkpoints/step_{step:06d}"
        shutil.copytree(tmp_path / "saved" / name, folder / name)  # what a run that died after this step leaves
        resumed = record(Whole, layout, folder=folder, resume="auto")
        assert_bit_equal(resumed, whole, step)


def assert_bit_equal(resumed: list[Record], whole: list[Record], step: int) -> None:
    for seen, expected in zip(resumed, whole, strict=True):
        assert seen.losses == expected.losses[step:]
        assert seen.lrs == expected.lrs[step:]
        assert seen.state.keys() == expected.state.keys()
        for name, tensor in seen.state.items():
            assert torch.equal(tensor, expected.state[name]), name
        assert {n: float(v) for n, v in seen.evaluation.items() if v.numel() == 1} == {
            n: float(v) for n, v in expected.evaluation.items() if v.numel() == 1
        }


CONTINUED = [
    ("dp2", "lone"),
    ("lone", "dp3"),
    ("dp4", "dp2:micro=2"),
    ("dp2", "fsdp2"),
    ("fsdp3", "tp2"),
    ("tp2", "lone"),
    ("lone", "fsdp2.tp2"),
    ("fsdp2.tp2", "dp2.fsdp2"),
    ("dp2.tp2", "fsdp2:reshard=false"),
    ("dp2:zero=1", "fsdp2"),
    ("lone", "dp2.tp2:zero=1"),
]


@functools.cache
def whole_adamant() -> Record:
    """In one process, never interrupted."""
    (whole,) = record(lambda: jobs.Adamant(steps=STEPS))
    return whole


@pytest.fixture(scope="module")
def died_after_6(tmp_path_factory):
    """The folder of a run that died after step 6 of a layout; each layout is run once."""

    @functools.cache
    def died(layout: str):
        folder = tmp_path_factory.mktemp("died")
        with pytest.raises((KeyboardInterrupt, AssertionError)):
            record(lambda: jobs.Adamant(steps=STEPS), layout, on_step=stop_at(6), folder=folder, save_every=6)
        return folder

    return died


@pytest.mark.parametrize(("before", "after"), CONTINUED)
def test_another_layout_continues_the_same_training(before, after, died_after_6, tmp_path):
    """D126: the position is a global one; no sample repeats or vanishes. Each rank reads what it holds, AdamW's too."""
    resumed = record(lambda: jobs.Adamant(steps=STEPS), after, folder=tmp_path, resume=died_after_6(before))
    assert_same_training(resumed, rest_of_run(6, whole_adamant()))


def test_a_resumed_run_says_the_lr_of_the_step_that_comes(tmp_path):
    (whole,) = record(Whole)
    interrupted("lone", 3, tmp_path)
    with World.open("lone") as world:
        afresh = assemble(Whole(), world, quiet=True)
        resumed = assemble(Whole(), world, folder=tmp_path, resume="auto", quiet=True)
        resumed.close()
    assert f"lr      {whole.lrs[0]:g} at the start, as" in str(afresh.ledger)
    assert f"lr      {whole.lrs[3]:g} at step 4, as" in str(resumed.ledger)
    assert f"{whole.lrs[3]:g}" != f"{whole.lrs[0]:g}"


def test_fp16_resumes_with_its_loss_scale(tmp_path):
    def job():
        return Whole(precision="fp16", steps=6)

    class Floats(Whole):
        def data(self):
            return [(x.float(), y) for x, y in jobs.points(self.num_samples)]

        def evaluation(self):
            return None

    def made():
        return Floats(precision="fp16", steps=6)

    (whole,) = record(made)
    with pytest.raises((KeyboardInterrupt, AssertionError)):
        record(made, on_step=stop_at(3), folder=tmp_path, save_every=3)
    (resumed,) = record(made, folder=tmp_path, resume="auto")
    assert resumed.losses == whole.losses[3:]


def test_resume_goes_on_past_the_old_end_when_more_steps_are_asked_for(tmp_path):
    record(lambda: jobs.Points(steps=3), folder=tmp_path)
    (more,) = record(lambda: jobs.Points(steps=5), folder=tmp_path, resume="auto")
    (whole,) = record(lambda: jobs.Points(steps=5))
    assert more.losses == whole.losses[3:]


def test_another_job_is_refused_with_the_fields_that_differ(tmp_path):
    record(jobs.Points, folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"lr: saved 0\.1, now 0\.2"):
        record(lambda: jobs.Points(lr=0.2), folder=tmp_path, resume="auto")


def test_a_fresh_run_never_mixes_with_an_old_one(tmp_path):
    record(jobs.Points, folder=tmp_path)
    with pytest.raises(CheckpointError, match="--resume auto"):
        record(jobs.Points, folder=tmp_path)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(tmp_path):
    record(jobs.Points, folder=tmp_path, save_every=2)
    newest = tmp_path / "checkpoints" / "step_000005"
    (data,) = newest.glob("*.safetensors")
    flipped = bytearray(data.read_bytes())
    flipped[-1] ^= 1
    data.write_bytes(flipped)
    found = record(jobs.Points, "dp2", folder=tmp_path, resume="auto")
    assert any("step_000005" in note and "damaged" in note for note in found[0].notes)
    assert any("resumed" in note and "step 4" in note for note in found[0].notes)
    assert len(found[0].losses) == 1


def test_no_good_checkpoint_in_a_named_folder_is_an_error(tmp_path):
    with pytest.raises(ShoalError, match="no good checkpoint"):
        record(jobs.Points, folder=tmp_path / "new", resume=tmp_path)


def test_only_the_last_ones_are_kept(tmp_path):
    record(jobs.Points, folder=tmp_path, save_every=1, keep=2)
    assert checkpoint_steps(tmp_path) == [4, 5]


@pytest.mark.parametrize(("save_every", "made"), [(2, ["after step 1"]), (None, [])])
def test_room_for_saves_is_made_once_and_where_steps_would_wait_for_it(tmp_path, monkeypatch, save_every, made):
    seen, prepare = [], Writer.prepare

    def watched(writer, tree):
        seen.append(f"after step {tree['position']['step']}")
        assert tree["optimizer"]["state"]  # which is most of what a save copies
        prepare(writer, tree)

    monkeypatch.setattr(Writer, "prepare", watched)
    with World.open("lone") as world:
        run = assemble(jobs.Adamant(steps=4), world, folder=tmp_path, save_every=save_every, quiet=True)
        for step in run.steps():
            step()
            run.save_if_due()
        run.close()
    assert seen == made
    assert checkpoint_steps(tmp_path)[-1] == 4


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    held = Writer(tmp_path / "checkpoints")
    with pytest.raises(ShoalError, match="being written by another process"):
        record(jobs.Points, "dp2", folder=tmp_path, resume="auto")
    held.close()
    record(jobs.Points, "dp2", folder=tmp_path, resume="auto")
    assert checkpoint_steps(tmp_path) == [5]


def test_a_rank_that_cannot_see_the_checkpoint_stops_all(tmp_path):
    """D076, D134: rank 0 decides; a host without the shared folder is named, and nobody waits for it."""
    record(jobs.Points, folder=tmp_path)

    class Points(jobs.Points):  # the same identity
        def scheduler(self, optimizer):
            if torch.distributed.get_rank() == 1:
                import shoal.run.run

                def gone(path, plan):
                    raise CheckpointError(f"no checkpoint at {path}.")

                shoal.run.run.read = gone
            return

    Points.__module__, Points.__qualname__ = jobs.Points.__module__, jobs.Points.__qualname__
    with pytest.raises(CheckpointError, match=r"rank 1 cannot read the checkpoint.*every host sees it"):
        record(Points, "dp2", folder=tmp_path / "new", resume=tmp_path)


@pytest.mark.parametrize("kind", ["cosine", "one_cycle", "sequential"])
def test_a_schedule_made_for_a_number_of_steps_does_not_go_on_to_more(kind, tmp_path):
    class Scheduled(jobs.Points):
        def scheduler(self, optimizer):
            schedules = torch.optim.lr_scheduler
            if kind == "cosine":
                return schedules.CosineAnnealingLR(optimizer, T_max=self.steps)
            if kind == "one_cycle":
                return schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.steps)
            rise = schedules.LinearLR(optimizer, total_iters=2)
            return schedules.SequentialLR(
                optimizer, [rise, schedules.CosineAnnealingLR(optimizer, T_max=self.steps)], milestones=[2]
            )

    with pytest.raises((KeyboardInterrupt, AssertionError)):
        record(lambda: Scheduled(steps=6), on_step=stop_at(4), folder=tmp_path, save_every=2)
    with pytest.raises(CheckpointError, match="made for a number of steps"):
        record(lambda: Scheduled(steps=9), folder=tmp_path, resume="auto")
    (resumed,) = record(lambda: Scheduled(steps=6), folder=tmp_path, resume="auto")
    assert len(resumed.losses) == 2


def test_a_mistake_in_the_metrics_is_found_before_the_first_step(tmp_path):
    class Mistaken(jobs.Points):
        def metrics(self, output, batch):
            return {"accuracy": (output.argmax(-1) == batch[1]).double().mean()}

    with pytest.raises(ShoalError, match="metric 'accuracy' is Tensor, not a Sum"):
        record(Mistaken, folder=tmp_path)
    assert checkpoint_steps(tmp_path) == []
