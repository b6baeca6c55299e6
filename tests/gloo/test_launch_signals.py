"""How a start ends when its parent is told to: the parent is a process of its own, forked from this one."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from test_launch_start import gloo, load_and_wait, note_pid, noted, survivors, total_of_ranks

from shoal.launch import start


def start_in_a_process(work, num_ranks, folder, num_pids, **options):
    """A parent that starts ranks; returns once they have noted their pids."""

    def main():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(start(work, num_ranks, show="none", screen=(folder / "screen").write_text, **options).exit_code)

    parent = multiprocessing.get_context("fork").Process(target=main)
    parent.start()
    end = time.monotonic() + 30
    while len(noted(folder)) < num_pids and time.monotonic() < end:
        time.sleep(0.01)
    assert len(noted(folder)) == num_pids
    return parent


@pytest.fixture(autouse=True)
def hang_ups_are_heard():
    """Under nohup they are ignored, and a start respects that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def wait_in_a_collective(place):
    with gloo(place):
        if place.rank == 0:
            time.sleep(60)
        total_of_ranks(place)


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 143), (signal.SIGKILL, -9)],
)
def test_no_rank_and_no_loader_worker_survives_a_signal_to_the_parent(number, exit_code, tmp_path):
    parent = start_in_a_process(lambda place: load_and_wait(tmp_path, place, wait_in_a_collective), 2, tmp_path, 6)
    os.kill(parent.pid, number)
    assert survivors(tmp_path, within_s=2) == []
    parent.join(2)
    assert parent.exitcode == exit_code


def test_a_rank_that_does_not_listen_to_ctrl_c_is_ended_all_the_same(tmp_path):
    def work(place):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        note_pid(tmp_path, os.getpid())
        time.sleep(60)

    parent = start_in_a_process(work, 2, tmp_path, 2)
    os.kill(parent.pid, signal.SIGINT)
    parent.join(2)
    assert parent.exitcode == 130
    assert survivors(tmp_path, within_s=0) == []


class CutShortError(ValueError):
    """Ctrl-C comes while its words are made."""

    def __str__(self):
        os.kill(os.getpid(), signal.SIGINT)
        return "no batch left"


def fail_while_interrupted(place):
    raise CutShortError


def test_a_rank_that_is_interrupted_while_it_reports_still_says_why_it_failed():
    """As where another machine ends all ranks in the moment in which this one fails."""
    outcome = start(fail_while_interrupted, 1, screen=lambda text: None)
    assert [failure.message for failure in outcome.failures] == ["no batch left"]


def test_ranks_may_save_after_sigterm_and_the_exit_code_says_that_they_were_told(tmp_path):
    def work(place):
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        note_pid(tmp_path, os.getpid())
        while not told:
            time.sleep(0.01)
        time.sleep(1.2)  # longer than what is left after a failure
        (tmp_path / f"saved_{place.rank}").touch()

    parent = start_in_a_process(work, 2, tmp_path, 2)
    os.kill(parent.pid, signal.SIGTERM)
    parent.join(10)
    assert parent.exitcode == 143
    assert sorted(path.name for path in tmp_path.glob("saved_*")) == ["saved_0", "saved_1"]
    assert "SIGTERM: all 2 ranks have ended" in (tmp_path / "screen").read_text()


def test_a_rank_that_takes_too_long_to_save_is_ended_when_its_grace_is_over(tmp_path):
    def work(place):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note_pid(tmp_path, os.getpid())
        time.sleep(60)

    parent = start_in_a_process(work, 2, tmp_path, 2, grace_s=0.3)
    os.kill(parent.pid, signal.SIGTERM)
    parent.join(2)
    assert parent.exitcode == 143
    assert survivors(tmp_path, within_s=0) == []


def test_a_process_forked_by_a_passing_thread_outlives_the_thread(tmp_path):
    """The kernel's parent-death signal means threads: loader workers that a thread starts must not be hit."""

    def work(place):
        import threading

        def fork():
            if os.fork() == 0:
                time.sleep(0.3)
                (tmp_path / "lived").touch()
                os._exit(0)

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        os.wait()

    assert start(work, 1).exit_code == 0
    assert (tmp_path / "lived").exists()


def test_threads_are_used_from_a_clean_parent_and_given_up_in_one_that_has_used_its_own():
    """A fork of a process that ran an operation on two threads would hang in its first on two."""
    code = """
        import torch
        from shoal.launch import start

        def work(place):
            x = torch.ones(600, 600)
            (x @ x).tanh()
            print(torch.get_num_threads(), "threads")

        print(start(work, 1, threads=2, screen=print).exit_code, flush=True)
        torch.set_num_threads(2)
        torch.ones(2000, 2000).tanh()
        print(start(work, 1, threads=2, screen=print).exit_code, flush=True)
    """
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env=environment,
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["2 threads", "0"]
    assert lines[2].startswith("1 thread per rank instead of 2: this process has run operations on several threads")
    assert lines[3:] == ["1 threads", "0"]
