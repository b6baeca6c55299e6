"""shoal bench collectives: how fast the ranks of a layout talk to each other, by operation, size and axis."""

import functools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from shoal.cluster import Cluster, ClusterError, check_target, write_cluster
from shoal.errors import ShoalError, nearest
from shoal.layout import Layout, nearest_layouts
from shoal.metrics.links import OPERATIONS
from shoal.units import show_bytes
from shoal.verbs.bench.collectives_report import CollectivesReport, Row
from shoal.verbs.bench.worlds import ENDED
from shoal.world import Place, before_torch

if TYPE_CHECKING:
    from shoal.launch import Outcome

ROUNDS = 7
_BUDGET_S = 15.0  # shared equally by all cells; the slowest take more, for their least number of rounds
_COPIES = 4  # of the largest buffer, on each rank: two of ours, two of the backend at most
_STEP = 4  # from one size to the next


class CollectivesUsageError(ShoalError):
    """What cannot be measured between ranks."""


def command(
    num_ranks: int,
    *,
    layout: str | None = None,
    ops: Sequence[str] | None = None,
    min_bytes: int = 1024,
    max_bytes: int = 256 * 2**20,
    rounds: int = ROUNDS,
    write: Path | None = None,
    force: bool = False,
    device: str | None = None,
    quiet: bool = False,
) -> CollectivesReport:
    """Start ranks on this machine, and time their collectives in float32.

    Args:
        layout: over whose axes, and the whole world; by default `dpN`.
        ops: by default all of `shoal.metrics.links.OPERATIONS`.
        min_bytes, max_bytes: of the whole buffer; in between in powers of 4, as far as memory is free.
        rounds: of each operation at each size, at most; slow ones take part in three.
        write: a cluster file for this machine, with the link that send_recv has found.
        force: over a file that exists.
        device: cpu or cuda; by default cuda where there is one.
        quiet: show nothing but failures.

    Raises:
        ShoalError: what makes no sense, before any process starts.
    """
    before_torch()
    if Place.find().size > 1:
        raise CollectivesUsageError("this bench starts its own ranks, and is one of several already. Start it alone.")
    chosen = _layout(num_ranks, layout)
    operations = _operations(ops)
    if rounds < 1:
        raise CollectivesUsageError(f"rounds is {rounds}; at least 1 is needed.")
    sizes, notes = _sizes(min_bytes, max_bytes, num_ranks)
    if write is not None:
        check_target(write, force=force)
        if "send_recv" not in operations or len(sizes) < 2:
            raise CollectivesUsageError("a cluster file is written from send_recv at two sizes or more. Ask for those.")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shoal-bench") as name:
        asked: dict[str, Any] = {"layout": str(chosen), "operations": operations, "sizes": sizes, "rounds": rounds}
        outcome = _start(num_ranks, **asked, device=device, folder=name, quiet=quiet)
        report = _report(outcome, Path(name) / "measured.json", rounds)
    report.layout, report.num_ranks = str(chosen), num_ranks
    report.notes[:0] = notes
    report.seconds = time.perf_counter() - began
    if write is not None and report.exit_code == 0:
        try:
            write_cluster(write, _cluster(report), force=force)
            report.written = str(write)
        except ClusterError as error:  # what was measured is told all the same
            report.notes.append(str(error))
            report.exit_code = 1
    return report


def _start(num_ranks: int, *, device: str | None, quiet: bool, **asked: Any) -> "Outcome":
    from shoal.launch import start, warm_up
    from shoal.launch.machine import has_accelerator

    fresh = (device or "cuda").startswith("cuda") and has_accelerator()
    if not fresh:
        warm_up()
    from shoal.verbs.bench.collectives_rank import measure

    work = functools.partial(measure, device=device, quiet=quiet, budget_s=_BUDGET_S, **asked)
    return start(work, num_ranks, show="none" if quiet else "rank0", fresh=fresh)


def _report(outcome: "Outcome", measured: Path, rounds: int) -> CollectivesReport:
    """What is known, and how it ended; of a world in which a rank failed, nothing is."""
    from shoal.launch.machine import num_cores

    report = CollectivesReport(layout="", num_ranks=0, exit_code=outcome.exit_code)
    if outcome.exit_code not in (0, *ENDED):
        why = outcome.failures[0].error if outcome.failures else f"exit code {outcome.exit_code}"
        report.notes.append(f"the benchmark failed: {why}")
        return report
    if not measured.exists():
        report.notes.append("ended before the first round was complete.")
        return report
    told = json.loads(measured.read_text())
    report.rows = [Row.of(row) for row in told["rows"]]
    report.machine = told["machine"] | {"cores": num_cores()}
    if outcome.exit_code:
        report.notes.append(f"interrupted after {told['rounds']} of {rounds} rounds.")
    return report


def _layout(num_ranks: int, text: str | None) -> Layout:
    if num_ranks < 2:
        raise CollectivesUsageError(
            f"--nproc-per-node is {num_ranks}: with one rank there is nothing to send. Ask for two: --nproc-per-node 2"
        )
    if text is None:
        return Layout(dp=num_ranks)
    layout = Layout.parse(text)
    if layout.num_ranks != num_ranks:
        close = ", ".join(map(str, nearest_layouts(layout, num_ranks)))
        raise CollectivesUsageError(
            f"{layout} needs {layout.num_ranks} ranks, and --nproc-per-node is {num_ranks}. The product of the degrees "
            f"must equal it. {f'Nearest that fit: {close}. Or' if close else 'Use'} --nproc-per-node {layout.num_ranks}"
        )
    return layout


def _operations(ops: Sequence[str] | None) -> list[str]:
    chosen = list(dict.fromkeys(OPERATIONS if ops is None else ops))
    for name in chosen:
        if name not in OPERATIONS:
            raise CollectivesUsageError(f"there is no operation {name!r}.{nearest(name, OPERATIONS)}")
    if not chosen:
        raise CollectivesUsageError(f"no operation is left to measure. Known: {', '.join(OPERATIONS)}.")
    return chosen


def _sizes(min_bytes: int, max_bytes: int, num_ranks: int) -> tuple[list[int], list[str]]:
    """In bytes, in powers of 4 as far as memory goes; and a note where that is not as far as was asked."""
    if not 4 <= min_bytes <= max_bytes:
        raise CollectivesUsageError(
            f"sizes from {min_bytes} to {max_bytes} bytes: they begin at 4 or more, and end where they begin or later."
        )
    sizes = [min_bytes]
    while sizes[-1] * _STEP <= max_bytes:
        sizes.append(sizes[-1] * _STEP)
    free = psutil.virtual_memory().available
    fitting = [size for size in sizes if _COPIES * num_ranks * size <= free]
    need = f"{_COPIES} buffers on each of {num_ranks} ranks, and {show_bytes(free)} are free"
    if not fitting:
        raise CollectivesUsageError(f"{show_bytes(min_bytes)} is too much: it takes {need}. Take a smaller size.")
    short = [] if fitting == sizes else [f"sizes end at {show_bytes(fitting[-1])}: it takes {need}."]
    return fitting, short


def _cluster(report: CollectivesReport) -> Cluster:
    """This machine as one node, its link the line through the messages of the whole world."""
    fit = report.fits[report.axes[0], "send_recv"]
    if fit.bytes_per_s is None:
        raise ClusterError("no cluster file: the time of a message does not grow with its size. Measure larger ones.")
    on_cpu = report.machine["device"] == "cpu"
    return Cluster(
        devices_per_node=report.num_ranks,
        device=None if on_cpu else report.machine["device"],
        memory_gb=_rounded(psutil.virtual_memory().total / report.num_ranks / 1e9) if on_cpu else None,
        intra_node_gb_per_s=_rounded(fit.bytes_per_s / 1e9),
        intra_node_latency_us=_rounded(fit.latency_s * 1e6),
    )


def _rounded(figure: float) -> float:
    return float(f"{figure:.4g}")
