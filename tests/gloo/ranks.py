"""Ranks for tests: forked from the pytest process, which has imported torch once, so that a call costs 0.1 s.

    results = run_ranks(lambda rank, size: ..., 2)      # a gloo group is open in every rank
    results = run_processes(lambda rank, size, rendezvous: ..., 2)      # the function opens its own world

What ranks return comes back in their order; what the first failing rank raises is raised in the test, with
that rank's traceback as a note. Closures are fine: nothing is pickled on the way in.
"""

import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import psutil  # noqa: F401  # this and the next are imported by every run; here once instead of in every rank
import torch
import torch._dynamo
import torch.distributed as dist
from zoo import TiedGPT

from shoal.job import Job
from shoal.run import assemble
from shoal.world import World

# Before the first operation: a fork of a process that has used more threads hangs in its first parallel one.
torch.set_num_threads(1)

T = TypeVar("T")
GRACE_S = 5.0  # what the others get to report after the first rank has failed


class RankError(AssertionError):
    """A rank that hung, died without a word, or raised what cannot be pickled."""


def run_ranks(fn: Callable[[int, int], T], num_ranks: int, *, time_limit_s: float = 60) -> list[T]:
    """Runs fn(rank, size) in that many processes that share a gloo group."""

    def in_group(rank: int, size: int, rendezvous: str) -> T:
        limit = timedelta(seconds=time_limit_s)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=limit)
        dist.barrier()  # or a rank that returns at once leaves another in the middle of connecting
        result = fn(rank, size)
        dist.destroy_process_group()
        return result

    return run_processes(in_group, num_ranks, time_limit_s=time_limit_s)


def run_processes(fn: Callable[[int, int, str], T], num_ranks: int, *, time_limit_s: float = 60) -> list[T]:
    """Runs fn(rank, size, rendezvous) in that many processes; rendezvous is a fresh file:// address."""
    _warm_up()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks") as name:
        folder = Path(name)
        ranks = [
            fork.Process(target=_be_rank, args=(fn, rank, num_ranks, folder, time_limit_s)) for rank in range(num_ranks)
        ]
        try:
            for process in ranks:
                process.start()
            _wait(ranks, time_limit_s + 1)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        _raise_first_failure(folder, [process.exitcode for process in ranks])
        return [torch.load(folder / f"result_{rank}", weights_only=False) for rank in range(num_ranks)]


@functools.cache
def _warm_up() -> None:
    """A step in fake worlds: what torch works out at its first step is worked out here, and not in every rank."""
    for layout in ("fsdp2", "tp2", "pp2:micro=2"):
        rehearse(TiedGPT(width=16, heads=2, depth=2, steps=1), layout)


def rehearse(job: Job, layout: str) -> None:
    """One step as rank 0 of a fake world: what ranks work out by shapes alone they find worked out."""
    with World.open(layout, kind="fake") as world:
        run = assemble(job, world, quiet=True)
        next(run.steps())()
        run.evaluate()
        run.close()


def _be_rank(fn: Callable[..., Any], rank: int, size: int, folder: Path, time_limit_s: float) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the test session
    torch.set_num_threads(1)
    gc.freeze()  # what came from the parent stays shared, page by page
    with open(folder / f"stack_{rank}", "w") as stack:
        faulthandler.dump_traceback_later(time_limit_s, file=stack)
        try:
            torch.save(fn(rank, size, f"file://{folder}/store"), folder / f"result_{rank}")
        except BaseException as error:
            _write_failure(error, folder / f"failure_{rank}")
            sys.exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _write_failure(error: BaseException, path: Path) -> None:
    when_s, text = time.monotonic(), traceback.format_exc()
    try:
        pickle.loads(blob := pickle.dumps((when_s, error, text)))
        ordinary = isinstance(error, Exception)
    except Exception:  # whatever a foreign exception's own pickling raises
        ordinary = False
    if not ordinary:
        blob = pickle.dumps((when_s, RankError(f"{type(error).__name__}: {error}"), text))
    path.write_bytes(blob)


def _wait(ranks: list[Any], time_limit_s: float) -> None:
    deadline = time.monotonic() + time_limit_s
    running = list(ranks)
    while running and (rest_s := deadline - time.monotonic()) > 0:
        wait([process.sentinel for process in running], rest_s)
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)


def _is_echo(error: BaseException) -> bool:
    """What a rank hears when another has gone; the one that went may tell its reason a moment later."""
    return any(text in str(error) for text in ("Connection closed by peer", "Connection reset by peer"))


def _raise_first_failure(folder: Path, exit_codes: list[int | None]) -> None:
    if not any(exit_codes):
        return
    failures = [(*pickle.loads(path.read_bytes()), path.name) for path in folder.glob("failure_*")]
    if failures:
        _, error, text, name = min(failures, key=lambda failure: (_is_echo(failure[1]), failure[0]))
        error.add_note(f"{name.replace('failure_', 'rank ')} failed first; exit codes {exit_codes}.\n{text}")
        raise error
    stacks = [f"rank {rank}:\n{(folder / f'stack_{rank}').read_text()}" for rank in range(len(exit_codes))]
    raise RankError(f"no rank raised, yet exit codes are {exit_codes}. They stood at\n" + "\n".join(stacks))
