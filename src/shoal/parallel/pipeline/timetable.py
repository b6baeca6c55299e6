"""What each rank of a pipeline does when, without processes: torch's order of actions, and a clock.

pp3:micro=4,schedule=1f1b, where a backward takes twice as long as a forward:

rank 0  F0 F1 F2 .. .. .. .. B0-B0 F3 B1-B1 .. B2-B2 .. B3-B3
rank 1  .. F0 F1 .. .. B0-B0 F2 B1-B1 F3 B2-B2 .. B3-B3
rank 2  .. .. F0 B0-B0 F1 B1-B1 F2 B2-B2 F3 B3-B3
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoal.layout import Layout
from shoal.parallel.pipeline.schedule import _MULTI, _SINGLE, schedule_name, stages_of

Kind = Literal["F", "B", "I", "W"]
Action = tuple[Kind, int, int]  # kind, stage, micro-batch
Cost = Callable[[Kind, int], float]  # (kind, stage) -> seconds


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank.

    Attributes:
        rank: the coordinate on pp.
        kind: F forward; B backward, or its halves: I the gradients of the inputs, W those of the weights.
        micro: the number of the micro-batch.
    """

    rank: int
    stage: int
    kind: Kind
    micro: int
    start_s: float
    end_s: float


def timetable(layout: Layout, cost: Cost, *, message_s: float = 0.0) -> list[Span]:
    """One optimizer step: rank by rank, the actions of each in their order.

    An action starts when its rank is free and what it needs is there.

    Args:
        cost: how long an action of a stage takes.
        message_s: from the end of an action to when another rank has what it made; nobody stands still for it.
    """
    orders = actions(layout)
    home = {stage: rank for rank in range(layout.pp) for stage in stages_of(layout, rank)}
    takes_s = {(kind, stage): cost(kind, stage) for kind, stage in {action[:2] for order in orders for action in order}}
    spans: list[list[Span]] = [[] for _ in orders]
    done_s: dict[tuple[str, int, int], float] = {}
    waiting: dict[tuple[str, int, int], int] = {}  # for what -> which rank
    ready = list(range(layout.pp))
    while ready:
        rank = ready.pop()
        own, free_s = spans[rank], spans[rank][-1].end_s if spans[rank] else 0.0
        while len(own) < len(orders[rank]):
            kind, stage, micro = orders[rank][len(own)]
            wanted = [(made, at, micro) for made, at in needs(kind, stage, layout.num_stages)]
            missing = next((need for need in wanted if need not in done_s), None)
            if missing is not None:
                waiting[missing] = rank
                break
            there_s = [done_s[need] + (message_s if home[need[1]] != rank else 0.0) for need in wanted]
            start_s = max([free_s, *there_s])
            free_s = start_s + takes_s[kind, stage]
            own.append(Span(rank, stage, kind, micro, start_s, free_s))
            made = (makes(kind), stage, micro)
            done_s[made] = free_s
            if made in waiting:
                ready.append(waiting.pop(made))
    assert not waiting, f"{layout}: an order that torch has made comes to its end"
    return [span for own in spans for span in own]


def bubble(spans: Sequence[Span], num_ranks: int) -> float:
    """The idle share of all ranks from the first start to the last end, 0 to 1."""
    busy_s = sum(span.end_s - span.start_s for span in spans)
    whole_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    return 1.0 - busy_s / (num_ranks * whole_s) if whole_s else 0.0


def makes(kind: Kind) -> str:
    """What others may wait for: values (F), gradients of inputs (I), or nothing that anybody needs (W)."""
    return "I" if kind == "B" else kind


def needs(kind: Kind, stage: int, num_stages: int) -> list[tuple[str, int]]:
    """What must have been made of the same micro-batch, and in which stages."""
    if kind == "F":
        return [("F", stage - 1)] if stage else []
    if kind == "W":
        return [("I", stage)]
    return [("F", stage)] + ([("I", stage + 1)] if stage + 1 < num_stages else [])


def actions(layout: Layout) -> list[list[Action]]:
    """Of every rank on pp, what it does in one optimizer step, in its order."""
    if schedule_name(layout) in _SINGLE:
        return [_dry_run(layout, rank) for rank in range(layout.pp)]
    table = _bare(_MULTI[schedule_name(layout)])([_Recorder(s, layout) for s in stages_of(layout, 0)], layout.micro)
    return [list(_flat(table.pipeline_order[rank])) for rank in range(layout.pp)]


def _dry_run(layout: Layout, rank: int) -> list[Action]:
    """Where the order is a loop of torch's: what the loop does. Its table for display is wrong (torch 2.13, 1F1B)."""
    stage = _Recorder(rank, layout)
    loop = _bare(_SINGLE[schedule_name(layout)])(stage, layout.micro)
    loop._stage_forward_initialized = True
    loop._step_microbatches(return_outputs=False)
    return stage.order


def _bare(schedule: Any) -> Any:
    """torch's schedule without what is of no use here and takes minutes for 64 ranks: messages, table for display."""
    nothing = {"_prepare_schedule_with_comms": lambda self, order: None, "_get_pipeline_order": lambda self: None}
    return type(schedule.__name__, (schedule,), nothing)


def _flat(row: Sequence[Any]) -> Iterator[Action]:
    """A row of a table without its gaps; of two actions that may overlap the first comes first."""
    for action in filter(None, row):
        for part in action.sub_actions or [action]:
            yield part.computation_type.value, part.stage_index, part.microbatch_index


class _Recorder:
    """Stands in for a stage, and writes down what it is asked to do."""

    def __init__(self, stage: int, layout: Layout) -> None:
        self.stage_index, self.num_stages = stage, layout.num_stages
        self.is_first, self.is_last = stage == 0, stage == layout.num_stages - 1
        self.group_rank, self.group_size = 0, layout.pp
        self.submod = None  # torch looks whether it is compiled
        self.order: list[Action] = []

    def forward_one_chunk(self, chunk: int, *unused: Any, **named: Any) -> None:
        self.order.append(("F", self.stage_index, chunk))

    def backward_one_chunk(self, chunk: int, *unused: Any, **named: Any) -> None:
        self.order.append(("B", self.stage_index, chunk))

    def _nothing(self, *unused: Any, **named: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = _nothing
