"""What the launcher says: exits in words, the user's frame, the one screen; and how it names work."""

import functools
import os
import sysconfig
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from shoal.errors import LaunchError
from shoal.launch import machine, supervise, warm
from shoal.launch.named import find, name_of
from shoal.launch.outcome import Failure, Outcome, exit_in_words
from shoal.launch.screen import failure_screen
from shoal.launch.script import leftovers
from shoal.launch.trace import crash_frames, describe, is_echo, is_users

GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("exit_code", "kills", "words"),
    [
        (3, 0, "exit code 3"),
        (-9, 0, "SIGKILL (-9): somebody's kill -9, or a memory killer"),
        (-9, 1, "SIGKILL (-9): the kernel's memory killer struck once"),
        (-9, 2, "struck 2 times"),
        (-7, 0, "SIGBUS (-7): memory that is mapped but not there; in most cases /dev/shm is full"),
        (-11, 0, "SIGSEGV (-11): an invalid memory access"),
        (-6, 0, "SIGABRT (-6): native code gave up"),
        (-15, 0, "SIGTERM (-15): somebody"),
        (-10, 0, "killed by SIGUSR1 (-10)"),
        (-99, 0, "signal 99"),
    ],
)
def test_an_exit_is_said_in_words(exit_code, kills, words):
    assert words in exit_in_words(exit_code, num_memory_kills=kills)


def test_only_what_a_lost_peer_causes_is_an_echo():
    assert is_echo("RuntimeError", GLOO)
    assert is_echo("DistNetworkError", "failed to recv, got 0 bytes")
    assert not is_echo("RuntimeError", "Timed out waiting 4000ms for recv operation to complete")
    assert not is_echo("ConnectionError", "dataset server: Connection refused")


@pytest.mark.parametrize(
    ("filename", "is_own"),
    [
        ("/home/me/train.py", True),
        ("train.py", True),
        ("<string>", True),
        ("<frozen runpy>", False),
        ("/env/lib/python3.12/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False),
        (os.path.join(sysconfig.get_paths()["stdlib"], "json", "decoder.py"), False),
        (str(Path(warm.__file__)), False),
    ],
)
def test_the_users_frames_are_told_from_those_of_libraries(filename, is_own):
    assert is_users(filename) is is_own


def test_an_error_inside_a_library_is_placed_at_the_users_line():
    def parse():
        import json

        json.loads("{")

    told = raised(parse)
    assert told["user_frame"].endswith("in parse")
    assert told["source_line"] == 'json.loads("{")'
    frames = [line for line in told["excerpt"].splitlines() if line.startswith("  File")]
    assert ("in parse" in frames[-2], "json" in frames[-1]) == (True, True)
    assert len(frames) < told["traceback"].count('  File "')


def test_the_cause_of_an_error_is_shown_before_it():
    def work():
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    excerpt = raised(work)["excerpt"]
    assert excerpt.index("KeyError: 'first'") < excerpt.index("ValueError: second")


class TornError(Exception):
    """Of two arguments, so that torch cannot make it anew and raises a RuntimeError."""

    def __init__(self, index, why):
        super().__init__(f"sample {index}: {why}")


class Torn:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 4

    def __getitem__(self, index):
        try:
            raise OSError("no such block")
        except OSError as cause:
            self.error.add_note("while reading dataset[0]")
            raise self.error from cause


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        (ValueError("torn: at byte 7\n  of 9"), "ValueError", "torn: at byte 7\n  of 9"),
        (KeyError("label"), "KeyError", "'label'"),
        (StopAsyncIteration(), "StopAsyncIteration", ""),
        (TornError(0, "torn"), "TornError", "sample 0: torn"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_inside_a_loader_worker_is_placed_at_the_users_line_there(error, name, message):
    told = raised(lambda: list(DataLoader(Torn(error), num_workers=1, multiprocessing_context="fork")))
    assert (told["type"], told["message"]) == (name, f"{message}\nwhile reading dataset[0]".lstrip("\n"))
    assert told["user_frame"].endswith("in __getitem__")
    assert told["source_line"] == "raise self.error from cause"
    assert "Original Traceback" not in told["excerpt"]
    assert "worker.py" not in told["excerpt"]
    assert "OSError: no such block" in told["traceback"]


def test_a_deep_recursion_still_fits():
    def deeper():
        deeper()

    assert len(raised(deeper)["excerpt"].splitlines()) < 40


def raised(work):
    try:
        work()
    except BaseException as error:
        return describe(error)
    raise AssertionError("it did not raise")


def test_a_crash_is_placed_at_the_users_frame_of_the_thread_that_crashed():
    rank = Path(warm.__file__).with_name("rank.py")
    dump = f"""Segmentation fault

Thread 0x1 (most recent call first):
  File "/me/loader.py", line 9 in fill

Current thread 0x2 (most recent call first):
  File "/env/site-packages/torch/autograd.py", line 3 in backward
  File "/me/train.py", line 7 in step
  File "/me/train.py", line 20 in main
  File "{rank}", line 70 in _work
  File "/me/notebook.py", line 1 in <module>

Extension modules: torch._C (total: 1)
"""
    excerpt, frame, _ = crash_frames(dump)
    assert frame == "/me/train.py:7 in step"
    assert "notebook" not in excerpt
    assert crash_frames("no dump") == ("", "", "")


FIRST = Failure(
    rank=1,
    exit_code=1,
    type="ValueError",
    message="no batch left",
    excerpt='  File "train.py", line 12, in step\n    raise ValueError\nValueError: no batch left\n',
    user_frame="train.py:12 in step",
    source_line="raise ValueError",
    log_tail=tuple(f"line {n}" for n in range(20)),
    log=Path("runs/digits/logs/rank_1.log"),
    at_s=0.25,
)


def test_a_failure_fills_one_screen():
    outcome = Outcome(
        exit_code=1,
        failures=(FIRST,),
        others=(
            "rank 0: ended because rank 1 closed its connection",
            "rank 2: ended because rank 1 closed its connection",
        ),
    )
    rule = "─" * 78
    expected = f"""
{rule}
rank 1 of 3 failed first, 250 ms after the start

  ValueError: no batch left
  at train.py:12 in step:  raise ValueError

traceback (your frames and the last):
  File "train.py", line 12, in step
    raise ValueError
ValueError: no batch left

last lines of rank 1 (runs/digits/logs/rank_1.log):
  line 12
  line 13
  line 14
  line 15
  line 16
  line 17
  line 18
  line 19

ranks 0, 2: ended because rank 1 closed its connection
{rule}"""
    assert failure_screen(outcome, 3) == expected


# -- naming -------------------------------------------------------------------------------------------------


class Holder:
    def method(self, place):
        return 0


def test_work_is_named_by_its_import_path_and_found_again():
    work = functools.partial(os.path.join, a="x")
    path, arguments = name_of(work)
    assert (find(path), arguments) == (os.path.join, {"a": "x"})


def local():
    return lambda place: 0


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda place: 0, "it is a lambda"),
        (local(), "it is a lambda"),
        (Holder().method, "another object stands under that name"),
        (Holder(), "a Holder object has no name"),
        (functools.partial(os.path.join, "x"), "by keyword"),
        (
            functools.partial(os.path.join, a=Holder()),
            "argument a of posixpath:join is a Holder that JSON does not hold",
        ),
        (functools.partial(os.path.join, a=(1, 2)), "argument a"),
        (functools.partial(os.path.join, a=float("nan")), "argument a"),
    ],
)
def test_work_that_a_fresh_process_cannot_find_is_refused_with_the_reason(work, words):
    with pytest.raises(LaunchError, match=words):
        name_of(work)


def test_a_local_function_is_refused_by_the_name_of_what_holds_it():
    def inside(place):
        return 0

    with pytest.raises(LaunchError, match=r"inside test_a_local_function_\w+\(\)"):
        name_of(inside)


# -- the machine --------------------------------------------------------------------------------------------


def test_cores_are_shared_out_unless_a_person_said_how_many(monkeypatch):
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [machine.default_threads(n) for n in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert machine.default_threads(2) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert machine.default_threads(2) == 4


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 6), ("150000 100000", 1), ("300000 100000", 3), ("", 6)]
)
def test_a_containers_quota_counts_as_cores(monkeypatch, tmp_path, quota, expected):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine, "_own_cgroup", lambda: tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert machine.num_cores() == expected


def test_the_memory_killers_count_is_read_from_the_control_group(monkeypatch, tmp_path):
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(machine, "_own_cgroup", lambda: tmp_path)
    assert machine.num_memory_kills() == 2


def test_a_hidden_gpu_is_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not machine.has_accelerator()


def test_leftovers_are_what_says_which_process_this_is():
    environment = dict.fromkeys(
        [
            "SLURM_PROCID",
            "SLURM_STEP_ID",
            "SLURM_JOB_ID",
            "OMPI_COMM_WORLD_RANK",
            "PMI_RANK",
            "TORCHELASTIC_RUN_ID",
            "PATH",
        ],
        "x",
    )
    assert set(environment) - set(leftovers(environment)) == {"SLURM_JOB_ID", "PATH"}


# -- the warm parent ----------------------------------------------------------------------------------------


def test_a_thread_that_sleeps_or_spins_in_openmp_forbids_threads_to_forks_and_no_other_does(tmp_path):
    library = [range(0x7000, 0x8000)]

    def task(text):
        (tmp_path / "syscall").write_text(text)
        return warm._is_openmp(tmp_path, library)

    assert task("running")
    assert task("202 0x1 0x80 0x0 0x0 0x0 0x0 0x7fff 0x7abc")
    assert not task("202 0x1 0x80 0x0 0x0 0x0 0x0 0x7fff 0x9abc")
    assert not warm._is_openmp(tmp_path / "ended", library)


# -- logs that nobody asked for -----------------------------------------------------------------------------


@pytest.mark.parametrize(("keeps_log", "is_short"), [(True, False), (False, True)])
def test_a_log_that_nobody_asked_for_keeps_its_end_alone_and_the_rank_writes_on(
    tmp_path, monkeypatch, keeps_log, is_short
):
    monkeypatch.setattr(supervise, "MAX_PRIVATE_LOG_BYTES", 1000)
    monkeypatch.setattr(supervise, "TAIL_BYTES", 10)
    log = tmp_path / "rank_1.log"
    with log.open("ab", buffering=0) as written:
        written.write(b"x" * 2000 + b"the end\n")
        rank = supervise.Rank(
            rank=1, pid=0, poll=lambda: None, reports=0, log=log, record=tmp_path / "record", keeps_log=keeps_log
        )
        rank.shorten_log()
        written.write(b"more\n")
    assert log.read_bytes().endswith(b"xxthe end\nmore\n")
    assert (log.stat().st_size == 15) is is_short
