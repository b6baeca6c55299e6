"""start(): N processes of one function, forked from this (warm) process."""

import contextlib
import faulthandler
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from shoal.errors import DataError, LaunchError
from shoal.launch import Outcome, start, warm_up

warm_up()
HERE = "test_launch_start.py"
AFTER_FAILURE_S = 2.0


@contextlib.contextmanager
def gloo(place):
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.size)
    yield
    dist.destroy_process_group()


def total_of_ranks(place):
    value = torch.tensor(float(place.rank))
    dist.all_reduce(value)
    return value.item()


def run(work, num_ranks, **options) -> tuple[Outcome, str]:
    """The outcome, and what was shown."""
    shown: list[str] = []
    outcome = start(work, num_ranks, screen=shown.append, show="none", **options)
    return outcome, "\n".join(shown)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def lives(pid, begun):
    """Whether this process, not a later one with its number, runs (a zombie does not)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state, start_time = process(pid)
        return start_time == begun and state not in "ZX"
    return False


def process(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def note_pid(folder, pid):
    temporary = folder / f".{pid}"
    temporary.write_text(process(pid)[1])
    temporary.rename(folder / f"{pid}.pid")


def noted(folder):
    return {int(path.stem): path.read_text() for path in folder.glob("*.pid")}


def survivors(folder, within_s):
    """The noted processes that still run after the time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end and any(lives(*item) for item in noted(folder).items()):
        time.sleep(0.01)
    return [pid for pid, begun in noted(folder).items() if lives(pid, begun)]


# -- ranks meet ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_meet_and_add(num_ranks, tmp_path):
    def work(place):
        with gloo(place):
            (tmp_path / str(place.rank)).write_text(f"{place.rank} {place.size} {total_of_ranks(place)}")

    outcome, shown = run(work, num_ranks)

    assert (outcome.exit_code, outcome.failures, outcome.others, shown) == (0, (), (), "")
    total = float(sum(range(num_ranks)))
    assert [(tmp_path / str(r)).read_text() for r in range(num_ranks)] == [
        f"{r} {num_ranks} {total}" for r in range(num_ranks)
    ]


def test_a_process_can_start_again_and_again_also_after_a_failure():
    def works(place):
        with gloo(place):
            assert total_of_ranks(place) == 1.0

    def fails(place):
        with gloo(place):
            raise ValueError("once")

    assert [run(work, 2)[0].exit_code for work in (works, fails, works, fails, works)] == [0, 1, 0, 1, 0]


def test_runs_at_once_do_not_disturb_each_other_and_need_no_main_thread():
    outcomes = {}

    def one_run(size):
        def work(place):
            with gloo(place):
                return 0 if total_of_ranks(place) == sum(range(size)) else 9

        outcomes[size] = run(work, size)[0].exit_code

    threads = [threading.Thread(target=one_run, args=(size,)) for size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {2: 0, 3: 0}


def test_a_start_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    before = open_files()
    for work in (lambda place: None, lambda place: 1):
        run(work, 3)
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


# -- the first failure --------------------------------------------------------------------------------------


def test_the_first_failure_is_named_while_the_others_wait_in_a_collective():
    def work(place):
        with gloo(place):
            total_of_ranks(place)
            if place.rank == 1:
                print("reading the batch")
                raise ValueError("no batch left")
            total_of_ranks(place)

    outcome, shown = run(work, 3)

    first = outcome.failures[0]
    assert (outcome.exit_code, first.rank, first.error) == (1, 1, "ValueError: no batch left")
    assert HERE in first.user_frame
    assert first.user_frame.endswith("in work")
    assert first.source_line == 'raise ValueError("no batch left")'
    assert first.log_tail == ("reading the batch",)
    assert [failure.is_echo for failure in outcome.failures[1:]] == [True, True]
    assert outcome.seconds - first.at_s < AFTER_FAILURE_S
    assert shown.count("Traceback") == 0
    assert shown.index("rank 1 of 3 failed first") < shown.index("ranks 0, 2: ended because rank 1 closed its")


def test_a_cause_that_is_told_after_its_echo_still_comes_first():
    def work(place):
        with gloo(place):
            total_of_ranks(place)
            if place.rank == 1:
                dist.destroy_process_group()
                time.sleep(0.3)  # the others have broken off and told by now
                raise ValueError("the cause")
            total_of_ranks(place)

    assert run(work, 3)[0].failures[0].error == "ValueError: the cause"


def test_a_rank_that_ended_too_early_is_told_beside_the_error_of_the_others():
    def work(place):
        with gloo(place):
            total_of_ranks(place)
            if place.rank == 1:
                return
            total_of_ranks(place)

    outcome, shown = run(work, 2)
    assert (outcome.exit_code, outcome.failures[0].rank) == (1, 0)
    assert "rank 1: had ended well, after" in shown


def test_a_rank_that_exits_ends_those_that_sleep_and_its_code_is_kept():
    def work(place):
        if place.rank == 2:
            sys.exit(3)
        sleep_here()

    outcome, shown = run(work, 3)
    assert outcome.exit_code == 3
    assert outcome.failures[0].error == "SystemExit: sys.exit(3)"
    assert outcome.seconds < AFTER_FAILURE_S + 1
    assert "ranks 0, 1: was still running, at" in shown
    assert "in sleep_here" in shown


def sleep_here():
    time.sleep(60)


def test_a_rank_killed_by_signal_9_is_explained():
    def work(place):
        with gloo(place):
            total_of_ranks(place)
            if place.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            total_of_ranks(place)

    outcome, shown = run(work, 2)
    assert (outcome.exit_code, outcome.failures[0].rank) == (137, 1)
    assert "memory" in outcome.failures[0].message
    assert "rank 1 of 2 failed first" in shown
    assert "killed by SIGKILL (-9)" in shown


@pytest.mark.parametrize(("crash", "name"), [(faulthandler._sigsegv, "SIGSEGV"), (os.abort, "SIGABRT")])
def test_a_crash_in_native_code_is_shown_with_the_users_frame(crash, name):
    def work(place):
        if place.rank == 1:
            print("before the crash", flush=True)
            crash()
        time.sleep(60)

    outcome, shown = run(work, 2)
    first = outcome.failures[0]
    assert (outcome.exit_code, first.rank) == (128 + signal.Signals[name], 1)
    assert f"killed by {name}" in shown
    assert HERE in first.user_frame
    assert first.source_line == "crash()"
    assert first.log_tail == ("before the crash",)
    assert outcome.seconds - first.at_s < AFTER_FAILURE_S


def test_a_persons_mistake_is_shown_once_without_a_traceback():
    def work(place):
        raise DataError("3 samples are fewer than 4 ranks.")

    outcome, shown = run(work, 3)
    assert outcome.exit_code == 2
    assert shown == "DataError: 3 samples are fewer than 4 ranks."


def test_a_mistake_that_one_rank_found_names_the_rank():
    def work(place):
        if place.rank == 1:
            raise DataError("sample 7 is empty.")
        time.sleep(60)

    outcome, shown = run(work, 2)
    assert outcome.exit_code == 2
    assert shown == "DataError (rank 1): sample 7 is empty."


def test_what_work_returns_is_the_exit_code():
    assert run(lambda place: 5 if place.rank else 0, 2)[0].exit_code == 5
    assert run(lambda place: 256, 1)[0].exit_code == 1


def test_ranks_that_stopped_on_request_together_have_not_failed():
    outcome, shown = run(lambda place: 143, 2)
    assert (outcome.exit_code, outcome.failures, shown) == (143, (), "")


def test_an_error_whose_message_fails_is_still_told():
    class SilentError(Exception):
        def __str__(self):
            raise RuntimeError

    def work(place):
        raise SilentError

    assert run(work, 1)[0].failures[0].error == "SilentError: <its message cannot be shown: RuntimeError>"


# -- words --------------------------------------------------------------------------------------------------


def test_each_rank_has_a_log_with_all_it_said_and_a_second_start_appends(tmp_path):
    def work(place):
        print("python says", place.rank)
        if place.rank:
            os.write(1, b"native code says\n")
        raise ValueError("and ends")

    for _ in range(2):
        run(work, 2, log_dir=tmp_path / "new" / "logs")
    text = (tmp_path / "new" / "logs" / "rank_1.log").read_text()
    assert text.count("python says 1\nnative code says\nTraceback (most recent call last)") == 2
    assert text.count("ValueError: and ends") == 2
    assert (tmp_path / "new" / "logs" / "rank_0.log").read_text().count("python says 0") == 2


def test_rank_0_speaks_on_the_terminal_and_in_its_log(capfd, tmp_path):
    def work(place):
        print("I am", place.rank)
        sys.stderr.write(f"and I am {place.rank}\n")

    start(work, 2, log_dir=tmp_path)
    assert capfd.readouterr() == ("I am 0\n", "and I am 0\n")
    assert [(tmp_path / f"rank_{r}.log").read_text() for r in (0, 1)] == [f"I am {r}\nand I am {r}\n" for r in (0, 1)]


def test_all_ranks_may_speak_each_line_with_its_rank(capfd):
    start(lambda place: print("one\ntwo"), 2, show="all")
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] one", "[0] two", "[1] one", "[1] two"]


# -- what a rank is given -----------------------------------------------------------------------------------


def test_a_rank_has_the_threads_it_was_told_in_torch_and_in_its_environment(tmp_path):
    def work(place):
        (tmp_path / "said").write_text(f"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}")

    run(work, 1, threads=1)
    assert (tmp_path / "said").read_text() == "1 1"


def test_what_another_launcher_left_in_the_environment_is_set_aside(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("RANK", "0")

    def work(place):
        seen = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_JOB_ID")]
        (tmp_path / str(place.rank)).write_text(repr(seen))

    run(work, 2)
    assert (tmp_path / "1").read_text() == repr(["1", "2", None, "77"])


def test_exit_handlers_of_this_process_do_not_run_in_a_rank_but_its_own_do(tmp_path):
    import atexit

    parents, own = tmp_path / "parents", tmp_path / "own"
    handler = atexit.register(parents.touch)

    def work(place):
        atexit.register(own.touch)

    try:
        run(work, 1)
    finally:
        atexit.unregister(handler)
    assert own.exists()
    assert not parents.exists()


# -- loader workers -----------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.zeros(10_000)


def load_and_wait(folder, place, after):
    """Two loader workers with full queues; then `after`."""
    batches = iter(DataLoader(Numbers(), batch_size=4, num_workers=2))
    next(batches)
    for worker in batches._workers:
        note_pid(folder, worker.pid)
    note_pid(folder, os.getpid())
    after(place)


def die_or_wait(folder, place):
    while len(noted(folder)) < 6:
        time.sleep(0.01)
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_no_loader_worker_survives_a_killed_rank(tmp_path):
    outcome, _ = run(lambda place: load_and_wait(tmp_path, place, functools.partial(die_or_wait, tmp_path)), 2)
    assert outcome.failures[0].rank == 1
    assert len(noted(tmp_path)) == 6
    assert survivors(tmp_path, within_s=0) == []


def test_what_a_rank_forgot_to_end_is_ended_with_it(tmp_path):
    def work(place):
        note_pid(tmp_path, subprocess.Popen(["sleep", "60"]).pid)

    assert run(work, 1)[0].exit_code == 0
    assert len(noted(tmp_path)) == 1
    assert survivors(tmp_path, within_s=1) == []


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_ranks": 0}, "0 processes: at least 1"),
        ({"num_ranks": 1, "threads": 0}, "threads=0"),
        ({"num_ranks": 1, "show": "rank1"}, "show='rank1' is none of rank0, all, none"),
        ({"num_ranks": 1, "fresh": True}, "is a lambda"),
    ],
)
def test_a_start_that_cannot_be_is_refused_with_the_reason(options, words):
    with pytest.raises(LaunchError, match=words):
        start(lambda place: None, **options)


@pytest.mark.parametrize(("name", "words"), [("torch.cuda", "fresh=True"), ("torch.distributed", "itself a rank")])
def test_a_process_in_use_is_not_forked(monkeypatch, name, words):
    monkeypatch.setattr(f"{name}.is_initialized", lambda: True)
    with pytest.raises(LaunchError, match=words):
        start(lambda place: None, 1)


def test_more_processes_than_a_machine_can_hold_are_refused_before_the_first():
    with pytest.raises(LaunchError, match="would bring this machine down; at most"):
        start(lambda place: None, 99_999)
