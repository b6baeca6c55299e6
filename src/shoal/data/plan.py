"""Who gets which sample of which step: pure arithmetic, no data touched.

    the order of an epoch   |  step 0  |  step 1  |  step 2  | 3 |      every batch full but the last
    a global batch          |  rank 0   |  rank 1   |  rank 2  |       lengths within one of each other
    a rank's slice          | micro 0 | micro 1 | micro 2 |            lengths within one of each other

Each level cuts a contiguous stretch of the level above, so the samples of step k, and their order, are the
same for every number of ranks and of micro-batches.
"""

from dataclasses import dataclass
from typing import Any

from shoal.data.order import split_evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """What one rank trains on in one step.

    Attributes:
        step: counted from the start of the run.
        epoch: the pass over the data in which the step lies.
        micro: the collated micro-batches of this rank, at least one.
        num_samples: this rank's samples. With 0, `micro` holds one stand-in (the first sample of the same
            global batch), so that the rank can take part with weight 0.
        num_global: samples of the whole global batch.
        sample_ids: dataset indices of this rank in order; positions in the pass for an iterable dataset.
        last_of_epoch: whether the epoch ends with this step.
        digest: of all samples of the global batch, for the first one that a reader takes from a stream; else empty.
    """

    step: int
    epoch: int
    micro: tuple[Any, ...]
    num_samples: int
    num_global: int
    sample_ids: tuple[int, ...]
    last_of_epoch: bool
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The values that decide who gets which sample."""

    batch_size: int
    rank: int = 0
    num_ranks: int = 1
    micro: int = 1
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The samples of one step over all ranks: positions [start, stop) of the epoch's order."""

    step: int
    epoch: int
    start: int
    stop: int
    last_of_epoch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's part of a global batch: positions [start, stop) of each micro-batch in the epoch's order."""

    batch: GlobalBatch
    num_samples: int
    micro: tuple[tuple[int, int], ...]

    @property
    def start(self) -> int:
        return self.micro[0][0]

    @property
    def stop(self) -> int:
        return self.micro[-1][1]


def count_steps(num_samples: int, batch_size: int) -> int:
    """Steps of one epoch; the last may be ragged."""
    return -(-num_samples // batch_size)


def locate(step: int, num_samples: int, batch_size: int) -> GlobalBatch:
    """The global batch of step `step` of a run, where every epoch has `num_samples`."""
    epoch, step_of_epoch = divmod(step, count_steps(num_samples, batch_size))
    start = step_of_epoch * batch_size
    stop = min(start + batch_size, num_samples)
    return GlobalBatch(step=step, epoch=epoch, start=start, stop=stop, last_of_epoch=stop == num_samples)


def cut(batch: GlobalBatch, *, rank: int, num_ranks: int, micro: int = 1) -> RankPlan:
    """One rank's micro-batches of a global batch, none of them empty.

    A rank with no sample gets the stand-in: the batch's first sample, counted as none.
    """
    start, stop = split_evenly(batch.start, batch.stop, num_ranks, rank)
    if start == stop:
        return RankPlan(batch=batch, num_samples=0, micro=((batch.start, batch.start + 1),))
    parts = min(micro, stop - start)
    slices = tuple(split_evenly(start, stop, parts, part) for part in range(parts))
    return RankPlan(batch=batch, num_samples=stop - start, micro=slices)
