"""Data parallelism in threads of one process beside that in processes: DataParallel and DistributedDataParallel."""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.units import show_bytes, show_seconds
from shoal.verbs.report.charts import Line, Ruled, lines, show_size, size_ticks
from shoal.verbs.report.parts import Figure, Part, Section, Table, Words, is_finite, shown
from shoal.verbs.report.sources import Bench, Facts

_NUMS = range(2, 17)


def replicas(bench: Bench) -> Section:
    """Only where a layout of threads was measured; beside it processes, as many if there are such."""
    threads = next((row for row in bench.good if row["layout"].startswith("threads")), None)
    if threads is None:
        return Section(title="DataParallel and DDP")
    peers = [row for row in bench.good if row["layout"].partition(":")[0][:2] == "dp" and "." not in row["layout"]]
    peer = min(peers, key=lambda row: abs(row["num_devices"] - threads["num_devices"]), default=None)
    table = {row["layout"]: row for row in bench.table}
    sides = [row for row in (threads, peer) if row is not None]
    heads = ["", f"DataParallel ({threads['layout']})"]
    heads += ["DistributedDataParallel" + (f" ({peer['layout']})" if peer else "")]
    size = _gradient_bytes(threads)
    rows = _words(size, threads["num_devices"], (peer or threads)["num_devices"])
    rows += [[name, *cells, *[""] * (2 - len(cells))] for name, cells in _measured(sides, table).items()]
    parts: list[Part] = [
        Table(title="One process with threads, or one process per device", heads=heads, rows=rows, prose=True)
    ]
    parts += _traffic(size)
    if peer is None:
        parts.append(Words(text="No dpN was measured beside it: shoal bench JOB --layouts lone,threads2,dp2"))
    return Section(title="DataParallel and DDP", parts=parts)


def _words(size: int, num_threads: int, num_ranks: int) -> list[list[str]]:
    each, ring = show_bytes(_at_master(num_threads, size)), show_bytes(_in_ring(num_ranks, size))
    return [
        [
            "implementation",
            "one process: a master, and copies of it in threads, made anew for each step",
            "one process per device, each with a model of its own; gradients are summed during the backward",
        ],
        [
            "update of parameters",
            "once, of the master; the copies get the new values in the next step",
            "in each process, the same, from the same gradients",
        ],
        [
            "traffic per step, by the model",
            f"through the master 2(N-1) x gradients, {each} for N = {num_threads}: parameters out, gradients in. "
            "On one CPU threads share the memory, and nothing is sent",
            f"in and out of each rank 2(N-1)/N x gradients, {ring} for N = {num_ranks}, all ranks at once",
        ],
        [
            "when one replica fails",
            "its exception ends the process when the others have ended their part; no weight has changed. A crash "
            "takes all replicas with it",
            "the others wait in a collective until the launcher ends them and names the first that failed; go on from "
            "the last checkpoint: --resume auto",
        ],
    ]  # fmt: skip


def _measured(sides: Sequence[Facts], table: Mapping[str, Facts]) -> dict[str, list[str]]:
    figures = [table[row["layout"]] for row in sides]
    return {
        "step, measured": [f"{shown(of['step_ms'], '.1f')} ms" for of in figures],
        "speed-up S, efficiency E": [
            f"{shown(of['speed_up'], '.2f')}, {shown(of['efficiency'], '.2f')}" for of in figures
        ],
        "sent per step, measured": [_sent(of) for of in figures],
        "load balance: computing per rank": [_balance(row) for row in sides],
        "memory per device: tensors at peak": [_memory(row) for row in sides],
        "share of thread time that stands still": [_still(row, of) for row, of in zip(sides, figures, strict=True)],
    }


def _sent(figures: Facts) -> str:
    return ", ".join(f"{show_bytes(size)} on {axis}" for axis, size in figures["sent_bytes"].items()) or "nothing"


def _balance(row: Facts) -> str:
    """The spread of compute seconds over the ranks."""
    if len(row["ranks"]) == 1:
        return "one process: replicas are not timed apart; all wait for the slowest"
    seconds = [_compute_s(rank["spent"]) for rank in row["ranks"]]
    mean = sum(seconds) / len(seconds)
    spread = (max(seconds) - min(seconds)) / mean if mean > 0 else 0.0
    return f"{show_seconds(min(seconds))} to {show_seconds(max(seconds))} in a step, a spread of {spread:.0%}"


def _compute_s(told: Mapping[str, Any]) -> float:
    from shoal.metrics.shares import Spent

    waits_s = {tuple(key.split("/", 1)): seconds for key, seconds in told["waits_s"].items()}
    return Spent(**{**told, "waits_s": waits_s}).seconds()["compute"]


def _memory(row: Facts) -> str:
    peaks = [sum(rank["peak_bytes"].values()) for rank in row["ranks"]]
    if len(peaks) == 1 and row["num_devices"] > 1:
        return f"{show_bytes(peaks[0])} in one process, for all its replicas"
    return f"{show_bytes(max(peaks))} of the rank that holds most"


def _still(row: Facts, figures: Facts) -> str:
    """What is no CPU time of the replicas."""
    busy = figures.get("utilisation")
    if not is_finite(busy):
        return "n/a"
    why = "messages, the slowest rank" if len(row["ranks"]) > 1 else "the interpreter's lock, serial work at the master"
    return f"{max(0.0, 1 - busy):.0%} (1 - device busy: {why}, other programs of the machine)"


def _gradient_bytes(row: Facts) -> int:
    """Of the whole model: as large as its parameters, whether or not they are there at the peak."""
    return int(row["ranks"][0]["peak_bytes"].get("parameters", 0))


def _at_master(num: int, size: int) -> float:
    return 2.0 * (num - 1) * size


def _in_ring(num: int, size: int) -> float:
    return 2.0 * (num - 1) / num * size


def _traffic(size: int) -> list[Part]:
    if not size:
        return []
    master = Line(name="DataParallel: through the master", points=[(num, _at_master(num, size)) for num in _NUMS])
    ring = Line(name="DDP: through each rank of a ring", points=[(num, _in_ring(num, size)) for num in _NUMS])
    y = Ruled(label="bytes per step", show=show_size, ticks=size_ticks(_at_master(_NUMS[-1], size)))
    drawing = lines([master, ring], x=Ruled(label="replicas N", whole=True), y=y)
    assert drawing is not None, "there are points"
    finding = (
        f"With gradients of {show_bytes(size)}, the master of 16 replicas moves {show_bytes(_at_master(16, size))} in "
        f"each step, a rank of a ring {show_bytes(_in_ring(16, size))}, and never more than {show_bytes(2 * size)}. "
        "By the model, on devices with memories of their own."
    )
    numbers = Table(
        title="Bytes per step by the model",
        heads=["replicas", "through the master", "through each rank of a ring"],
        rows=[[str(n), show_bytes(_at_master(n, size)), show_bytes(_in_ring(n, size))] for n in _NUMS],
        folded=True,
    )
    return [Figure(title="Traffic against replicas", drawing=drawing, finding=finding, table=numbers)]
