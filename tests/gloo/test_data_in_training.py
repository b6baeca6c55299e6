"""Data in a training: workers, streams and augmentation do not change it, in any layout, nor after a resume."""

import random
from dataclasses import dataclass

import jobs
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from trainings import assert_same_training, record, rest_of_run

from shoal.errors import DataError


class Augmented(torch.utils.data.Dataset):
    """Draws from all three global generators in every sample."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        inputs, target = jobs.points(24)[index]
        noise = torch.randn(4, dtype=torch.float64) + random.random() + np.random.rand()
        return inputs + 0.1 * noise, target


class Stream(IterableDataset):
    """24 samples per pass, shuffled by the pass, with a draw in each."""

    def __iter__(self):
        plain = jobs.points(24)
        for index in np.random.permutation(24):
            inputs, target = plain[int(index)]
            yield inputs + 0.1 * torch.randn(4, dtype=torch.float64), target


@dataclass(frozen=True, kw_only=True)
class Augmenting(jobs.Points):
    def data(self):
        return Augmented()


@dataclass(frozen=True, kw_only=True)
class Streaming(jobs.Points):
    def data(self):
        return Stream()


@pytest.mark.parametrize("layout", ["lone:workers=2", "dp2", "dp2:workers=1", "dp3:workers=2", "dp2:micro=2,workers=1"])
@pytest.mark.parametrize("job", [Augmenting, Streaming], ids=lambda job: job.__name__)
def test_workers_streams_and_augmentation_are_the_same_in_every_layout(job, layout):
    (reference,) = record(job)
    assert_same_training(record(job, layout), reference)


@pytest.mark.parametrize("layout", ["dp2", "dp2:workers=1"])
def test_a_stream_is_resumed_by_consumed_samples(layout, tmp_path):
    """D126, D139: the union of samples before and after is each sample once, in another world too."""
    (whole,) = record(lambda: Streaming(steps=9))
    record(lambda: Streaming(steps=6), folder=tmp_path)
    resumed = record(lambda: Streaming(steps=9), layout, folder=tmp_path / "next", resume=tmp_path)
    assert_same_training(resumed, rest_of_run(6, whole))


def test_loaders_and_samplers_are_refused():
    class Loading(jobs.Points):
        def data(self):
            return torch.utils.data.DataLoader(jobs.points(24), batch_size=2)

    class Sampling(jobs.Points):
        def data(self):
            return torch.utils.data.distributed.DistributedSampler(jobs.points(24), num_replicas=2, rank=0)

    for job in (Loading, Sampling):
        with pytest.raises(DataError):
            record(job, "dp2")


def test_an_exception_in_a_sample_names_the_sample_and_ends_all_ranks():
    class Broken(Augmented):
        def __getitem__(self, index):
            if index == 13:
                raise ZeroDivisionError("a torn image")
            return super().__getitem__(index)

    class Breaking(jobs.Points):
        def data(self):
            return Broken()

    with pytest.raises(ZeroDivisionError, match="a torn image") as caught:
        record(Breaking, "dp2")
    assert "13" in "".join(caught.value.__notes__)


class Skippable(IterableDataset):
    """Can skip; orders its pass, and perhaps its samples' noise, by the global generators."""

    def __init__(self, noisy, start=0):
        self.noisy, self.start = noisy, start

    def skip(self, num_samples):
        return Skippable(self.noisy, num_samples)

    def __iter__(self):
        plain, order = jobs.points(24), list(range(24))
        random.shuffle(order)
        for index in order[self.start :]:
            inputs, target = plain[index]
            yield inputs + (0.1 * torch.randn(4, dtype=torch.float64) if self.noisy else 0), target


@pytest.mark.parametrize("noisy", [False, True])
def test_a_stream_that_can_skip_resumes_with_the_same_samples(noisy, tmp_path):
    class Skipping(jobs.Points):
        def data(self):
            return Skippable(noisy)

    (whole,) = record(lambda: Skipping(steps=4))
    record(lambda: Skipping(steps=2), folder=tmp_path)
    (resumed,) = record(lambda: Skipping(steps=4), folder=tmp_path, resume="auto")
    assert resumed.losses == whole.losses[2:]
