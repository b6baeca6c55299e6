"""A save is whole or it did not happen, whatever ends it: a kill, a full disk, a failing call, a second writer."""

import contextlib
import errno
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time

import pytest
import torch
from checkpoint_states import newest_tree, same, state_of
from safetensors.torch import load_file

from shoal.checkpoint import Writer, list_checkpoints, newest_good, pack, read, verify, write
from shoal.checkpoint.snapshot import _Own
from shoal.errors import CheckpointError

JOB = {"lr": 1e-3}
FACTS = {"job": JOB, "layout": "lone"}


def steps_in(folder):
    return [found.step for found in list_checkpoints(folder)]


def leftovers(folder):
    return [path.name for path in folder.iterdir() if ".tmp-" in path.name or path.name.endswith(".old")]


def in_child(function):
    """Run in a forked process; its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # the parent's OpenMP threads did not come along
            function()
            status = 0
        finally:
            os._exit(status)
    return pid


def status_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_plain_safetensors_loads_what_was_written(tmp_path):
    state = state_of(3)
    path = write(tmp_path, state, step=3, **FACTS)
    loaded = load_file(path / "rank_00000.safetensors")
    tensors, _ = pack(state)
    assert set(loaded) == set(tensors)
    assert all(same(loaded[name], tensors[name]) for name in tensors)


def test_mixed_widths_empty_and_strided_tensors_lie_in_the_file_without_gaps(tmp_path):
    state = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "wide": torch.randn(3, dtype=torch.float64),
        "half": torch.randn(5).to(torch.bfloat16),
        "none": torch.empty(2, 0),
        "turned": torch.randn(4, 6).t()[::2],
        "one": torch.tensor(True),
        "complex": torch.randn(3, dtype=torch.complex128).conj(),
    }
    path = write(tmp_path, state, step=1, **FACTS)
    assert same(read(path).tree, {**state, "complex": state["complex"].resolve_conj()})
    assert torch.equal(load_file(path / "rank_00000.safetensors")["turned"], state["turned"])


def test_a_state_without_tensors_is_saved_too(tmp_path):
    assert read(write(tmp_path, {"step": 1}, step=1, **FACTS)).tree == {"step": 1}


def test_no_pickle_is_in_any_file(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    path = write(tmp_path, state_of(1), step=1, **FACTS)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "rank_00000.safetensors"]
    assert same(read(path).tree, state_of(1))


def test_nothing_of_the_device_is_stored_and_all_loads_on_the_cpu(tmp_path):
    """D123, D124: the default device of the process that saves or loads does not matter either."""
    state = state_of(1)
    with torch.device("meta"):
        path = write(tmp_path, state, step=1, **FACTS)
        tree = read(path).tree
    assert tree["model"]["blocks.0.weight"].device.type == "cpu"
    assert same(tree, state)
    for file in path.iterdir():
        assert not {word for word in (b"cuda", b"cpu:", b"device") if word in file.read_bytes().replace(b"+cpu", b"")}


def test_what_was_submitted_is_saved_although_training_goes_on(tmp_path):
    state = state_of(1, size=2_000_000)
    with Writer(tmp_path) as writer:
        writer.submit(state, step=1, **FACTS)
        state["model"]["blocks.0.weight"].zero_()
        state["rng"]["numpy"][:] = 0
        state["optimizer"]["state"]["blocks.0.weight"]["step"] += 5
        state["step"] = 99
        del state["model"]["blocks.0.bias"]
    assert same(newest_tree(tmp_path), state_of(1, size=2_000_000))


def test_host_memory_is_used_again_and_each_save_still_holds_its_own_state(tmp_path):
    with Writer(tmp_path, keep=9) as writer:
        for step, size in [(1, 5000), (2, 5000), (3, 100), (4, 9000)]:
            writer.submit(state_of(step, size), step=step, **FACTS)
            assert writer.wait()
    for step, size in [(1, 5000), (2, 5000), (3, 100), (4, 9000)]:
        assert same(read(tmp_path / f"step_{step:06d}").tree, state_of(step, size))


def test_the_loop_goes_on_while_a_save_is_written_and_waits_only_for_the_one_before(tmp_path, monkeypatch):
    gate, inside, flying = threading.Semaphore(0), threading.Event(), []
    fsync = os.fsync

    def slow(descriptor):
        flying.append(threading.current_thread().name)
        inside.set()
        assert gate.acquire(timeout=20)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    with Writer(tmp_path) as writer:
        writer.submit(state_of(1), step=1, **FACTS)  # returns although its first fsync hangs
        assert inside.wait(20)
        assert steps_in(tmp_path) == []
        second = threading.Thread(target=lambda: writer.submit(state_of(2), step=2, **FACTS))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert set(flying) == {"shoal-checkpoint-1"}
        for _ in range(20):
            gate.release()
        second.join(20)
        assert writer.wait()
    assert steps_in(tmp_path) == [2, 1]


def test_a_step_already_committed_is_not_written_twice(tmp_path):
    with Writer(tmp_path) as writer:
        writer.submit(state_of(1), step=1, **FACTS)
        writer.submit(state_of(7), step=1, **FACTS)
    assert [saved.step for saved in writer.saved] == [1]
    assert same(newest_tree(tmp_path), state_of(1))


def test_the_last_k_are_kept(tmp_path):
    with Writer(tmp_path, keep=2) as writer:
        for step in range(10, 60, 10):
            writer.submit(state_of(step), step=step, **FACTS)
            assert writer.wait()
            assert steps_in(tmp_path) == [s for s in (step, step - 10) if s >= 10]
    assert leftovers(tmp_path) == []
    assert newest_good(tmp_path)[1] == []


def test_a_damaged_one_does_not_count_as_kept(tmp_path):
    for step in (1, 2):
        write(tmp_path, state_of(step), step=step, **FACTS)
    (tmp_path / "step_000002" / "rank_00000.safetensors").write_bytes(b"short")
    with Writer(tmp_path, keep=2) as writer:
        writer.submit(state_of(3), step=3, **FACTS)
    assert steps_in(tmp_path) == [3, 2, 1]


def test_checkpoints_of_later_steps_are_not_deleted(tmp_path):
    write(tmp_path, state_of(900), step=900, **FACTS)
    with Writer(tmp_path, keep=1) as writer:
        writer.submit(state_of(1), step=1, **FACTS)
        writer.submit(state_of(2), step=2, **FACTS)
    assert steps_in(tmp_path) == [900, 2]


def test_old_ones_go_only_after_the_new_one_is_committed(tmp_path, monkeypatch):
    write(tmp_path, state_of(1), step=1, **FACTS)
    seen = []
    rename = os.rename

    def watch(source, target):
        seen.append((steps_in(tmp_path), os.path.basename(target)))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watch)
    with Writer(tmp_path, keep=1) as writer:
        writer.submit(state_of(2), step=2, **FACTS)
    assert seen[0] == ([1], "step_000002")
    assert seen[1][0] == [2, 1]
    assert steps_in(tmp_path) == [2]


def test_keep_below_one_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep=0"):
        Writer(tmp_path, keep=0)


# ---- kills ----


def save_for_ever(folder, told):
    with Writer(folder, keep=2) as writer:
        for step in itertools.count(steps_in(folder)[0] + 1):
            writer.submit(state_of(step, size=300_000), step=step, **FACTS)
            os.write(told, b".")  # the save before this one is committed


def test_a_kill_at_any_time_leaves_a_committed_state_that_loads(tmp_path):
    """D129."""
    draw, reached, unfinished = random.Random(0), 0, 0
    write(tmp_path, state_of(0, size=300_000), step=0, **FACTS)
    hears, told = os.pipe()
    for _ in range(30):
        committed = reached + draw.randrange(3)
        pid = in_child(lambda: save_for_ever(tmp_path, told))
        for _ in range(committed - reached + 1):
            os.read(hears, 1)
        time.sleep(draw.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert status_of(pid) == -signal.SIGKILL
        unfinished += bool(leftovers(tmp_path))
        checkpoint, skipped = newest_good(tmp_path)
        assert skipped == []
        assert checkpoint.step >= committed
        assert same(read(checkpoint.path).tree, state_of(checkpoint.step, size=300_000))
        reached = checkpoint.step
        os.set_blocking(hears, False)
        with contextlib.suppress(BlockingIOError):
            os.read(hears, 1000)
        os.set_blocking(hears, True)
    os.close(hears)
    os.close(told)
    assert unfinished > 3  # the kills did hit saves in the middle
    Writer(tmp_path).close()
    assert leftovers(tmp_path) == []


def test_leftovers_of_a_dead_writer_go_and_nothing_else_does(tmp_path):
    write(tmp_path, state_of(1), step=1, **FACTS)
    for name in ("step_000002.tmp-0a1b", "step_000009.tmp-ff"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").write_bytes(b"half")
    for name in ("notes.tmp-1", "step_000003.tmp-user notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000004.tmp-ab").write_text("a file of the user's")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step_000005.tmp-cd").symlink_to(tmp_path / "elsewhere")
    Writer(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".generation_000001",
        ".lock",
        "elsewhere",
        "notes.tmp-1",
        "step_000001",
        "step_000003.tmp-user notes",
        "step_000004.tmp-ab",
        "step_000005.tmp-cd",
    ]


def test_a_kill_while_a_step_is_replaced_loses_nothing(tmp_path):
    write(tmp_path, state_of(5), step=5, **FACTS)
    (tmp_path / "step_000005").rename(tmp_path / "step_000005.old")  # the moment between the two renames
    Writer(tmp_path).close()
    assert same(newest_tree(tmp_path), state_of(5))
    write(tmp_path, state_of(6), step=5, **FACTS)
    Writer(tmp_path).close()
    assert same(newest_tree(tmp_path), state_of(6))
    assert leftovers(tmp_path) == []


# ---- failing disks ----


def test_a_save_that_cannot_take_the_place_of_an_older_one_puts_that_back(tmp_path, monkeypatch):
    write(tmp_path, state_of(1), step=1, **FACTS)
    rename, calls = os.rename, []

    def fail_second(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(CheckpointError, match="step 1 was not written: Input/output error"):
        write(tmp_path, state_of(2), step=1, **FACTS)
    assert leftovers(tmp_path) == []
    assert same(read(tmp_path / "step_000001").tree, state_of(1))


CALLS = ("open", "mkdir", "write", "fsync", "rename")


class Failing:
    """Let the n-th of the calls that change the disk fail, and the later ones too if asked."""

    def __init__(self, monkeypatch, at, *, for_ever=False, code=errno.ENOSPC):
        self.count, self.at, self.for_ever, self.code = 0, at, for_ever, code
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name, call):
        def wrapped(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:
                return call(*args, **kwargs)  # reading, and what rmtree does
            self.count += 1
            if self.count == self.at or (self.for_ever and self.count > self.at):
                raise OSError(self.code, os.strerror(self.code))
            return call(*args, **kwargs)

        return wrapped


def num_calls(tmp_path, state, step):
    with pytest.MonkeyPatch.context() as patch:
        counter = Failing(patch, at=-1)
        with Writer(tmp_path) as writer:
            opened = counter.count
            writer.submit(state, step=step, **FACTS)
            writer.wait()
        return counter.count - opened


@pytest.mark.parametrize("new_step", [2, 1], ids=["the next step", "the same step again"])
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_failure_of_any_call_leaves_the_old_or_the_new_state_whole(tmp_path, new_step, for_ever, code):
    write(tmp_path / "probe", state_of(1), step=1, **FACTS)
    total = num_calls(tmp_path / "probe", state_of(2), new_step)
    assert total >= 8
    for at in range(1, total + 1):
        folder = tmp_path / f"{at}"
        write(folder, state_of(1), step=1, **FACTS)
        events = []
        with Writer(folder, on_event=events.append) as writer, pytest.MonkeyPatch.context() as patch:
            Failing(patch, at, for_ever=for_ever, code=code)
            writer.submit(state_of(2), step=new_step, **FACTS)
            succeeded = writer.wait()
        assert succeeded == (not events)
        assert events == writer.events
        checkpoint, skipped = newest_good(folder)
        assert skipped == []
        values = [state_of(2)] if succeeded else [state_of(1), state_of(2)]
        assert any(same(read(checkpoint.path).tree, value) for value in values)
        with Writer(folder) as writer:  # and the folder works again
            writer.submit(state_of(3), step=3, **FACTS)
        assert same(newest_tree(folder), state_of(3))
        assert leftovers(folder) == []


def test_a_full_disk_is_told_clearly_and_training_goes_on(tmp_path, monkeypatch):
    write(tmp_path, state_of(400), step=400, **FACTS)
    events = []
    with Writer(tmp_path, on_event=events.append) as writer:
        with monkeypatch.context() as patch:
            usage = shutil.disk_usage(tmp_path)
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=12 << 20))
            writer.submit(state_of(500, size=4_000_000), step=500, **FACTS)
            assert not writer.wait()
        assert events == [
            "checkpoint of step 500 was not written: No space left on device (needs 30.5 MiB, 12.0 MiB free); "
            "the checkpoint of step 400 stands; training goes on"
        ]
        assert leftovers(tmp_path) == []
        writer.submit(state_of(600), step=600, **FACTS)
        assert writer.wait()
    assert steps_in(tmp_path) == [600, 400]


def test_a_failure_without_an_older_checkpoint_says_so(tmp_path, monkeypatch):
    with Writer(tmp_path) as writer:
        Failing(monkeypatch, 1, code=errno.EROFS)
        writer.submit(state_of(5), step=5, **FACTS)
    assert writer.events == [
        "checkpoint of step 5 was not written: Read-only file system; no older one exists; training goes on"
    ]


def test_a_file_size_limit_of_the_system_is_survived(tmp_path):
    write(tmp_path, state_of(1), step=1, **FACTS)

    def child():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with Writer(tmp_path) as writer:
            writer.submit(state_of(2, size=1_000_000), step=2, **FACTS)
            assert not writer.wait()
            assert "File too large (needs 7.6 MiB" in writer.events[0]

    assert status_of(in_child(child)) == 0
    assert same(newest_tree(tmp_path), state_of(1))
    assert leftovers(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "shoal-test", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a small disk here; the failing calls above stand in for it")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("lies", [False, True], ids=["known before", "found while writing"])
def test_a_disk_that_is_really_full_keeps_the_old_checkpoint(small_disk, monkeypatch, lies):
    with Writer(small_disk) as writer:
        writer.submit(state_of(1, size=300_000), step=1, **FACTS)
        assert writer.wait()
        if lies:  # a quota, or another program that fills the disk at the same time
            usage = shutil.disk_usage(small_disk)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 40))
        writer.submit(state_of(2, size=600_000), step=2, **FACTS)
        assert not writer.wait()
        assert "No space left on device (needs 4.6 MiB" in writer.events[0]
        writer.submit(state_of(3, size=300_000), step=3, **FACTS)
        assert writer.wait()
    assert steps_in(small_disk) == [3, 1]
    assert leftovers(small_disk) == []
    assert same(newest_tree(small_disk), state_of(3, size=300_000))


def test_short_writes_are_continued(tmp_path, monkeypatch):
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[: max(1, len(data) // 3)]))
    assert same(read(write(tmp_path, state_of(1), step=1, **FACTS)).tree, state_of(1))


def test_every_file_and_both_folders_are_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    log = []
    fsync, rename = os.fsync, os.rename

    def name(descriptor):
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split(".tmp-")[0]

    monkeypatch.setattr(os, "fsync", lambda fd: (log.append(name(fd)), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (log.append("rename"), rename(a, b)))
    write(tmp_path / "checkpoints", state_of(1), step=1, **FACTS)
    assert log == ["rank_00000.safetensors", "manifest.json", "step_000001", "rename", "checkpoints"]


def test_a_bug_in_the_thread_is_not_swallowed(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.checkpoint.writer.commit", lambda *_: 1 / 0)
    writer = Writer(tmp_path)
    writer.submit(state_of(1), step=1, **FACTS)
    with pytest.raises(ZeroDivisionError):
        writer.close()


def refuse_memory(patch):
    empty = torch.empty

    def refuse(size, **kwargs):
        if size > 1000:
            raise RuntimeError("can't allocate memory")
        return empty(size, **kwargs)

    patch.setattr(torch, "empty", refuse)


def test_the_first_save_copies_into_room_that_was_made_before(tmp_path, monkeypatch):
    with Writer(tmp_path) as writer:
        writer.prepare(state_of(0))
        assert writer.wait()
        with monkeypatch.context() as patch:
            refuse_memory(patch)
            writer.submit(state_of(1), step=1, **FACTS)
            assert writer.wait()
    assert same(newest_tree(tmp_path), state_of(1))


def test_a_save_waits_for_room_that_is_being_made(tmp_path, monkeypatch):
    hold, goes_on = _Own.hold, threading.Event()

    def slow(self, spans, *, pinned):
        if threading.current_thread() is not threading.main_thread():
            assert goes_on.wait(20)
        return hold(self, spans, pinned=pinned)

    monkeypatch.setattr(_Own, "hold", slow)
    with Writer(tmp_path) as writer:
        writer.prepare(state_of(0))
        threading.Timer(0.1, goes_on.set).start()
        writer.submit(state_of(1), step=1, **FACTS)
        assert goes_on.is_set()
    assert same(newest_tree(tmp_path), state_of(1))


def test_no_memory_for_the_room_is_told_by_the_save(tmp_path, monkeypatch):
    with Writer(tmp_path) as writer:
        with monkeypatch.context() as patch:
            refuse_memory(patch)
            writer.prepare(state_of(0))
            assert writer.wait()
            assert writer.events == []
            writer.submit(state_of(1), step=1, **FACTS)
            assert len(writer.events) == 1
        writer.submit(state_of(2), step=2, **FACTS)
    assert same(newest_tree(tmp_path), state_of(2))


def test_no_memory_for_the_snapshot_is_told_and_survived(tmp_path, monkeypatch):
    with Writer(tmp_path) as writer:
        with monkeypatch.context() as patch:
            refuse_memory(patch)
            writer.submit(state_of(1), step=1, **FACTS)
        assert not writer.wait()
        assert "no host memory for a copy of the state (7.9 KiB)" in writer.events[0]
        writer.submit(state_of(2), step=2, **FACTS)
    assert steps_in(tmp_path) == [2]


def test_what_cannot_be_stored_is_an_error_of_the_user_and_leaves_nothing(tmp_path):
    with Writer(tmp_path) as writer:
        with pytest.raises(CheckpointError, match="hook: a function"):
            writer.submit({"model": {"hook": lambda: 0}}, step=1, **FACTS)
        with pytest.raises(CheckpointError, match="identity holds a tensor at 'w'"):
            writer.submit({}, step=1, job={"w": torch.ones(1)}, layout="lone")
        with pytest.raises(CheckpointError, match="loss: a function"):
            writer.submit({}, step=1, job={"loss": len}, layout="lone")
    assert steps_in(tmp_path) == []


# ---- several processes ----


def test_a_second_writer_is_refused_and_told_who_is_first(tmp_path):
    """D131."""

    def child():
        for attempt in (lambda: Writer(tmp_path), lambda: write(tmp_path, {}, step=9, **FACTS)):
            with pytest.raises(CheckpointError, match=rf"another process \(pid {parent} on "):
                attempt()

    parent = os.getpid()
    with Writer(tmp_path) as writer:
        writer.submit(state_of(1), step=1, **FACTS)
        writer.wait()
        assert status_of(in_child(child)) == 0
    assert status_of(in_child(lambda: Writer(tmp_path).close())) == 0


def test_two_processes_that_save_to_one_place_never_mix(tmp_path):
    """D131: states of different size, one folder, one step; refused or whole."""

    def child(size):
        for _ in range(30):
            try:
                write(tmp_path, state_of(size, size), step=1, **FACTS)
            except CheckpointError as error:
                if "another process" not in str(error):
                    raise

    pids = [in_child(lambda size=size: child(size)) for size in (1000, 2000)]
    assert [status_of(pid) for pid in pids] == [0, 0]
    tree = newest_tree(tmp_path)
    assert same(tree, state_of(tree["step"], tree["step"]))


def test_orphans_of_a_killed_run_do_not_lock_a_restart_out(tmp_path):
    """A loader worker outlives its killed parent for seconds; it must not inherit the right to write."""
    reader, writing = os.pipe()

    def run():
        held = Writer(tmp_path)
        worker = in_child(lambda: time.sleep(60))
        os.write(writing, f"{worker}\n".encode())
        time.sleep(60)
        held.close()

    pid = in_child(run)
    worker = int(os.read(reader, 20))
    try:
        os.kill(pid, signal.SIGKILL)
        status_of(pid)
        Writer(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reader)
        os.close(writing)


def test_a_file_system_without_locks_is_written_but_not_cleaned(tmp_path, monkeypatch):
    (tmp_path / "step_000002.tmp-0a1b").mkdir()

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    with Writer(tmp_path) as writer:
        writer.submit(state_of(1), step=1, **FACTS)
    assert steps_in(tmp_path) == [1]
    assert leftovers(tmp_path) == ["step_000002.tmp-0a1b"]


def test_many_ranks_may_create_the_folder_on_a_file_system_that_answers_late(tmp_path, monkeypatch):
    """D133: mkdir says it exists, and for a while nothing else can see it."""
    folder = tmp_path / "run" / "checkpoints"
    makedirs, opened, late = os.makedirs, os.open, [2]

    def exists(path, **_):
        makedirs(path, exist_ok=True)
        raise FileExistsError(errno.EEXIST, "exists", str(path))

    def stale(path, *args, **kwargs):
        if str(path) == str(folder) and late[0]:
            late[0] -= 1
            raise FileNotFoundError(errno.ENOENT, "not there yet", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "makedirs", exists)
    monkeypatch.setattr(os, "open", stale)
    with Writer(folder) as writer:
        writer.submit(state_of(1), step=1, **FACTS)
    assert late == [0]
    assert verify(folder / "step_000001") == []


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        Writer(tmp_path / "checkpoints")
