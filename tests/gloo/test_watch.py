"""A rank that stands still, or falls back, is named; one that only takes long is not."""

import ctypes
import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import Points, points
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoal.launch import Outcome, start, warm_up
from shoal.launch.incident import read
from shoal.launch.suspects import Patience
from shoal.record import Seen, look
from shoal.run import Run, assemble
from shoal.world import Place, World

warm_up(also=("shoal.run", "psutil"))
QUICK = Patience(least_s=1.0, seldom_s=30.0, unknown_s=60.0, look_s=0.1, stacks_s=0.4)
TRAP = 8  # the step in which it happens: some are usual before it
Trap = Callable[[int, int], None]  # rank, step


def nothing(rank: int, step: int) -> None:
    """No trap."""


def job(
    *, forward: Trap = nothing, backward: Trap = nothing, fetch: Trap = nothing, evaluate: Trap = nothing, **fields: Any
) -> Points:
    """A small job with a trap in one of its parts."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
            self.num_calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                evaluate(dist.get_rank(), self.num_calls)
                return self.inner(inputs)  # type: ignore[no-any-return]
            self.num_calls += 1
            forward(dist.get_rank(), self.num_calls)
            output: Tensor = self.inner(inputs)
            step = self.num_calls
            output.register_hook(lambda grad: backward(dist.get_rank(), step))
            return output

    class Data(Dataset[Any]):
        def __init__(self) -> None:
            self.rows, self.num_read = points(24), 0

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            self.num_read += 1
            if dist.is_initialized():
                fetch(dist.get_rank(), self.num_read)
            return self.rows[index]

    @dataclass(frozen=True, kw_only=True)
    class Trapped(Points):
        steps: int = 12
        batch_size: int = 4

        def model(self) -> nn.Module:
            return Net()

        def data(self) -> Any:
            return Data()

    return Trapped(**fields)


def train(
    made: Points,
    folder: Path,
    *,
    layout: str = "dp2",
    patience: Patience = QUICK,
    meanwhile: Callable[[Path], None] | None = None,
    in_loop: Callable[[Run], None] | None = None,
    num_ranks: int = 2,
) -> tuple[Outcome, str, list[dict[str, Any]]]:
    """The outcome, what was shown, and the incidents.

    Args:
        meanwhile: runs beside it, with the folder in which `pid_N` says who rank N is.
        in_loop: called on each rank after each step.
    """

    def work(place: Place) -> None:
        pid = folder / f".pid_{place.rank}"
        pid.write_text(f"{os.getpid()}\n{place.record}")
        pid.rename(folder / f"pid_{place.rank}")
        with World.open(layout, place=place, timeout_min=1.0) as world:
            run = assemble(made, world, quiet=True, folder=folder / "run", save_every=1000)
            for step in run.steps():
                run.log(step())
                if in_loop is not None:
                    in_loop(run)

    shown: list[str] = []
    beside = threading.Thread(target=meanwhile, args=(folder,)) if meanwhile else None
    if beside is not None:
        beside.start()
    outcome = start(
        work,
        num_ranks,
        screen=shown.append,
        show="none",
        threads=1,
        log_dir=folder / "logs",
        incidents=folder / "incidents.jsonl",
        patience=patience,
    )
    if beside is not None:
        beside.join()
    return outcome, "\n".join(shown), read(folder / "incidents.jsonl")


def pid_of(folder: Path, rank: int) -> int:
    return int(told_by(folder, rank)[0])


def seen_of(folder: Path, rank: int) -> Seen:
    return look(Path(told_by(folder, rank)[1]))


def told_by(folder: Path, rank: int) -> list[str]:
    wait_until((folder / f"pid_{rank}").exists)
    return (folder / f"pid_{rank}").read_text().splitlines()


def wait_until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def wait_for_incident(folder: Path) -> None:
    wait_until(lambda: bool(read(folder / "incidents.jsonl")))


def kill_when_seen(folder: Path) -> None:
    """Let the trap's rank stand until it was told, and end it."""
    wait_for_incident(folder)
    os.kill(pid_of(folder, 1), signal.SIGKILL)


def once(rank: int, then: Callable[[], None]) -> Trap:
    """A trap for one rank in one step."""

    def trap(own: int, step: int) -> None:
        if (own, step) == (rank, TRAP):
            then()

    return trap


# -- a rank that stands still ---------------------------------------------------------------------------------


def sleep_for_ever() -> None:
    while True:
        time.sleep(0.05)


def spin_for_ever() -> None:
    while True:
        pass


def long_call_without_the_interpreter() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def long_call_that_holds_the_interpreter() -> None:
    re.match("(a+)+$", "a" * 60 + "b")


def native_sleep_that_holds_the_interpreter() -> None:
    library = ctypes.PyDLL(None)
    while True:
        library.sleep(1000)  # a signal ends it


def test_a_loop_that_sleeps_in_the_forward_is_named_with_its_line(tmp_path: Path) -> None:
    outcome, shown, incidents = train(job(forward=once(1, sleep_for_ever)), tmp_path, meanwhile=kill_when_seen)

    assert "rank 1 of 2 stands still" in shown
    assert f"step {TRAP}, compute" in shown
    assert "in sleep_for_ever:  time.sleep(0.05)" in shown
    assert "sleeping" in shown
    assert f"rank 0: waits in all_reduce dp, step {TRAP}, compute" in shown
    assert [incident["kind"] for incident in incidents] == ["standing"]
    assert outcome.exit_code == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    "then", [spin_for_ever, long_call_without_the_interpreter, long_call_that_holds_the_interpreter]
)
def test_a_loop_that_computes_is_named_whether_or_not_it_holds_the_interpreter(
    then: Callable[[], None], tmp_path: Path
) -> None:
    _, shown, incidents = train(job(forward=once(1, then)), tmp_path, meanwhile=kill_when_seen)

    assert "rank 1 of 2 stands still" in shown
    assert f"in {then.__name__}" in shown
    assert "CPU: a loop, or one long operation" in shown
    assert [[row["rank"] for row in incident["ranks"]] for incident in incidents] == [[1]]


def test_one_that_sleeps_and_holds_the_interpreter_is_named_too(tmp_path: Path) -> None:
    trapped = job(forward=once(1, native_sleep_that_holds_the_interpreter))
    _, shown, _ = train(trapped, tmp_path, meanwhile=kill_when_seen)

    assert "rank 1 of 2 stands still" in shown
    assert "in native_sleep_that_holds_the_interpreter" in shown
    assert "sleeping" in shown


def test_a_loop_in_a_backward_of_the_user_is_named(tmp_path: Path) -> None:
    _, shown, _ = train(job(backward=once(0, sleep_for_ever)), tmp_path, meanwhile=kill_when_seen)

    assert "rank 0 of 2 stands still" in shown
    assert "in sleep_for_ever" in shown
    assert "rank 1: waits in all_reduce dp" in shown


def test_a_rank_that_was_stopped_is_named_and_so_is_that_it_goes_on(tmp_path: Path) -> None:
    def stop_and_continue(folder: Path) -> None:
        wait_until(lambda: seen_of(folder, 1).step >= TRAP)
        os.kill(pid_of(folder, 1), signal.SIGSTOP)
        wait_for_incident(folder)
        os.kill(pid_of(folder, 1), signal.SIGCONT)

    slow = job(forward=lambda rank, step: time.sleep(0.05), steps=40)
    outcome, shown, incidents = train(slow, tmp_path, meanwhile=stop_and_continue)

    assert outcome.exit_code == 0
    assert "rank 1 of 2 stands still" in shown
    assert f"stopped (SIGSTOP, Ctrl-Z or a debugger); kill -CONT {pid_of(tmp_path, 1)} lets it go on" in shown
    assert "it cannot show its stack" in shown
    assert shown.count("stands still") == 1, "once for each incident"
    assert "rank 1 goes on, having stood still for" in shown
    assert [incident["kind"] for incident in incidents] == ["standing", "goes on"]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_does_not_come_is_named_with_its_line_also_in_a_worker(workers: int, tmp_path: Path) -> None:
    def stuck(rank: int, num_read: int) -> None:
        if rank == 1 and num_read == 15:
            sleep_for_ever()

    layout = f"dp2:workers={workers}" if workers else "dp2"
    _, shown, incidents = train(job(fetch=stuck), tmp_path, layout=layout, meanwhile=kill_when_seen)

    assert "rank 1 of 2 stands still" in shown
    assert ", data" in shown
    assert "in sleep_for_ever" in shown
    assert incidents[0]["ranks"][0]["phase"] == "data"


def test_a_stall_that_comes_again_is_told_once(tmp_path: Path) -> None:
    def stalls(rank: int, num_read: int) -> None:
        if rank == 1 and num_read in (15, 21):
            time.sleep(2.5)

    outcome, shown, incidents = train(job(fetch=stalls), tmp_path)

    assert outcome.exit_code == 0
    assert [incident["kind"] for incident in incidents] == ["standing", "goes on"]
    assert shown.count("stands still") == 1


@pytest.mark.parametrize(("layout", "waits"), [("fsdp2", r"waits in \w+ fsdp"), ("pp2:micro=2", "waits in recv pp")])
def test_in_other_layouts_too_the_one_that_waits_for_nobody_is_named(layout: str, waits: str, tmp_path: Path) -> None:
    def stuck(rank: int, num_read: int) -> None:
        if rank == 0 and num_read == 30:
            sleep_for_ever()

    _, shown, incidents = train(job(fetch=stuck, steps=40), tmp_path, layout=layout, meanwhile=kill_when_seen)

    assert "rank 0 of 2 stands still" in shown
    assert re.search(f"rank 1: {waits}, step", shown)
    assert [row["rank"] for row in incidents[0]["ranks"]] == [0]


# -- ranks that wait for each other ---------------------------------------------------------------------------


def test_two_ranks_in_different_collectives_are_shown_with_both_lines(tmp_path: Path) -> None:
    groups: list[Any] = []

    def cross(rank: int, step: int) -> None:
        if not groups:
            groups.extend((dist.new_group(), dist.new_group()))
        if step == TRAP:
            first, second = groups if rank == 0 else reversed(groups)
            value = torch.zeros(1)
            if rank == 0:
                dist.all_reduce(value, group=first)
            dist.broadcast(value, src=0, group=second) if rank == 0 else dist.all_reduce(value, group=first)

    def let_go(folder: Path) -> None:
        wait_for_incident(folder)
        for rank in (0, 1):
            os.kill(pid_of(folder, rank), signal.SIGKILL)

    _, shown, incidents = train(job(forward=cross), tmp_path, meanwhile=let_go)

    assert "the ranks are in different collectives" in shown
    assert "test_watch.py" in shown
    assert incidents[0]["kind"] == "desync"
    assert {row["rank"] for row in incidents[0]["ranks"]} == {0, 1}
    assert all("in cross" in row["frame"] for row in incidents[0]["ranks"])


def test_a_rank_that_leaves_a_collective_out_is_shown_with_the_call_that_the_other_waits_in(tmp_path: Path) -> None:
    groups: list[Any] = []

    def leave_out(rank: int, step: int) -> None:
        if not groups:
            groups.append(dist.new_group())
        if not (rank == 1 and step == TRAP):
            dist.all_reduce(torch.zeros(2, 3), group=groups[0])

    _, shown, incidents = train(job(forward=leave_out), tmp_path, meanwhile=kill_when_seen)

    assert "the ranks are in different collectives" in shown
    assert re.search(r"rank 0: all_reduce sum float32 \(2, 3\), at \S+test_watch.py:\d+ in leave_out", shown)
    assert "rank 1: not made; instead all_reduce of the gradients (DDP), at" in shown
    assert "rank 1: not made" in incidents[0]["parted"]


def test_what_native_code_gives_up_over_is_told_with_the_call_that_one_left_out(tmp_path: Path) -> None:
    def leave_out(rank: int, step: int) -> None:
        if not (rank == 1 and step == TRAP):
            dist.all_reduce(torch.zeros(2, 3))  # rank 1 answers it with its gradients, which have another size

    outcome, shown, _ = train(job(backward=leave_out), tmp_path)

    assert outcome.exit_code == 128 + signal.SIGABRT
    assert "the ranks did not make the same calls" in shown
    assert re.search(r"rank 0: all_reduce sum float32 \(2, 3\), at \S+test_watch.py:\d+ in leave_out", shown)
    assert "rank 1: not made; the last one was all_reduce of the gradients (DDP), at" in shown


def test_a_loop_of_ones_own_that_parts_is_ended_and_told_with_both_calls(tmp_path: Path) -> None:
    def work(place: Place) -> None:
        with World.open("dp2", place=place, timeout_min=1.0):
            for number in range(3000):  # a minute
                op = dist.ReduceOp.MAX if (place.rank, number) == (1, 20) else dist.ReduceOp.SUM
                dist.all_reduce(torch.ones(3), op)
                time.sleep(0.02)

    shown: list[str] = []
    outcome = start(
        work, 2, screen=shown.append, show="none", threads=1, incidents=tmp_path / "incidents.jsonl", patience=QUICK
    )

    assert (outcome.exit_code, outcome.failures[0].rank) == (2, 1)
    assert outcome.seconds < 30
    text = "\n".join(shown)
    assert "the ranks did not make the same calls: call 21 of the group of 2 ranks from 0 to 1 is" in text
    assert re.search(r"rank 0: all_reduce sum float32 \(3\), at \S+test_watch.py:\d+ in work", text)
    assert re.search(r"rank 1: all_reduce max float32 \(3\), at \S+test_watch.py:\d+ in work", text)


# -- a rank that ends -----------------------------------------------------------------------------------------


def test_the_failure_screen_says_what_a_killed_rank_was_doing(tmp_path: Path) -> None:
    def killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    outcome, shown, _ = train(job(forward=once(1, killed)), tmp_path)

    assert outcome.failures[0].doing.startswith(f"step {TRAP}, compute, after ")
    assert f"in step {TRAP}, compute, after " in shown
    assert f"in step {TRAP}, compute, inside all_reduce dp" in shown, "what the other one waited for"


def test_the_failure_screen_says_that_a_killed_rank_was_in_a_collective(tmp_path: Path) -> None:
    def kill_inside(folder: Path) -> None:
        def waits_for_sums() -> bool:  # and not for a log's figures, which are there in a moment
            seen = seen_of(folder, 0)
            return bool(
                seen.is_inside and seen.step == TRAP and seen.message and seen.message.operation == "all_reduce"
            )

        wait_until(waits_for_sums)
        os.kill(pid_of(folder, 0), signal.SIGKILL)

    late = job(forward=once(1, lambda: time.sleep(5.0)))
    outcome, _, _ = train(late, tmp_path, meanwhile=kill_inside)

    assert outcome.failures[0].doing == f"step {TRAP}, compute, inside all_reduce dp"


# -- a rank that is slow --------------------------------------------------------------------------------------


def test_a_straggler_is_named_once_with_its_phase_and_its_cost(tmp_path: Path) -> None:
    def slower(rank: int, step: int) -> None:
        time.sleep(0.03 if rank == 1 else 0.01)

    quick = replace(QUICK, window_steps=5, window_s=0.3)
    outcome, shown, incidents = train(job(forward=slower, steps=60), tmp_path, patience=quick)

    assert outcome.exit_code == 0
    assert re.search(r"rank 1 costs \d+ % of each step: its compute takes \d\.\d x that of the others", shown)
    assert [(incident["kind"], incident["rank"]) for incident in incidents] == [("straggler", 1)]


def test_stages_of_a_pipeline_that_differ_are_no_stragglers(tmp_path: Path) -> None:
    quick = replace(QUICK, window_steps=5, window_s=0.1)
    outcome, shown, incidents = train(job(steps=40), tmp_path, layout="pp2", patience=quick)

    assert (outcome.exit_code, shown, incidents) == (0, "", [])


# -- no false alarm -------------------------------------------------------------------------------------------


def test_a_slow_first_step_a_long_evaluation_a_slow_save_and_a_slow_loop_are_no_incident(tmp_path: Path) -> None:
    def at_first(rank: int, step: int) -> None:
        if step == 1 and rank == 1:
            time.sleep(2.5)

    def long(rank: int, step: int) -> None:
        if rank == 0 and step > 1:
            time.sleep(1.0)

    def between(run: Run) -> None:
        if run.step == 4:
            run.evaluate()
        if run.step == 6 and run.world.rank == 0:
            time.sleep(2.5)
        if run.step == 8:
            slow = run._state

            def state() -> dict[str, Any]:
                time.sleep(2.5 if run.world.rank == 0 else 0.0)
                return slow()

            run._state = state  # type: ignore[method-assign]
            run.save()

    outcome, shown, incidents = train(job(forward=at_first, evaluate=long), tmp_path, in_loop=between)

    assert (outcome.exit_code, shown, incidents) == (0, "", [])


def test_a_step_of_four_times_the_usual_length_is_no_incident(tmp_path: Path) -> None:
    def uneven(rank: int, step: int) -> None:
        time.sleep(1.6 if step == TRAP else 0.4)

    outcome, shown, incidents = train(job(forward=uneven, steps=10), tmp_path)

    assert (outcome.exit_code, shown, incidents) == (0, "", [])


def test_a_training_without_a_parent_of_ours_writes_no_record() -> None:
    with World.open("lone") as world:
        assert not world.record.is_read
