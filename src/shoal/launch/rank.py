"""What happens inside one started process: take a seat, do the work, report, end."""

import atexit
import contextlib
import faulthandler
import gc
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.launch.fork import leave_parent
from shoal.launch.outcome import FAILED, INTERRUPTED, MISTAKE
from shoal.launch.output import Show, log_only, open_output
from shoal.launch.trace import describe, print_whole
from shoal.world import Place

Work = Callable[[Place], int | None]

STACK_SIGNAL = signal.SIGUSR2  # asks a rank to write where it is into its log


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What one process is told before it works."""

    place: Place
    threads: int
    parent: int  # pid
    reports: int  # file descriptor that the parent reads
    log: Path
    show: Show
    set_variables: Mapping[str, str] = field(default_factory=dict)
    drop_variables: tuple[str, ...] = ()


def take_forked_seat(seat: Seat, others: tuple[int, ...]) -> None:
    """Leave the parent behind in a forked process, with its files."""
    leave_parent(seat.parent)
    for fd in others:
        os.close(fd)
    gc.freeze()  # what came from the parent stays shared, page by page
    _set_threads(seat.threads)


def run(work: Work, seat: Seat) -> int:
    """Do the work and report how it ended; the exit code of this process."""
    for name in seat.drop_variables:
        os.environ.pop(name, None)
    os.environ.update(seat.set_variables)
    log = open_output(seat.log, seat.place.rank, seat.show)
    faulthandler.enable(file=log, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=log, all_threads=True)
    code = _work(work, seat, log)
    _report(seat.reports, {"exit": code, "at": time.monotonic()})
    return code


def _work(work: Work, seat: Seat, log: int) -> int:
    try:
        return _code(work(seat.place))
    except BaseException as error:  # torch's own CheckpointException is no Exception
        # Kept until this process is gone, as the interpreter does: its frames hold the model, and a process group
        # that is freed on the way out may wait for ever for its own threads.
        sys.last_value = error
        return _ended_by(error, seat, log)


def _ended_by(error: BaseException, seat: Seat, log: int) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if not isinstance(error, SystemExit):
        return _failed(error, seat, log, MISTAKE if isinstance(error, ShoalError) else FAILED)
    if error.code in (None, 0):
        return 0
    if not isinstance(error.code, int):
        sys.stderr.write(f"{error.code}\n")
    return _failed(error, seat, log, _code(error.code) if isinstance(error.code, int) else FAILED)


def _code(result: int | None) -> int:
    code = int(result or 0)
    return (code & 0xFF) or (FAILED if code else 0)  # 256 would read as 0


def _failed(error: BaseException, seat: Seat, log: int, code: int) -> int:
    at = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where other ranks fail too, all are ended while this one reports
    sys.stdout.flush()
    sys.stderr.flush()
    log_end = os.fstat(log).st_size
    fate = {"failed": True, "exit": code, "at": at, "log_end": log_end, "lesson": isinstance(error, ShoalError)}
    _report(seat.reports, fate | describe(error))
    if not isinstance(error, SystemExit):
        with log_only():
            print_whole(error)
    return code


def _report(fd: int, report: dict[str, Any]) -> None:
    data = json.dumps(report).encode() + b"\n"
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return  # nobody listens any more: the parent is gone, and so are we in a moment


def end_forked() -> None:
    """What an interpreter does at its end, for what this process started itself."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    _flush_files()


def _flush_files() -> None:
    """Write out the files that were left open: an interpreter frees its objects at its end, this process does not.

    The parent's own files are not among them, since they are frozen (see `take_forked_seat`).
    """
    for found in gc.get_objects():
        if issubclass(type(found), io.IOBase):  # by type: some objects answer isinstance with side effects
            with contextlib.suppress(ValueError, OSError):  # closed, or detached, or gone
                found.flush()


def _set_threads(threads: int) -> None:
    # OpenMP has read its variable in the parent already; loader workers and libraries will read it here.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
