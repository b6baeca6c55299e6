"""Whether threads stand still, so that whoever waits for them would wait for ever: most likely at a lock."""

import os
import sys
import threading
import time
from collections.abc import Collection

import torch

STILL_S = 10.0  # so long without work
LOOK_S = 0.5
_BUSY = 6  # so much longer in a process where others compute: it may be for these
_WORK = 0.01  # CPU time in wall time; less is a thread that looks whether it may go on
_NOT_THE_USERS = (os.path.dirname(threading.__file__), os.path.dirname(torch.__file__))


class Stillness:
    """Of threads that are asked for again and again, while they are waited for."""

    def __init__(self) -> None:
        self._threads: frozenset[int] = frozenset()
        self._since, self._spent_s, self._process_s = 0.0, 0.0, 0.0

    def lasts(self, threads: Collection[int]) -> bool:
        """Whether these have done nothing for long; all are alive."""
        now, spent_s, process_s = time.monotonic(), sum(map(_cpu_s, threads)), time.process_time()
        elapsed_s = now - self._since
        if frozenset(threads) != self._threads or spent_s - self._spent_s > _WORK * elapsed_s:
            self._threads = frozenset(threads)
            self._since, self._spent_s, self._process_s = now, spent_s, process_s
            return False
        is_idle = process_s - self._process_s < 10 * _WORK * elapsed_s
        return elapsed_s > (STILL_S if is_idle else _BUSY * STILL_S)


def place_of(thread: int) -> str:
    """`model.py:12 in forward`: where a thread is in code that is neither torch's nor Python's own."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _cpu_s(thread: int) -> float:
    """That it has used; not told on every system, and then only an idle process tells."""
    ask = getattr(time, "pthread_getcpuclockid", None)  # Unix, but for macOS
    return time.clock_gettime(ask(thread)) if ask is not None else 0.0
