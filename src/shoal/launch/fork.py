"""A forked process: how it is made, what it leaves behind, and that it ends with its parent."""

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def fork_quietly(process: BaseProcess) -> None:
    """Start a process of multiprocessing's fork context."""
    with warnings.catch_warnings(), _signals_held_back():
        # Python 3.12 warns of any fork beside threads; `warm.py` says which of them matter here.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        process.start()


def leave_parent(parent: int) -> None:
    """In the child: a group, signals and exit handlers of its own, and an end with the parent's."""
    os.setsid()
    die_with(parent)
    _default_signals()
    _own_exit_handlers()


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Between fork and its own handlers, a child must not take a signal with the parent's."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with(parent: int) -> None:
    """End this process, and what it forks, when the parent ends; also when the parent is killed."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        _ask_kernel(prctl, parent)
        _ask_for_forks(prctl)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _ask_kernel(prctl: Callable[..., int], parent: int) -> None:
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _ask_for_forks(prctl: Callable[..., int]) -> None:
    """Loader workers of this rank end with it.

    The kernel means the *thread* that forked: a process forked by a passing thread is left alone, since it would
    be killed when that thread ends.
    """
    forking = {"pid": 0}

    def before() -> None:
        is_main = threading.current_thread() is threading.main_thread()
        forking["pid"] = os.getpid() if is_main else 0

    def after() -> None:
        if forking["pid"]:
            _ask_kernel(prctl, forking["pid"])

    os.register_at_fork(before=before, after_in_child=after)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)  # an event loop of the parent's must not hear of our signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _own_exit_handlers() -> None:
    """Forget what the parent wanted done at its own end; multiprocessing has done the same for its part."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # no public way to forget them
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # the next one registers anew
    atexit.register(logging.shutdown)
