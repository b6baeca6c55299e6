"""What one layout was measured to do, as its first rank hands it in."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from shoal.metrics.shares import Spent


@dataclass(frozen=True, kw_only=True)
class RankMeasured:
    """Of one rank, in one optimizer step.

    Attributes:
        peak_bytes: of tensors, by category, at the moment when their sum was largest.
        peak_gib: of the process (CPU) or of the device's allocator (GPU), since it began.
        sent_bytes: by axis; `formula_bytes` what it should be by the textbook, sums of a few numbers left out.
        cpu_s: of the process, on all its threads, in the steps of `spent`.
    """

    spent: Spent
    peak_bytes: Mapping[str, int]
    peak_gib: float
    sent_bytes: Mapping[str, int]
    formula_bytes: Mapping[str, int]
    cpu_s: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        waits_s = {"/".join(key): seconds for key, seconds in self.spent.waits_s.items()}
        return {**asdict(self), "spent": {**asdict(self.spent), "waits_s": waits_s}}

    @staticmethod
    def of(told: Mapping[str, Any]) -> "RankMeasured":
        """What `as_dict` has told."""
        waits_s = {tuple(key.split("/")): seconds for key, seconds in told["spent"]["waits_s"].items()}
        return RankMeasured(**{**told, "spent": Spent(**{**told["spent"], "waits_s": waits_s})})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one layout.

    Attributes:
        times_s: wall time of an optimizer step, round by round.
        losses: of the steps, from the first on.
        model_flops: that the model needs in an optimizer step, of all ranks; `hardware_flops` with those of recompute.
        peak_flops: of one device, FLOP/s; None where it is unknown.
        bubble: idle share of a pipeline that the schedule promises with the times of its stages.
        spans: of the last step that was watched, what each rank of a pipeline did: rank, stage, kind, micro-batch,
            start and end in seconds; `promised` are those of the schedule with the times of its stages.
        versions: of torch and shoal, and the device.
        draws: the forward draws random numbers (dropout), other ones in each layout; None where that was not seen.
        note: what else a reader must know.
        error: why it is refused, or how it failed; what it had measured by then is here.
        log: of the rank that failed first, below the folder of the benchmark; empty where the layout is refused.
    """

    layout: str
    num_devices: int
    batch_size: int
    error: str = ""
    log: str = ""
    threads: int = 1
    tokens_per_sample: int | None = None
    precision: str = ""
    times_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    model_flops: float = 0.0
    hardware_flops: float = 0.0
    peak_flops: float | None = None
    peak_source: str = ""
    bubble: float | None = None
    spans: list[list[Any]] = field(default_factory=list)
    promised: list[list[Any]] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)
    draws: bool | None = None
    note: str = ""
    ranks: list[RankMeasured] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """How it ended badly, in a sentence."""
        verb, log = ("failed", f" (its log: logs/{self.log})") if self.log else ("is refused", "")
        return f"{self.layout} {verb}: {self.error}{log}"

    @property
    def step_s(self) -> float:
        """Median of the rounds."""
        return median(self.times_s)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ranks": [rank.as_dict() for rank in self.ranks]}

    @staticmethod
    def of(told: Mapping[str, Any]) -> "Measured":
        """What `as_dict` has told."""
        return Measured(**{**told, "ranks": [RankMeasured.of(rank) for rank in told["ranks"]]})
