"""How each figure of the ranks becomes one figure of the world, declared once per key.

A generic mean would dilute a peak by the world size, and a generic sum would count samples as often as ranks
hold them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

Row = Mapping[str, float | None]


class Reduction(StrEnum):
    """MEAN, MAX, SUM over ranks; SUM_OF_DATA over data slices, each once; GLOBAL was reduced in the step."""

    MEAN = "mean"
    MAX = "max"
    SUM = "sum"
    SUM_OF_DATA = "sum of data"
    GLOBAL = "global"


REDUCTIONS: Mapping[str, Reduction] = {
    "perf/step_time_s": Reduction.MAX,
    "perf/samples_per_s": Reduction.SUM_OF_DATA,
    "perf/tokens_per_s": Reduction.SUM_OF_DATA,
    "perf/data_wait": Reduction.MAX,
    "perf/data_wait_mean": Reduction.MEAN,
    "perf/model_flops": Reduction.SUM,  # tensor and pipeline ranks each did their part of the model
    "perf/hardware_flops": Reduction.SUM,
    "perf/mfu": Reduction.GLOBAL,  # from the sums, never a mean of the ranks' own
    "perf/device_utilisation": Reduction.MEAN,
    "mem/peak_gib": Reduction.MAX,
}


def reduction_of(key: str) -> Reduction:
    """The declared reduction; `train/` and `eval/` figures leave the step already reduced over samples."""
    if key.startswith(("train/", "eval/")):
        return Reduction.GLOBAL
    assert key in REDUCTIONS, f"declare how ranks reduce {key!r} in metrics/reduce.py"
    return REDUCTIONS[key]


def combine(rows: Sequence[Row], data_ranks: Sequence[int] | None = None) -> dict[str, float | None]:
    """One row of the world from one row per rank, in rank order.

    `data_ranks` is the data coordinate of each row; ranks that share one hold the same samples (default: all
    differ). A figure that a rank does not know (None, or absent) is left out; one nobody knows stays None.
    """
    holders = _first_holders(data_ranks if data_ranks is not None else range(len(rows)))
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: _reduce(key, rows, holders) for key in keys}


def _first_holders(data_ranks: Iterable[int]) -> set[int]:
    first: dict[int, int] = {}
    for index, data_rank in enumerate(data_ranks):
        first.setdefault(data_rank, index)
    return set(first.values())


def _reduce(key: str, rows: Sequence[Row], holders: set[int]) -> float | None:
    reduction = reduction_of(key)
    chosen = [row for i, row in enumerate(rows) if i in holders or reduction is not Reduction.SUM_OF_DATA]
    known = [value for row in chosen if (value := row.get(key)) is not None]
    return _REDUCE[reduction](known) if known else None


def _max(values: list[float]) -> float:
    # max() keeps or loses a nan depending on where it stands.
    return math.nan if any(math.isnan(value) for value in values) else max(values)


_REDUCE: Mapping[Reduction, Callable[[list[float]], float]] = {
    Reduction.MEAN: lambda values: math.fsum(values) / len(values),
    Reduction.MAX: _max,
    Reduction.SUM: math.fsum,
    Reduction.SUM_OF_DATA: math.fsum,
    Reduction.GLOBAL: lambda values: values[0],
}
