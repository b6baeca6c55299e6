"""Loader workers live as long as the process that reads from them, and no longer."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from itertools import islice
from multiprocessing.connection import Connection

import psutil
import pytest
from torch.utils.data import Dataset

from shoal.data import share
from shoal.errors import DataError, ShoalError

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="Linux ends orphans by a signal")

LONG_S = 600


class Pids(Dataset[int]):
    """Tells who reads; after the samples a reader hangs, as on a dead file server, or fails."""

    def __init__(self, num_samples: int = 8, *, fails: bool = False) -> None:
        self.num_samples = num_samples
        self.fails = fails

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index >= self.num_samples:
            assert not self.fails
            time.sleep(LONG_S)
        return os.getpid()


def read_until_killed(told: Connection) -> None:
    batches = share(Pids(), None, batch_size=2, shuffle=False, num_workers=2).batches()
    told.send([next(batches).micro[0][0].item() for _ in range(4)])
    time.sleep(LONG_S)


def test_workers_inside_the_dataset_end_when_their_parent_is_killed() -> None:
    """D093: SIGKILL leaves the parent no time to end them."""
    context = multiprocessing.get_context("fork")
    hears, tells = context.Pipe(duplex=False)
    parent = context.Process(target=read_until_killed, args=(tells,))
    parent.start()
    assert hears.poll(30)
    workers = [psutil.Process(pid) for pid in set(hears.recv())]
    assert len(workers) == 2
    parent.kill()
    parent.join()
    _, alive = psutil.wait_procs(workers, timeout=3)
    for orphan in alive:
        orphan.kill()
    assert alive == []


def test_workers_answer_to_their_parent_alone() -> None:
    """Ctrl-C, and a SIGTERM from the scheduler to the whole job, leave time to save a checkpoint."""
    batches = share(Pids(), None, batch_size=2, shuffle=False, num_workers=2, epochs=1).batches()
    pids = {batch.micro[0][0].item() for batch in islice(batches, 2)}
    assert len(pids) == 2
    for name in ("INT", "TERM"):
        subprocess.run(["kill", f"-{name}", *map(str, pids)], check=True)
    assert [batch.micro[0][0].item() in pids for batch in islice(batches, 2)] == [True, True]
    alive = [psutil.Process(pid) for pid in pids]
    for _ in range(20):
        # A signal that meets one still pending is lost, so a parent tells again.
        with contextlib.suppress(RuntimeError):  # torch's own handler may say that a worker has ended
            for worker in alive:
                worker.terminate()
            _, alive = psutil.wait_procs(alive, timeout=0.2)
    assert alive == []


def test_workers_end_with_the_iterator() -> None:
    batches = share(Pids(100), None, batch_size=2, num_workers=2).batches()
    workers = [psutil.Process(next(batches).micro[0][0].item()) for _ in range(2)]
    batches.close()
    assert not any(worker.is_running() for worker in workers)


def test_workers_end_with_an_error_while_its_traceback_is_kept() -> None:
    batches = share(Pids(4, fails=True), None, batch_size=2, shuffle=False, num_workers=2).batches()
    workers = [psutil.Process(next(batches).micro[0][0].item()) for _ in range(2)]
    with pytest.raises(AssertionError) as kept:
        next(batches)
    assert kept.tb is not None
    assert not any(worker.is_running() for worker in workers)


class Torn(Dataset[int]):
    """A data set that gives a lesson at its last sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise DataError("sample 3 is torn. Leave it out.")
        return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_lesson_of_a_worker_is_the_lesson_that_is_read(num_workers: int) -> None:
    batches = share(Torn(), None, batch_size=2, shuffle=False, num_workers=num_workers, epochs=1).batches()
    assert next(batches).micro[0].tolist() == [0, 1]
    with pytest.raises(ShoalError) as caught:
        next(batches)
    assert (type(caught.value), str(caught.value)) == (DataError, "sample 3 is torn. Leave it out.")


def test_one_set_of_workers_serves_all_epochs() -> None:
    batches = share(Pids(100), None, batch_size=50, num_workers=2).batches()
    assert len({batch.micro[0][0].item() for batch in islice(batches, 10)}) == 2
