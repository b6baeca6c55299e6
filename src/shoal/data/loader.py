"""Runs a reader over step numbers: in this process, or ahead of time in loader workers."""

import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shoal.data.plan import RankBatch
from shoal.data.reader import Reader
from shoal.dry import numbers
from shoal.errors import ShoalError

_PR_SET_PDEATHSIG = 1
_GRACE_S = 30


def load(
    reader: Reader, steps: Iterable[int], *, num_workers: int = 0, pin_memory: bool = False
) -> Iterator[RankBatch]:
    """The batch of each step in order, until the steps or the data end.

    One loader serves all epochs: workers start once and run ahead over the end of an epoch.
    """
    with numbers():
        loaded = _start(reader, steps, num_workers, pin_memory)
    try:
        for parts in iter(partial(_next, loaded), None):
            if isinstance(parts, ShoalError):
                raise parts
            batch, micro = parts
            yield replace(batch, micro=tuple(micro))
    finally:
        # Torch ends the workers when its iterator is collected; the traceback of an error keeps it from that.
        end_workers = getattr(loaded, "_shutdown_workers", None)
        if end_workers is not None:
            end_workers()


class _Parts(Dataset[tuple[RankBatch, list[Any]] | ShoalError | None]):
    """Hands the micro-batches out beside their batch, since the loader pins lists but no dataclass.

    A lesson is handed out too: torch would make a worker's traceback its message.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, step: int) -> tuple[RankBatch, list[Any]] | ShoalError | None:
        try:
            batch = self._reader[step]
        except ShoalError as error:
            return error
        return None if batch is None else (replace(batch, micro=()), list(batch.micro))


def _next(loaded: Iterator[Any]) -> Any:
    with numbers():
        return next(loaded, None)


def _start(reader: Reader, steps: Iterable[int], num_workers: int, pin_memory: bool) -> Iterator[Any]:
    with warnings.catch_warnings():
        # The number of workers is the user's word, and the reason for forking stands below.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        loader: DataLoader[Any] = DataLoader(
            _Parts(reader),
            batch_size=None,
            sampler=steps,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            # Without a generator of its own the loader draws from the stream that feeds dropout.
            generator=torch.Generator(),
            worker_init_fn=partial(_start_worker, parent=os.getpid()),
            # Forking takes milliseconds and any dataset; a fresh interpreter takes the seconds of `import torch`
            # and only what pickles. Torch keeps the forked worker to one thread, so no thread pool is missed.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
        )
        return iter(loader)


def _as_it_is(parts: Any) -> Any:
    return parts


def _start_worker(_worker: int, *, parent: int) -> None:
    """Ties the life of a worker to the process that reads from it, and to nothing else.

    Ctrl-C is that process's to answer. SIGTERM reaches the workers too under Slurm, while their parent still
    saves a checkpoint and would take the death of a worker for a failure: only the parent's own counts.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    # Torch's own watchdog does not run while a worker is inside the dataset or blocked in a full pipe.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told_by, args=(parent,), daemon=True).start()


def _end_when_told_by(parent: int) -> None:
    told: signal.struct_siginfo | None = signal.sigwaitinfo({signal.SIGTERM})
    while told is not None and told.si_pid != parent:
        # Signals that arrive together are one, and may hide the parent's: it must not wait for ever.
        told = signal.sigtimedwait({signal.SIGTERM}, _GRACE_S)
    os._exit(0)
