"""What a rank does to itself when it finds a sign: a file that says what, for one rank, in one place.

A sign is taken away by the rank that obeys it, so a rank that is started again is not hurt twice.
"""

import ctypes
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_STAYS = "slow"  # the one sign that is obeyed until it is taken away
_SLOW_S = 0.05


def sign(folder: Path, place: str, rank: int, kind: str) -> Path:
    """Put one up; `place` is `forward` or `sample`."""
    partial, path = folder / f"{place}-{rank}.tmp", folder / f"{place}-{rank}"
    partial.write_text(kind)
    return partial.rename(path)


def note_pid(folder: str, rank: int) -> None:
    """Where the drill finds this process; without a folder it does not look."""
    if folder:
        partial = Path(folder, f"pid-{rank}.tmp")
        partial.write_text(str(os.getpid()))
        partial.rename(partial.with_suffix(""))


def obey(folder: str, place: str, rank: int, value: Tensor) -> Tensor:
    """`value`, after whatever harm is asked for here."""
    path = f"{folder}/{place}-{rank}"
    if not os.path.exists(path):
        return value
    kind = Path(path).read_text()
    if kind == _STAYS:
        time.sleep(_SLOW_S)
        return value
    os.unlink(path)
    if kind == "nan":
        return value * torch.nan
    HARMS[kind]()
    return value


def _raise() -> None:
    raise ArithmeticError("the drill's own error")


def _run_out_of_memory() -> None:
    """A limit for this process alone, and a request above it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    torch.empty(2**28, dtype=torch.float64)


def _loop() -> None:
    while True:
        pass


def _hold_the_gil() -> None:
    ctypes.PyDLL(None).pause()


def _wait_in_native_code() -> None:
    ctypes.CDLL(None).pause()


def _sleep() -> None:
    while True:
        time.sleep(1)


def _ask_once_more() -> None:
    """For a collective that no other rank asks for."""
    dist.all_reduce(torch.ones(3), async_op=True)


HARMS: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "memory": _run_out_of_memory,
    "leave": lambda: os._exit(0),
    "loop": _loop,
    "hold": _hold_the_gil,
    "native": _wait_in_native_code,
    "sleep": _sleep,
    "collective": _ask_once_more,
}
