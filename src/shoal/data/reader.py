"""Step number -> this rank's batch, for data sets with an index (`MapReader`) and without (`StreamReader`).

A reader runs in the rank itself or in loader workers and gives the same batches in both. It holds no state
that a batch depends on: how far a stream has been read only says how much of it is still to be passed over.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from shoal.data.digest import digest
from shoal.data.order import sample_order
from shoal.data.plan import RankBatch, RankPlan, Sharing, cut, locate
from shoal.data.randomness import draws_nothing, seed_streams, streams_kept
from shoal.data.stream import StreamBatch, read_stream, worker_hidden
from shoal.errors import DataError

Collate = Callable[[list[Any]], Any]

# Sets what a collate function draws apart from what the samples draw.
_COLLATING = 1


class Reader(ABC):
    """The batch of any step; `None` where the data end before it."""

    @abstractmethod
    def __getitem__(self, step: int) -> RankBatch | None: ...


class MapReader(Reader):
    """Reads a data set that has a length and an index; `collate=None` is torch's own."""

    def __init__(self, dataset: Any, num_samples: int, sharing: Sharing, collate: Collate) -> None:
        self._dataset = dataset
        self._num_samples = num_samples
        self._sharing = sharing
        self._collate = collate
        self._quiet = draws_nothing(dataset, collate)

    def __getitem__(self, step: int) -> RankBatch:
        sharing = self._sharing
        batch = locate(step, self._num_samples, sharing.batch_size)
        plan = cut(batch, rank=sharing.rank, num_ranks=sharing.num_ranks, micro=sharing.micro)
        order = sample_order(
            self._num_samples, sharing.seed, batch.epoch, plan.start, plan.stop, shuffle=sharing.shuffle
        )
        # Python integers: a data set may use its index as a key of a dict or of JSON.
        ids: list[int] = order.tolist()
        with self._streams():
            samples = [self._read(index, plan) for index in ids]
            return assemble(plan, ids, samples, self._collate, seed=None if self._quiet else sharing.seed)

    def _streams(self) -> AbstractContextManager[None]:
        return nullcontext() if self._quiet else streams_kept()

    def _read(self, index: int, plan: RankPlan) -> Any:
        epoch, step = plan.batch.epoch, plan.batch.step
        if not self._quiet:
            seed_streams(self._sharing.seed, epoch, index)
        try:
            return self._dataset[index]
        except StopIteration as stop:
            # Left as it is, it would end the loop over batches in silence.
            raise DataError(f"dataset[{index}] raised StopIteration (epoch {epoch}, step {step}).") from stop
        except Exception as error:
            error.add_note(f"while reading dataset[{index}] (epoch {epoch}, step {step})")
            raise


class StreamReader(Reader):
    """Reads an iterable data set forward, and keeps this rank's slice of each batch.

    Every rank and every worker reads the whole stream, so each knows where a pass ends, and none needs the
    others. A step that lies before the last one read cannot be had again.
    """

    def __init__(self, dataset: Any, sharing: Sharing, collate: Collate) -> None:
        self._dataset = dataset
        self._sharing = sharing
        self._collate = collate
        self._batches: Iterator[StreamBatch] | None = None
        self._has_told = False

    def __getitem__(self, step: int) -> RankBatch | None:
        with streams_kept():
            with worker_hidden():
                found = self._read_on_to(step)
            return None if found is None else self._take(found)

    def _read_on_to(self, step: int) -> StreamBatch | None:
        if self._batches is None:
            self._batches = read_stream(self._dataset, self._sharing, first_step=step)
        return next((found for found in self._batches if found.batch.step == step), None)

    def _take(self, found: StreamBatch) -> RankBatch:
        sharing, first = self._sharing, found.batch.start
        plan = cut(found.batch, rank=sharing.rank, num_ranks=sharing.num_ranks, micro=sharing.micro)
        samples = found.samples[plan.start - first : plan.stop - first]
        batch = assemble(plan, list(range(plan.start, plan.stop)), samples, self._collate, seed=sharing.seed)
        if self._has_told:
            return batch
        self._has_told = True
        return replace(batch, digest=digest(found.samples))


def assemble(plan: RankPlan, ids: list[int], samples: list[Any], collate: Collate, *, seed: int | None) -> RankBatch:
    """Collates the samples of a plan; with a seed, what `collate` draws is fixed by its first sample."""
    batch = plan.batch
    micro = []
    for start, stop in ((start - plan.start, stop - plan.start) for start, stop in plan.micro):
        if seed is not None:
            seed_streams(seed, batch.epoch, ids[start], _COLLATING)
        try:
            micro.append(collate(samples[start:stop]))
        except Exception as error:
            error.add_note(f"while collating samples {ids[start:stop]} (epoch {batch.epoch}, step {batch.step})")
            raise
    return RankBatch(
        step=batch.step,
        epoch=batch.epoch,
        micro=tuple(micro),
        num_samples=plan.num_samples,
        num_global=batch.stop - batch.start,
        sample_ids=tuple(ids[: plan.num_samples]),
        last_of_epoch=batch.last_of_epoch,
    )
