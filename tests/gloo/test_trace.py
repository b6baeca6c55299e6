"""Traces of real runs: what each lane holds, step by step; the numbers of the training stay the same to the bit."""

import gzip
import json
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import Points
from ranks import run_processes
from torch.profiler import ProfilerActivity, profile
from trainings import Record, checkpoint_steps, record, walk
from zoo import TiedGPT

from shoal.errors import WorldError
from shoal.job import Job
from shoal.layout import Layout
from shoal.metrics.events import read_events
from shoal.run import assemble
from shoal.world import Place, World

STEPS = 6
TRACED = ["step 3", "step 4", "step 5"]
LAYOUTS = {"dp2": "dp", "fsdp2": "fsdp", "tp2": "tp", "pp2:micro=2": "pp"}


def gpt() -> Job:
    return TiedGPT(width=16, heads=2, depth=2, steps=STEPS)


@dataclass
class Trace:
    """A run that was traced, and its file.

    Attributes:
        lanes: by rank and lane, its events.
        metrics: the lines of metrics.jsonl.
    """

    seen: list[Record]
    file: dict[str, Any]
    size: int
    metrics: list[dict[str, Any]]
    lanes: dict[tuple[int, str], list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        rows = self.file["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in rows if e["name"] == "thread_name"}
        for event in rows:
            if event["ph"] == "X":
                self.lanes[event["pid"], names[event["pid"], event["tid"]]].append(event)

    def of(self, rank: int, lane: str) -> list[dict[str, Any]]:
        """The events of a lane, and of those that took what overlaps."""
        return [e for (at, name), events in self.lanes.items() if at == rank and name.startswith(lane) for e in events]

    def by_step(self, rank: int, lane: str) -> list[list[dict[str, Any]]]:
        steps = self.of(rank, "steps")
        return [[e for e in self.of(rank, lane) if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]] for step in steps]


def train(
    layout: str, folder: Path, num_steps: int = 3, *, job: Job | None = None, resume: str = "never"
) -> list[Record]:
    def rank(rank: int, size: int, rendezvous: str) -> Record:
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open(layout, place=place) as world:
            run = assemble(job or gpt(), world, quiet=True, folder=folder, resume=resume)
            before = dict(vars(dist.ProcessGroup)), dist.Work.wait
            run.trace(num_steps)
            seen = walk(run)
            run.conclude({})
            assert (dict(vars(dist.ProcessGroup)), dist.Work.wait) == before  # nothing stays patched
            return seen

    return run_processes(rank, Layout.parse(layout).num_ranks)


@cache
def traced(layout: str) -> Trace:
    with TemporaryDirectory() as name:
        folder = Path(name)
        seen = train(layout, folder)
        assert [path.name for path in (folder / "trace").iterdir()] == ["trace.json.gz"]
        path = folder / "trace" / "trace.json.gz"
        with gzip.open(path) as file:
            return Trace(seen, json.load(file), path.stat().st_size, read_events(folder / "metrics.jsonl"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_lane_has_events_in_every_traced_step(layout: str) -> None:
    trace = traced(layout)
    for rank in range(2):
        assert [step["name"] for step in trace.of(rank, "steps")] == TRACED
        for lane in ("data", "compute", "waits", f"communication {LAYOUTS[layout]}", "update"):
            assert all(trace.by_step(rank, lane)), (rank, lane)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_message_is_on_the_axis_of_the_layout(layout: str) -> None:
    trace = traced(layout)
    for rank in range(2):
        messages = trace.of(rank, "communication")
        assert {message["args"]["axis"] for message in messages} == {LAYOUTS[layout]}
        assert all(message["args"]["bytes"] > 0 for message in messages)
        assert {message["name"] for message in messages} == {message["args"]["operation"] for message in messages}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_is_valid_and_small(layout: str) -> None:
    trace = traced(layout)
    assert trace.size < 5e6
    for event in trace.file["traceEvents"]:
        assert {"ph", "name", "ts", "pid", "tid"} <= event.keys()
        assert event["ph"] == "M" or (event["ts"] >= 0 and event["dur"] >= 0)
    for events in trace.lanes.values():
        ends: list[int] = []
        for begin_ns, end_ns in sorted(
            (round(e["ts"] * 1e3), -round(e["ts"] * 1e3) - round(e["dur"] * 1e3)) for e in events
        ):
            while ends and ends[-1] <= begin_ns:
                ends.pop()
            assert not ends or -end_ns <= ends[-1]
            ends.append(-end_ns)


def test_the_sum_of_ddp_has_the_bytes_of_the_gradient() -> None:
    gradient_bytes = sum(p.numel() * 8 for p in gpt().model().parameters())
    for rank in range(2):
        for messages in traced("dp2").by_step(rank, "communication dp"):
            assert [m["args"]["bytes"] for m in messages].count(gradient_bytes) == 1


def test_every_action_of_a_pipeline_is_there_once_per_step() -> None:
    for rank in range(2):
        for actions in traced("pp2:micro=2").by_step(rank, "stages"):
            assert sorted(action["name"] for action in actions) == ["B0", "B1", "F0", "F1"]
            assert {action["args"]["stage"] for action in actions} == {rank}


def test_forwards_of_a_later_stage_begin_after_those_before_on_the_one_time_line() -> None:
    trace = traced("pp2:micro=2")
    slack_us = max(clock["uncertainty_ns"] for clock in trace.file["otherData"]["clocks"]) / 1e3
    for first, second in zip(trace.by_step(0, "stages"), trace.by_step(1, "stages"), strict=True):
        for name in ("F0", "F1"):
            left = next(e["ts"] + e["dur"] for e in first if e["name"] == name)
            assert next(e["ts"] for e in second if e["name"] == name) >= left - slack_us


def test_the_clocks_of_one_host_agree() -> None:
    clocks = traced("dp2").file["otherData"]["clocks"]
    assert [clock["rank"] for clock in clocks] == [0, 1]
    assert all(abs(clock["offset_ns"]) <= clock["uncertainty_ns"] + 1_000 for clock in clocks)


@pytest.mark.parametrize("layout", ["dp2", "pp2:micro=2"])
def test_a_traced_run_has_the_losses_of_one_that_is_not(layout: str) -> None:
    for seen, plain in zip(traced(layout).seen, record(gpt, layout), strict=True):
        assert (seen.losses, seen.norms) == (plain.losses, plain.norms)
        assert all(seen.state[name].equal(tensor) for name, tensor in plain.state.items())


def test_traced_steps_have_no_times_in_the_metrics_and_the_others_have() -> None:
    steps = {row["step"]: row for row in traced("dp2").metrics if "train/loss" in row}
    assert [step for step, row in steps.items() if row["perf/step_time_s"] is None] == [3, 4, 5]
    assert [step for step, row in steps.items() if row["perf/samples_per_s"] is None] == [3, 4, 5]


def test_in_a_product_of_axes_no_message_is_on_a_wrong_one() -> None:
    trace = traced("dp2.tp2")
    summed = {5 * 8: "dp+tp", 7 * 4: "dp"}  # counts and losses of all ranks; which parameters were used, by DDP
    found: dict[str, set[str]] = defaultdict(set)
    for rank in range(4):
        for message in trace.of(rank, "communication"):
            num_bytes, axis = message["args"]["bytes"], message["args"].get("axis", "")
            found[axis].add(num_bytes)
            if num_bytes in summed and axis:
                assert axis == summed[num_bytes]
    assert found.keys() >= {"dp", "tp", "dp+tp"}
    assert not found["dp"] & found["tp"]
    assert found["dp+tp"] == {72, 8}


# --- when, where, and what is refused


def traced_steps(folder: Path) -> list[int]:
    with gzip.open(folder / "trace" / "trace.json.gz") as file:
        return list(json.load(file)["otherData"]["steps"])


def test_a_short_run_is_traced_at_its_end_and_a_resumed_one_from_its_third_step(tmp_path: Path) -> None:
    train("lone", tmp_path, 3, job=Points(steps=4))
    assert traced_steps(tmp_path) == [2, 3, 4]
    train("lone", tmp_path, 2, job=Points(steps=10), resume="auto")
    assert traced_steps(tmp_path) == [7, 8]
    assert checkpoint_steps(tmp_path) == [4, 10]


def test_a_trace_that_cannot_be_written_is_said_and_the_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file is in the way")
    seen = train("dp2", tmp_path)
    assert len(seen[0].losses) == STEPS
    told = [note for note in seen[0].notes if note.startswith("there is no trace")]
    where = f"rank 0: {tmp_path / 'trace'} cannot be written (File exists)."
    assert told == [f"there is no trace of steps 3 to 5: {where} The training goes on."]


def test_a_loop_that_ends_within_its_traced_steps_leaves_nothing_behind(tmp_path: Path) -> None:
    before = dict(vars(dist.ProcessGroup)), dist.Work.wait
    with World.open("lone") as world, closing(assemble(Points(steps=9), world, quiet=True, folder=tmp_path)) as run:
        run.trace(3)
        for step in run.steps():
            if step().step == 4:
                break
        assert dist.Work.wait is not before[1]
    assert (dict(vars(dist.ProcessGroup)), dist.Work.wait) == before
    assert not (tmp_path / "trace").exists()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:  # there is one at a time
        torch.ones(3)
    assert "aten::ones" in {event.key for event in recorded.key_averages()}


@pytest.mark.parametrize(
    ("layout", "kind", "folder", "num_steps", "why"),
    [
        ("dp2", "fake", "run", 3, "a fake world computes nothing"),
        ("lone", "lone", None, 3, "a trace is written to the run's folder"),
        ("lone", "lone", "run", 0, "a trace of 0 steps shows nothing"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    tmp_path: Path, layout: str, kind: Any, folder: str | None, num_steps: int, why: str
) -> None:
    place = tmp_path / folder if folder else None
    with World.open(layout, kind=kind) as world, closing(assemble(gpt(), world, quiet=True, folder=place)) as run:
        with pytest.raises(WorldError, match=why):
            run.trace(num_steps)
        assert not (tmp_path / "run" / "trace").exists()
