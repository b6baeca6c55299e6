"""Ranks that call different collectives are stopped before the update, and told with both calls and both places."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import Points
from ranks import run_processes
from torch import Tensor, nn

from shoal.errors import WorldError
from shoal.layout import Layout
from shoal.run import assemble
from shoal.world import Place, World

TRAP = 4  # the step in which rank 1 does something else
Calls = Callable[[bool, dict[str, Any]], None]  # whether this rank parts now; its groups


def floats() -> Tensor:
    return torch.ones(2, 3)


def quiet(parts: bool, groups: dict[str, Any]) -> None:
    """None."""


def skipped(parts: bool, groups: dict[str, Any]) -> None:
    if not parts:
        dist.all_reduce(floats(), group=groups["a"])  # first
    dist.all_reduce(floats(), group=groups["a"], async_op=True)  # second: nobody waits for it


def repeated(parts: bool, groups: dict[str, Any]) -> None:
    for _ in range(2 if parts else 1):
        dist.all_reduce(floats(), group=groups["a"], async_op=True)  # here


def swapped_lines(parts: bool, groups: dict[str, Any]) -> None:
    def one() -> None:
        dist.all_reduce(floats(), group=groups["a"])  # one

    def other() -> None:
        dist.all_reduce(floats() * 2, group=groups["a"])  # other

    for call in (other, one) if parts else (one, other):
        call()


def swapped_shapes(parts: bool, groups: dict[str, Any]) -> None:
    shapes = [(2, 3), (3, 2)]
    for shape in reversed(shapes) if parts else shapes:
        dist.all_reduce(torch.ones(shape), group=groups["a"])


def wrong_op(parts: bool, groups: dict[str, Any]) -> None:
    dist.all_reduce(floats(), dist.ReduceOp.MAX if parts else dist.ReduceOp.SUM, group=groups["a"])


def wrong_dtype(parts: bool, groups: dict[str, Any]) -> None:
    dist.all_reduce(floats().int() if parts else floats(), group=groups["a"])


def wrong_shape(parts: bool, groups: dict[str, Any]) -> None:
    dist.all_reduce(floats().T.contiguous() if parts else floats(), group=groups["a"])


def wrong_group(parts: bool, groups: dict[str, Any]) -> None:
    dist.all_reduce(floats(), group=groups["b" if parts else "a"], async_op=True)


def wrong_root(parts: bool, groups: dict[str, Any]) -> None:
    dist.broadcast(floats(), src=dist.get_rank() if parts else 0, group=groups["a"], async_op=True)


def one_barrier_more(parts: bool, groups: dict[str, Any]) -> None:
    """D073: it pairs with the next call of the others, and everything shifts by one."""
    if parts:
        dist.barrier(group=groups["a"], async_op=True)
    dist.all_reduce(floats(), group=groups["a"], async_op=True)


def job(calls: Calls, *, in_backward: bool = False) -> Points:
    """One whose forward, or backward, makes these calls."""
    groups: dict[str, Any] = {}

    def call(step: int) -> None:
        if not groups:
            groups.update(a=dist.new_group(), b=dist.new_group())
        groups["step"] = step
        calls(dist.get_rank() == 1 and step == TRAP, groups)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
            self.num_calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            output: Tensor = self.inner(inputs)
            if not torch.is_grad_enabled():
                return output
            self.num_calls += 1
            step = self.num_calls
            if in_backward:
                output.register_hook(lambda grad: call(step))  # type: ignore[no-untyped-call]
            else:
                call(step)
            return output

    @dataclass(frozen=True, kw_only=True)
    class Parts(Points):
        steps: int = 6
        batch_size: int = 4

        def model(self) -> nn.Module:
            return Net()

    return Parts()


Fate = tuple[str, int, bool]  # the error, the steps that were done, whether the weights are those after these


def fate(made: Points, layout: str, rank: int, size: int, rendezvous: str, in_loop: Calls = quiet) -> Fate:
    """What becomes of one rank, whose loop makes calls between its steps."""
    place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="flags")
    with World.open(layout, place=place, timeout_min=0.5) as world:
        run = assemble(made, world, quiet=True)
        kept: list[Tensor] = []
        try:
            for step in run.steps():
                kept = [param.detach().clone() for param in run.model.parameters()]
                in_loop(rank == 1 and run.step + 1 == TRAP, {"a": dist.group.WORLD})
                step()
        except WorldError as error:
            return str(error), run.step, all(map(torch.equal, kept, run.model.parameters()))
        return "", run.step, True


def fates(jobs: Mapping[str, Points], layout: str) -> dict[str, list[Fate]]:
    """What becomes of each of the ranks in each of the jobs, one after the other in the same processes."""

    def work(rank: int, size: int, rendezvous: str) -> dict[str, Fate]:
        return {name: fate(made, layout, rank, size, f"{rendezvous}-{name}") for name, made in jobs.items()}

    found = run_processes(work, Layout.parse(layout).num_ranks, time_limit_s=120)
    return {name: [told[name] for told in found] for name in jobs}


SUM = "all_reduce sum float32 (2, 3)"
#        what rank 1 does                 what rank 0 and rank 1 are said to do
PARTED = {
    "skipped": (skipped, SUM, SUM),
    "repeated": (repeated, "not made; the last one was " + SUM, SUM),
    "swapped_lines": (swapped_lines, SUM, SUM),
    "swapped_shapes": (swapped_shapes, SUM, "all_reduce sum float32 (3, 2)"),
    "wrong_op": (wrong_op, SUM, "all_reduce max float32 (2, 3)"),
    "wrong_dtype": (wrong_dtype, SUM, "all_reduce sum int32 (2, 3)"),
    "wrong_shape": (wrong_shape, SUM, "all_reduce sum float32 (3, 2)"),
    "wrong_group": (wrong_group, SUM, "not made; instead " + SUM),
    "one_barrier_more": (one_barrier_more, SUM, "barrier"),
    "wrong_root": (wrong_root, "broadcast root 0 float32 (2, 3)", "broadcast root 1 float32 (2, 3)"),
}


@pytest.fixture(scope="module")
def parted() -> dict[str, list[Fate]]:
    jobs = {name: job(calls) for name, (calls, _, _) in PARTED.items()}
    backward = {f"{name} in backward": job(PARTED[name][0], in_backward=True) for name in ("wrong_op", "skipped")}
    return fates({**jobs, **backward}, "dp2")


def assert_told(told: list[Fate], first: str, second: str) -> None:
    for error, steps, has_same_weights in told:
        assert error.startswith(f"step {TRAP}: the ranks did not make the same calls: call ")
        assert f"\n  rank 0: {first}, at " in error
        assert f"\n  rank 1: {second}, at " in error
        assert len(re.findall(r"test_desync\.py:\d+ in ", error)) == 2, "both places"
        assert (steps, has_same_weights) == (TRAP - 1, True), "no update was made"


@pytest.mark.parametrize("name", PARTED)
def test_a_rank_that_calls_something_else_stops_all_before_the_update(name: str, parted: dict[str, list[Fate]]) -> None:
    _, first, second = PARTED[name]
    assert_told(parted[name], first, second)


@pytest.mark.parametrize("name", ["wrong_op", "skipped"])
def test_so_does_one_in_the_backward(name: str, parted: dict[str, list[Fate]]) -> None:
    _, first, second = PARTED[name]
    assert_told(parted[f"{name} in backward"], first, second)


@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_so_it_is_in_other_layouts(layout: str) -> None:
    assert_told(fates({"wrong_op": job(wrong_op)}, layout)["wrong_op"], SUM, PARTED["wrong_op"][2])


def test_and_so_does_one_between_two_steps_of_a_pipeline() -> None:
    def work(rank: int, size: int, rendezvous: str) -> Fate:
        return fate(Points(steps=6, batch_size=4), "pp2", rank, size, rendezvous, wrong_dtype)

    assert_told(run_processes(work, 2), SUM, PARTED["wrong_dtype"][2])


# -- no false alarm -------------------------------------------------------------------------------------------


def from_two_places(parts: bool, groups: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(floats(), group=groups["a"])
    else:
        dist.all_reduce(floats() * 0, group=groups["a"])


def unequal_parts(parts: bool, groups: dict[str, Any]) -> None:
    rows = [[1, 2], [3, 1]]  # that each rank sends to each
    rank = dist.get_rank()
    sent, got = rows[rank], [from_it[rank] for from_it in rows]
    dist.all_to_all_single(torch.ones(sum(got)), torch.ones(sum(sent)), got, sent, group=groups["a"])
    dist.scatter(torch.ones(2), [torch.ones(2)] * 2 if rank == 0 else None, src=0, group=groups["a"])
    dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2), group=groups["a"])


def on_its_way(parts: bool, groups: dict[str, Any]) -> None:
    """A message that one has sent, and the other one asks for only later."""
    if dist.get_rank() == 0:
        groups["sent", groups["step"]] = sent = floats()
        groups["work", groups["step"]] = dist.isend(sent, dst=1, group=groups["b"])
    elif groups["step"] > 1:
        dist.recv(floats(), src=0, group=groups["b"])


def by_a_thread(parts: bool, groups: dict[str, Any]) -> None:
    """One on its own time, on one rank here and on the other one in the next step."""
    if "thread" in groups:
        groups.pop("thread").join()

    def later() -> None:
        time.sleep(0.05 * dist.get_rank())
        dist.all_reduce(floats(), group=groups["b"])

    groups["thread"] = threading.Thread(target=later)
    groups["thread"].start()


WELL = [from_two_places, unequal_parts, on_its_way, by_a_thread]


def test_what_is_well_is_no_alarm() -> None:
    for name, told in fates({calls.__name__: job(calls) for calls in WELL}, "dp2").items():
        assert told == [("", 6, True)] * 2, name


# -- without a parent of ours: torchrun, srun, mpirun ----------------------------------------------------------


def test_a_time_out_says_what_each_rank_does_and_what_it_left_out_and_so_does_sigterm(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def stand_still() -> None:
        (tmp_path / "stands").touch()
        while not (tmp_path / "over").exists():
            time.sleep(0.05)

    def work(rank: int, size: int, rendezvous: str) -> str:
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="flags")
        with World.open("dp2", place=place, timeout_min=0.1) as world:
            run = assemble(Points(steps=6, batch_size=4), world, quiet=True)
            for step in run.steps():
                step()
                if rank == 1 and run.step == TRAP:
                    stand_still()
                    return ""
                if run.step == TRAP:
                    threading.Thread(target=terminate, args=(os.getpid(),)).start()
                dist.all_reduce(floats())
        return ""

    def terminate(pid: int) -> None:
        while not (tmp_path / "stands").exists():
            time.sleep(0.05)
        os.kill(pid, signal.SIGTERM)

    def told(rank: int, size: int, rendezvous: str) -> str:
        try:
            return work(rank, size, rendezvous)
        except RuntimeError as error:
            return "\n".join(error.__notes__)
        finally:
            (tmp_path / "over").touch()

    notes, _ = run_processes(told, 2)
    at = r"\S*test_desync.py:\d+ in"
    assert re.search(rf"\n  rank 0: all_reduce sum float32 \(2, 3\), at {at} work\n  rank 1: not made", notes)
    assert f"rank 0: this one, step {TRAP}, between its phases, inside all_reduce dp" in notes
    assert re.search(rf"rank 1: step {TRAP}, between its phases, after \w+ dp, at {at} stand_still", notes)
    said = capfd.readouterr().err
    assert re.search(rf"rank 0: was asked to end \(SIGTERM\), and is still in step {TRAP}, .*, at {at} work", said)
