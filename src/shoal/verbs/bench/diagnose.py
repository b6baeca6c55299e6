"""Why a layout is as fast as it is, in one sentence with its evidence."""

from shoal.metrics.shares import shares, slow_ranks
from shoal.units import show_bytes, show_seconds
from shoal.verbs.bench.measured import Measured

_SMALL = 0.05  # a share that nobody needs to hear of
_UNEVEN = 0.15  # work of ranks that differs by more is worth a word
_ADVICE = {
    "dp": "more samples per rank make it a smaller part",
    "fsdp": "more samples per rank, or replicas of smaller shards (dp2.fsdp2), make it a smaller part",
    "tp": "tensor parallelism pays where its ranks have fast links and layers are wide: a smaller tp, or dp instead",
    "pp": "fewer, larger messages (a smaller micro=) make it a smaller part",
}


def diagnose(row: Measured, base: Measured | None) -> str:
    """Where most of the time goes that the base does not spend so, and what would change it."""
    if row.note:
        return f"{row.layout}: {row.note}."
    spent = [rank.spent for rank in row.ranks]
    found = shares(spent)
    slow = slow_ranks(spent) if "pp" not in row.layout else {}
    if slow:
        rank, above_s = max(slow.items(), key=lambda item: item[1])
        return (
            f"{row.layout}: rank {rank} is slow: in each step it works {show_seconds(above_s)} longer than the others, "
            f"which wait for it ({above_s / spent[rank].wall_s:.0%} of the step)."
        )
    others = shares([rank.spent for rank in base.ranks]) if base is not None and base.layout != row.layout else {}
    step_s = base.step_s if base is not None else 0.0
    excess = {
        name: share * row.step_s - others.get(name, 0.0) * step_s
        for name, share in found.items()
        if name not in ("compute", "other") and share > _SMALL
    }
    worst = max(excess, key=lambda name: excess[name], default="")
    if not worst or excess[worst] <= 0:
        return f"{row.layout}: {found['compute']:.0%} of the step is computing.{_versus(row, base)}"
    return f"{row.layout}: {found[worst]:.0%} of the step is {_meaning(row, worst, found[worst])}.{_versus(row, base)}"


def _meaning(row: Measured, name: str, share: float) -> str:
    seconds = share * row.step_s
    if name == "data":
        return f"waiting for data ({show_seconds(seconds)}): let workers read ahead ({_with(row, 'workers=2')})"
    if name == "bubble":
        return (
            f"the pipeline's bubble ({show_seconds(seconds)}; its schedule predicts {row.bubble or 0:.0%} of forward "
            "and backward): more micro-batches, or a schedule with several stages per rank, make it smaller"
        )
    if name == "waiting":
        work = [sum(rank.spent.seconds()[part] for part in ("data", "compute", "update")) for rank in row.ranks]
        uneven = ": the ranks do not have equal work" if max(work) > (1 + _UNEVEN) * min(work) else ""
        return f"waiting for the rank that comes last ({show_seconds(seconds)}){uneven}"
    if name == "update":
        share_it = ": zero=1 or fsdp share it among ranks" if row.layout.startswith("dp") else ""
        return f"the update ({show_seconds(seconds)}: norm, clipping, optimizer){share_it}"
    axis = name.removeprefix("comm ")
    sent = max(rank.sent_bytes.get(axis, 0) for rank in row.ranks)
    advice = next((text for known, text in _ADVICE.items() if known in axis), "")
    speed = f" ({sent / seconds / 1e9:.2g} GB/s)" if seconds and sent else ""
    return (
        f"exposed communication on {axis}: {show_bytes(sent)} sent per rank and step, {show_seconds(seconds)} not "
        f"hidden behind computing{speed}; {advice}"
    )


def _with(row: Measured, option: str) -> str:
    return f"{row.layout}{',' if ':' in row.layout else ':'}{option}"


def _versus(row: Measured, base: Measured | None) -> str:
    """How much more the processors have to do, all together: time in which a process had no core does not count."""
    if base is None or base.layout == row.layout or not row.versions.get("device", "").startswith("cpu"):
        return ""
    ours, theirs = (sum(rank.cpu_s for rank in of.ranks) / of.batch_size for of in (row, base))
    grown = ours / theirs - 1 if theirs else 0.0
    if abs(grown) < _SMALL:
        return ""
    return (
        f" All processes together take {abs(grown):.0%} {'more' if grown > 0 else 'less'} CPU time than {base.layout}."
    )
