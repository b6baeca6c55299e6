"""A trace: clocks put right, lanes in which events nest, messages on their axis or on none, one valid file."""

import gzip
import json
import random
from collections import Counter

import pytest

from shoal.metrics.profile import Asked, axes_of_threads, call_key, events_of
from shoal.metrics.trace import Event, Offset, RoundTrip, clock_offset, laid_out, merge, rows_of, write_part

MAIN, GLOO_A, GLOO_B, GLOO_C = 10, 20, 21, 22  # threads
BASE_NS = 1_700_000_000_000_000_000


# --- clocks


def trip(ahead_ns, there_ns, back_ns, sent_ns=BASE_NS, rest_ns=500):
    """A message there and back, to a clock that is ahead."""
    arrived_ns = sent_ns + there_ns + ahead_ns
    answered_ns = arrived_ns + rest_ns
    returned_ns = answered_ns - ahead_ns + back_ns
    return RoundTrip(sent_ns=sent_ns, arrived_ns=arrived_ns, answered_ns=answered_ns, returned_ns=returned_ns)


@pytest.mark.parametrize("ahead_ns", [0, 3_000_000, -7_000_000_000])
def test_an_offset_is_found_exactly_where_both_ways_are_equally_long(ahead_ns):
    slow = [trip(ahead_ns, there_ns=90_000, back_ns=10_000), trip(ahead_ns, there_ns=10_000, back_ns=70_000)]
    found = clock_offset([*slow, trip(ahead_ns, there_ns=20_000, back_ns=20_000)])
    assert found == Offset(ns=ahead_ns, uncertainty_ns=20_000)


@pytest.mark.parametrize("seed", range(20))
def test_an_offset_lies_within_its_uncertainty_however_unequal_the_ways_are(seed):
    draw = random.Random(seed)
    ahead_ns = draw.randrange(-(10**9), 10**9)
    delays = [(draw.randrange(1_000, 10**6), draw.randrange(1_000, 50_000)) for _ in range(8)]
    found = clock_offset([trip(ahead_ns, there, back) for there, back in delays])
    assert found.uncertainty_ns <= min(map(sum, delays)) / 2 + 1
    assert abs(found.ns - ahead_ns) <= found.uncertainty_ns


# --- lanes


def event(lane, begin_ns, end_ns, name="x"):
    return Event(lane=lane, name=name, begin_ns=begin_ns, end_ns=end_ns)


def test_what_overlaps_without_lying_inside_gets_a_second_lane():
    whole, inside, after, across = (event("compute", *t) for t in [(0, 10), (2, 5), (5, 10), (8, 12)])
    assert laid_out([across, after, inside, whole]) == {"compute": [whole, inside, after], "compute (2)": [across]}


def test_messages_lie_beside_each_other_only():
    long, short = event("communication dp", 0, 10), event("communication dp", 2, 5)
    assert laid_out([long, short]) == {"communication dp": [long], "communication dp (2)": [short]}


def test_lanes_stand_in_one_order():
    lanes = ["update", "stages", "communication tp", "communication dp", "waits", "compute (thread 7)", "steps", "data"]
    assert list(laid_out(event(lane, 0, 1) for lane in lanes)) == [
        "steps",
        "data",
        "compute (thread 7)",
        "waits",
        "communication dp",
        "communication tp",
        "stages",
        "update",
    ]


# --- what the profiler saw


def row(name, begin_us, end_us, thread=MAIN, cat="cpu_op", **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": begin_us, "dur": end_us - begin_us} | {
        "args": args
    }


def mark(name, begin_us, end_us):
    return row(f"shoal:{name}", begin_us, end_us, cat="user_annotation")


def message(operation, begin_us, end_us, thread, shape, kind="float"):
    told = {"Input Dims": [shape], "Input type": [kind]}
    return row(f"gloo:{operation}", begin_us, end_us, thread, "user_annotation", **told)


STEP = [mark("data", 0, 10), mark("step 3", 11, 100), mark("compute", 12, 80), mark("update", 80, 99)]


def seen(*rows, asked=Asked()):  # noqa: B008  (it is frozen)
    profile = {"baseTimeNanoseconds": BASE_NS, "traceEvents": [*STEP, *rows]}
    return [
        (e.lane, e.name, (e.begin_ns - BASE_NS) // 1000, (e.end_ns - BASE_NS) // 1000, dict(e.args))
        for e in events_of(profile, asked)
    ]


PHASES = [
    ("steps", "step 3", 0, 100, {}),
    ("data", "data", 0, 10, {}),
    ("compute", "forward and backward", 12, 80, {}),
    ("update", "update", 80, 99, {}),
]


def besides(found):
    """All but the step and its phases."""
    return [event for event in found if event not in PHASES]


def test_a_step_begins_where_it_waits_for_its_batch():
    assert seen() == PHASES


def test_operations_are_kept_to_a_depth_and_by_phase():
    found = seen(
        row("aten::stack", 3, 5),  # while it waits for the batch
        row("aten::linear", 20, 40),
        row("aten::addmm", 21, 39),
        row("aten::expand", 22, 23),  # too deep
        row("autograd::engine::evaluate_function: MmBackward0", 50, 60),
        row("MmBackward0", 51, 58),
        row("aten::mm", 52, 57),
        row("aten::add_", 84, 86),
        row("aten::mm", 30, 31, thread=99),
        row("aten::cat", 120, 130),  # between steps
    )
    assert besides(found) == [
        ("compute", "aten::linear", 20, 40, {}),
        ("compute", "aten::addmm", 21, 39, {}),
        ("compute (thread 99)", "aten::mm", 30, 31, {}),
        ("compute", "MmBackward0", 51, 58, {}),
        ("compute", "aten::mm", 52, 57, {}),
        ("update", "aten::add_", 84, 86, {}),
    ]


def test_a_message_on_the_thread_that_asks_for_it_is_of_the_axis_that_is_asked():
    found = seen(mark("call pp", 20, 25), message("send", 22, 40, MAIN, [3, 2]), mark("wait pp", 41, 45))
    assert besides(found) == [
        ("waits", "wait for pp", 41, 45, {"axis": "pp"}),
        ("communication pp", "send", 22, 40, {"operation": "send", "axis": "pp", "bytes": 24}),
    ]


def test_a_thread_of_gloo_is_of_the_axis_whose_group_was_asked_for_its_work():
    asked = Asked(
        axes={"0": "dp", "1": "tp"},
        calls={"0": Counter({call_key("gloo:all_reduce", [[7]]): 1}), "1": Counter()},
    )
    told = besides(seen(message("all_reduce", 30, 70, GLOO_A, [7], "double"), asked=asked))
    assert told == [("communication dp", "all_reduce", 30, 70, {"operation": "all_reduce", "axis": "dp", "bytes": 56})]


def test_a_message_that_nobody_noted_has_no_axis():
    told = besides(seen(message("all_reduce", 30, 70, GLOO_A, [7])))
    assert told == [("communication", "all_reduce", 30, 70, {"operation": "all_reduce", "bytes": 28})]


def test_a_kernel_of_nccl_tells_its_group():
    args = {"Process Group Name": "5", "Collective name": "allreduce", "In msg nelems": 6, "dtype": "BFloat16"}
    told = besides(
        seen(
            row("ncclDevKernel_AllReduce", 30, 70, 17, "kernel", **args),
            row("sm90_gemm", 20, 25, 7, "kernel"),
            asked=Asked(axes={"5": "fsdp"}),
        )
    )
    assert told == [
        ("communication fsdp", "allreduce", 30, 70, {"operation": "allreduce", "axis": "fsdp", "bytes": 12}),
        ("cuda stream 7", "sm90_gemm", 20, 25, {}),
    ]


def test_threads_find_their_axis_one_after_the_other():
    """`b` may be of either group until `a`, which did what only dp was asked for, has taken all of the sums of dp."""
    asked = Asked(
        axes={"0": "dp", "1": "tp"},
        calls={"0": Counter(sum=1, broadcast=1), "1": Counter(sum=2)},
    )
    done = {GLOO_A: Counter(sum=1, broadcast=1), GLOO_B: Counter(sum=1), GLOO_C: Counter(sum=1)}
    assert axes_of_threads(done, asked) == {GLOO_A: "dp", GLOO_B: "tp", GLOO_C: "tp"}


def test_a_thread_that_may_be_of_two_axes_has_none():
    asked = Asked(axes={"0": "dp", "1": "tp"}, calls={"0": Counter(sum=1), "1": Counter(sum=1)})
    assert axes_of_threads({GLOO_A: Counter(sum=1), GLOO_B: Counter(sum=1)}, asked) == {}


def test_groups_of_one_axis_need_not_be_told_apart():
    asked = Asked(axes={"0": "dp", "1": "dp"}, calls={"0": Counter(sum=1), "1": Counter(sum=1)})
    assert axes_of_threads({GLOO_A: Counter(sum=1)}, asked) == {GLOO_A: "dp"}


# --- the file


def part_of(rank, path, offset):
    events = [event("steps", BASE_NS - offset.ns, BASE_NS - offset.ns + 5_000, "step 3")]
    write_part(path, rows_of(rank, f"rank {rank}", events, offset=offset, zero_ns=BASE_NS))
    return path


def test_parts_become_one_trace_on_one_time_line(tmp_path):
    offsets = [Offset(), Offset(ns=250_000_000, uncertainty_ns=900)]
    parts = [part_of(rank, tmp_path / f"rank_{rank}.json.gz", offset) for rank, offset in enumerate(offsets)]
    merge(parts, tmp_path / "trace.json.gz", {"layout": "dp2"})
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]
    with gzip.open(tmp_path / "trace.json.gz") as file:
        trace = json.load(file)
    assert trace["otherData"] == {"layout": "dp2"}
    assert [(e["pid"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"] == [(0, 0, 5), (1, 0, 5)]
    assert all({"ph", "ts", "pid", "tid", "name"} <= e.keys() for e in trace["traceEvents"])
    named = {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert named == {(0, "rank 0"), (1, "rank 1")}


def test_parts_stay_where_the_whole_cannot_be_written(tmp_path):
    part = part_of(0, tmp_path / "rank_0.json.gz", Offset())
    (tmp_path / "trace.json.gz").mkdir()
    with pytest.raises(OSError, match=r"trace\.json\.gz"):
        merge([part], tmp_path / "trace.json.gz", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0.json.gz", "trace.json.gz"]
