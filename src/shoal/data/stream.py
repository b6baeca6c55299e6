"""Iterable data sets, endless ones too: global batches in the order of the stream, pass after pass.

What a data set may offer besides `__iter__`, both optional:

- `set_epoch(epoch)`: called before each pass, to order it anew.
- `skip(num_samples)`: returns a data set (or an iterator) that yields what follows the first `num_samples` of
  the pass. A resumed run calls it once, for the first pass, where a try shows that it changes nothing; else, and
  without it, the samples are read and passed over.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch.utils.data
from torch.utils.data import get_worker_info

from shoal.data.digest import digest
from shoal.data.plan import GlobalBatch, Sharing
from shoal.data.randomness import seed_streams
from shoal.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBatch:
    """A global batch with all its samples."""

    batch: GlobalBatch
    samples: list[Any]


def read_stream(dataset: Any, sharing: Sharing, *, first_step: int) -> Iterator[StreamBatch]:
    """The global batches of step `first_step` and after, perhaps those of steps before it too."""
    step, samples = _begin(dataset, sharing, first_step)
    for epoch in count() if sharing.epochs is None else range(sharing.epochs):
        if epoch:
            samples = _read_pass(dataset, sharing.seed, epoch)
        position = step * sharing.batch_size if epoch == 0 else 0
        ahead = list(islice(samples, 1))
        if not ahead:
            raise DataError(_EMPTY_PASS.format(epoch=epoch))
        while ahead:
            batch = ahead + list(islice(samples, sharing.batch_size - 1))
            # Only the sample after a batch tells whether the pass ends with it.
            ahead = list(islice(samples, 1))
            stop = position + len(batch)
            yield StreamBatch(
                batch=GlobalBatch(step=step, epoch=epoch, start=position, stop=stop, last_of_epoch=not ahead),
                samples=batch,
            )
            step, position = step + 1, stop


_EMPTY_PASS = (
    "pass {epoch} over the iterable dataset yields no sample. Each iter(dataset) must start a new pass: "
    "let __iter__ open the source, do not return an iterator that was made once."
)


def _begin(dataset: Any, sharing: Sharing, first_step: int) -> tuple[int, Iterator[Any]]:
    """The step at which the first pass is entered, and its samples from there.

    That is `first_step` where the data set can skip and the pass reaches so far. In a later pass nobody knows
    where it begins without having read the ones before: then all is read from step 0.
    """
    if first_step and callable(getattr(dataset, "skip", None)) and _skips_exactly(dataset, sharing.seed):
        samples = _read_pass(dataset, sharing.seed, 0, num_skipped=first_step * sharing.batch_size)
        for sample in samples:
            return first_step, chain([sample], samples)
    return 0, _read_pass(dataset, sharing.seed, 0)


def _skips_exactly(dataset: Any, seed: int) -> bool:
    """Whether what follows a skip is what would have come without it.

    A pass that draws its order, or a sample that draws noise, from the global generators may give others.
    """
    plain = list(islice(_read_pass(dataset, seed, 0), 2))
    skipped = list(islice(_read_pass(dataset, seed, 0, num_skipped=1), 1))
    return len(plain) == 2 and digest(plain[1:]) == digest(skipped)


def _read_pass(dataset: Any, seed: int, epoch: int, *, num_skipped: int = 0) -> Iterator[Any]:
    """One pass; what the data set draws for a sample depends on (seed, epoch, position) alone."""
    seed_streams(seed, epoch)
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
    source = iter(dataset.skip(num_skipped) if num_skipped else dataset)
    for position in count(num_skipped):
        # A pass orders itself at its first sample, wherever that lies.
        seed_streams(seed, epoch, 0 if position == num_skipped else position)
        try:
            sample = next(source)
        except StopIteration:
            return
        except Exception as error:
            error.add_note(f"while reading sample {position} of pass {epoch} over the iterable dataset")
            raise
        yield sample


@contextmanager
def worker_hidden() -> Iterator[None]:
    """Lets a data set believe that it is read by the main process, so that it does not share itself out.

    Whoever asks `get_worker_info` yields every n-th sample only; here each worker must see the whole stream.
    """
    info = get_worker_info()
    if info is None:
        yield
        return
    worker = torch.utils.data._utils.worker
    worker._worker_info = None
    try:
        if get_worker_info() is not None:
            raise DataError(
                f"torch {torch.__version__} keeps its worker info in another place than shoal knows, so an "
                "iterable dataset cannot be read in workers. Use num_workers=0."
            )
        yield
    finally:
        worker._worker_info = info
