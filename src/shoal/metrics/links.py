"""How fast ranks talk to each other: what each figure means, and the line through the times. Pure.

The `size` of an operation over n ranks is that of the whole buffer, in bytes:

    all_reduce       what every rank has, and gets summed
    all_gather       what every rank has at the end: size / n from each
    reduce_scatter   what every rank has at the start: each keeps the sum of size / n
    all_to_all       what every rank has: size / n of it goes to each
    broadcast        what the first rank has, and every rank gets
    send_recv        one message, one way

Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md, for size, algorithm bandwidth, bus bandwidth and its factors.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_FACTORS: Mapping[str, tuple[int, bool]] = {  # a, and whether it is a (n - 1) / n
    "all_reduce": (2, True),
    "all_gather": (1, True),
    "reduce_scatter": (1, True),
    "broadcast": (1, False),
    "all_to_all": (1, True),
    "send_recv": (1, False),
}
OPERATIONS = tuple(_FACTORS)


def algorithm_bandwidth(size_bytes: float, seconds: float) -> float:
    """Size over time (bytes/s): what one who waits for the operation sees."""
    return size_bytes / seconds


def bus_factor(operation: str, num_ranks: int) -> float:
    """How many times its size each rank must move at least, over its one link."""
    factor, shared = _FACTORS[operation]
    return factor * (num_ranks - 1) / num_ranks if shared else float(factor)


def bus_bandwidth(operation: str, num_ranks: int, size_bytes: float, seconds: float) -> float:
    """Algorithm bandwidth times `bus_factor` (bytes/s): comparable with the speed of a link, whatever n is."""
    return algorithm_bandwidth(size_bytes, seconds) * bus_factor(operation, num_ranks)


def ring_bound_s(num_ranks: int, size_bytes: float, link_bytes_per_s: float) -> float:
    """The time below which no ring all-reduce comes on such links: 2 (n - 1) / n x size / link, without latency.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.
    """
    return bus_factor("all_reduce", num_ranks) * size_bytes / link_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The line time = latency + size / bandwidth through measured times (the alpha-beta model).

    Attributes:
        max_deviation: of a measured time from the line, the largest, as a share of the measured time.
    """

    latency_s: float
    s_per_byte: float
    max_deviation: float

    @property
    def bytes_per_s(self) -> float | None:
        """None where the time does not grow with the size."""
        return 1 / self.s_per_byte if self.s_per_byte > 0 else None

    def seconds(self, size_bytes: float) -> float:
        """What a message of this size takes on the line."""
        return self.latency_s + self.s_per_byte * size_bytes


def fit_line(points: Iterable[tuple[float, float]]) -> Fit | None:
    """The line through (size in bytes, seconds) with the least squares of relative errors; None for a single size.

    Relative, since times span five orders of magnitude: else the largest message alone would decide, and its noise
    be the latency of all. Neither latency nor seconds per byte is negative.

    Each point is a row (1 / t, size / t) of a matrix, and the line is the x for which its product with x is nearest
    to ones. The columns are scaled to length 1, and the second is made orthogonal to the first. Where a component
    comes out negative the best has it at zero, since the error is convex.
    """
    points = list(points)
    if len({size for size, _ in points}) < 2:
        return None
    first, first_length = _scaled([1 / seconds for _, seconds in points])
    second, second_length = _scaled([size / seconds for size, seconds in points])
    shared = _dot(first, second)
    apart = [b - shared * a for a, b in zip(first, second, strict=True)]
    slope = math.fsum(apart) / _dot(apart, apart)
    latency = math.fsum(first) - shared * slope
    if latency < 0:
        latency, slope = 0.0, math.fsum(second)
    elif slope < 0:
        latency, slope = math.fsum(first), 0.0
    latency_s, s_per_byte = latency / first_length, slope / second_length
    deviations = (abs(latency_s + s_per_byte * size - seconds) / seconds for size, seconds in points)
    return Fit(latency_s=latency_s, s_per_byte=s_per_byte, max_deviation=max(deviations))


def _scaled(column: Sequence[float]) -> tuple[list[float], float]:
    length = math.hypot(*column)
    return [value / length for value in column], length


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
