"""The warm parent: what it imports before it forks, and when it must not fork."""

import contextlib
import gc
import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.deferred import defer_dynamo


def warm_up(also: Sequence[str] = ()) -> None:
    """Import torch and what every worker needs, and other modules, once, and keep this process to one thread.

    A process that ran an operation on several OpenMP threads must not fork: its children would wait for threads
    that they do not have (see `has_thread_pool`).
    """
    import_needed(also)
    sys.modules["torch"].set_num_threads(1)


def import_needed(also: Sequence[str] = ()) -> None:
    """Import what a worker needs before its first step: torch, without the compiler that optimizers drag in."""
    with _no_collection():
        importlib.import_module("torch")
        defer_dynamo()
        for name in also:
            importlib.import_module(name)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Imports make no garbage worth looking for; looking costs a fifth of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check_may_fork() -> None:
    """Refuse to fork a process whose children could not work.

    Raises:
        LaunchError: no fork on this system, CUDA in use, or a process group open in this process.
    """
    if not hasattr(os, "fork"):
        raise LaunchError("this system cannot fork. Start fresh processes instead: start(..., fresh=True).")
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized():
        raise LaunchError(
            "CUDA is in use in this process, and a forked process cannot use it again. Start fresh processes "
            "(start(..., fresh=True)), or start before the first CUDA call (in a notebook: restart the kernel)."
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise LaunchError(
            "this process is itself a rank of an open process group, and its children would inherit the group. "
            "Close it first (torch.distributed.destroy_process_group()), or start from outside."
        )


def has_thread_pool() -> bool:
    """Whether OpenMP threads may be alive in this process: forked children that use threads would hang for ever.

    A waiting OpenMP thread sleeps inside its library, a spinning one shows as running. Threads of other libraries
    (numpy's, a notebook's) sleep elsewhere and do no harm.
    """
    native = {thread.native_id for thread in threading.enumerate()}
    tasks = [task for task in _list("/proc/self/task") if task.name.isdecimal() and int(task.name) not in native]
    libraries = _openmp_libraries() if tasks else []
    return any(_is_openmp(task, libraries) for task in tasks)


def _is_openmp(task: Path, libraries: list[range]) -> bool:
    try:
        words = (task / "syscall").read_text().split()
    except FileNotFoundError:
        return False  # the thread has ended meanwhile
    except OSError:
        return True  # not ours to read: suspect the worst
    return not words or words[0] == "running" or any(int(words[-1], 16) in library for library in libraries)


def _openmp_libraries() -> list[range]:
    pattern = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp .*/lib[gi]?omp[^/]*$", re.MULTILINE)
    found = pattern.findall(Path("/proc/self/maps").read_text())
    return [range(int(start, 16), int(end, 16)) for start, end in found]


def _list(folder: str) -> list[Path]:
    return list(Path(folder).iterdir()) if Path(folder).is_dir() else []
