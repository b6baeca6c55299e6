"""shoal plan with one layout: build it in a fake world, rank by rank, as a real run would be built."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.layout import Layout
from shoal.mesh import Mesh
from shoal.verbs.plan.report import Plan
from shoal.world import before_torch

if TYPE_CHECKING:
    from shoal.job import Job


class PlanError(ShoalError):
    """What cannot be planned without numbers, or ranks that are not there."""


def command(
    job: "Job | str",
    layout: Layout | str,
    *,
    fields: Mapping[str, Any] | None = None,
    preset: str | None = None,
    ranks: str = "ends",
) -> Plan:
    """Plan a job in a layout; nothing is computed, and no memory of the model's size is taken.

    Args:
        job: a Job, or its name as on the command line.
        fields: values of the job, over those of the preset.
        ranks: `ends` the first, a middle and the last stage; `all` every stage; or numbers, `0,5`.

    Raises:
        ShoalError: whatever a real run would refuse, in the same words.
        PlanError: the job decides by numbers, or there are no such ranks.
    """
    before_torch()
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    layout.require_available()
    chosen = chosen_ranks(layout, ranks)
    from shoal.job import preset_of
    from shoal.verbs.plan.rank import built, plan_rank

    known = preset_of(job, preset) if preset is not None else {}
    made = built(job, {**known, **(fields or {})})
    plans = [plan_rank(made, layout, rank) for rank in chosen]
    first = plans[0]
    return Plan(
        job=type(made).__name__,
        preset=preset,
        layout=str(layout),
        num_ranks=layout.num_ranks,
        num_params=first.num_params,
        ledger=first.ledger,
        bubble=first.bubble,
        notes=list(dict.fromkeys(note for plan in plans for note in plan.notes)),
        ranks=[plan.figures for plan in plans],
    )


def chosen_ranks(layout: Layout, ranks: str) -> list[int]:
    """The ranks of a choice: at coordinate 0 of all axes but pp, where it is by stage.

    Raises:
        PlanError: no such choice, or no such rank.
    """
    mesh = Mesh.of(layout)
    if ranks in ("ends", "all"):
        places = range(layout.pp) if ranks == "all" else sorted({0, layout.pp // 2, layout.pp - 1})
        return [mesh.rank_of(pp=place) for place in places]
    numbers = _numbers(ranks)
    beyond = [number for number in numbers if number >= layout.num_ranks]
    if beyond:
        raise PlanError(f"{layout} has no rank {beyond[0]}: its ranks run from 0 to {layout.num_ranks - 1}.")
    return numbers


def _numbers(text: str) -> list[int]:
    parts: Sequence[str] = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise PlanError(f"ranks is {text!r}; it must be ends, all, or numbers: --ranks 0,5")
    return list(dict.fromkeys(int(part) for part in parts))
