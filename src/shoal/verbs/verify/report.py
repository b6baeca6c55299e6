"""What a verification found, for a person and for a script."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shoal.units import show_seconds
from shoal.verbs.verify.compare import GATE, KINDS, Row

Verdict = Literal["same", "wrong", "refused", "failed", "interrupted"]
EXIT_CODES: dict[Verdict, int] = {"same": 0, "wrong": 1, "failed": 1, "refused": 2, "interrupted": 130}
NOISE_LIMIT = 10.0  # times the noise floor: two perturbed runs say its size within a factor of two or so
MOST_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A row that differs, and in which training."""

    training: str
    row: Row

    def as_dict(self) -> dict[str, Any]:
        told = asdict(self.row)
        del told["key"], told["order"]
        return {"training": self.training, **told}


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The job's own precision: the largest error, in multiples of what one ulp in the weights does to one process."""

    precision: str
    ratio: float
    what: str

    @property
    def differ(self) -> bool:
        return not self.ratio <= NOISE_LIMIT

    def __str__(self) -> str:
        if not self.ratio:
            return f"{self.precision}  equal to the bit"
        where = f"{self.what} is {self.ratio:.2g} x the noise floor"
        if self.differ:
            return f"{self.precision}  numerics differ: {where}, which is what one ulp in the weights does"
        return f"{self.precision}  the same within its noise: at most {where}"


@dataclass(kw_only=True)
class Report:
    """A verification.

    Attributes:
        worst: the largest error by kind, with the number of comparisons.
        uncovered: what this verification did not look at, in words.
    """

    title: str
    verdict: Verdict
    sentence: str = ""
    ratio: float | None = None
    cosine: float | None = None
    findings: list[Finding] = field(default_factory=list)
    worst: dict[str, dict[str, Any]] = field(default_factory=dict)
    numerics: Numerics | None = None
    uncovered: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        told = asdict(self) | {"exit_code": self.exit_code, "findings": [f.as_dict() for f in self.findings]}
        if self.numerics is not None:
            told["numerics"] = asdict(self.numerics) | {"differ": self.numerics.differ}
        return json.loads(json.dumps(told), parse_constant=str)  # type: ignore[no-any-return]  # JSON has no inf

    def __str__(self) -> str:
        lines = [self.title, *(_line(kind, about) for kind, about in self.worst.items())]
        lines += [str(self.numerics)] if self.numerics else []
        lines += [f"not covered: {what}" for what in self.uncovered]
        return "\n".join([*lines, *self._verdict()])

    def _verdict(self) -> list[str]:
        took = f"({show_seconds(self.seconds)})"
        if self.verdict == "same":
            return [f"SAME  {self.sentence}  {took}"]
        if self.verdict != "wrong":
            return [f"{self.verdict.upper()}  {self.sentence}  {took}"]
        lines = [f"WRONG  {self.sentence}  {took}"]
        if self.ratio is not None:
            cosine = f", cosine {self.cosine:.9f}" if self.cosine is not None else ""
            lines.append(f"  ratio {self.ratio:.6g}{cosine}")
        return lines + _others(self.findings)


def _line(kind: str, about: Mapping[str, Any]) -> str:
    wrong, number, error = about["wrong"], about["number"], about["error"]
    size = "equal" if not error else f"{error:.1e} at {about['name']}"
    count = f"{wrong} of {number} differ" if wrong else f"{number} compared"
    return f"  {kind:<16} {count:<22} {'largest error ' if error else ''}{size}"


def _others(findings: Sequence[Finding]) -> list[str]:
    """The next ones in the order of cause and effect, each name once."""
    first, seen = [], set()
    for finding in findings:
        key = (finding.training, finding.row.kind, finding.row.name)
        if key not in seen:
            seen.add(key)
            first.append(f"  {_named(finding)}: error {finding.row.error:.1e}")
    more = len(first) - MOST_SHOWN
    return [*first[:MOST_SHOWN], *([f"  ... and {more} more"] if more > 0 else [])]


def _named(finding: Finding) -> str:
    row = finding.row
    return f"step {row.step}, {finding.training}: {row.kind}, {row.name}"


def summarise(rows: Iterable[tuple[str, Row]], gate: float = GATE) -> tuple[list[Finding], dict[str, dict[str, Any]]]:
    """The rows that differ, and for each kind how many there are, how many differ, and the largest error."""
    findings: list[Finding] = []
    worst: dict[str, dict[str, Any]] = {}
    for training, row in rows:
        if row.error is None:
            continue
        about = worst.setdefault(row.kind, {"number": 0, "wrong": 0, "error": 0.0, "name": ""})
        about["number"] += 1
        if row.error > about["error"] or math.isnan(row.error):
            about |= {"error": row.error, "name": f"{row.name}, step {row.step}"}
        if row.differs(gate):
            about["wrong"] += 1
            findings.append(Finding(training=training, row=row))
    return findings, {kind: worst[kind] for kind in KINDS if kind in worst}


def noise_ratio(rows: Sequence[Row], noise: Sequence[Sequence[Row]], eps: float) -> tuple[float, str]:
    """The largest error of a layout, in multiples of the noise floor; and whose it is.

    The floor of a tensor is the larger of its own and of the median of its kind, over all steps: what perturbed weights
    do to a long sum may be less than what another order of summation does.
    """
    floors: dict[tuple[str, str], float] = {}
    for row in (row for run in noise for row in run):
        if row.error is not None and math.isfinite(row.error):
            floors[row.kind, row.name] = max(floors.get((row.kind, row.name), eps), row.error)
    usual = {kind: statistics.median(f for (k, _), f in floors.items() if k == kind) for kind, _ in floors}
    ratio, what = 0.0, "nothing"
    for row in rows:
        if row.error is not None and row.kind not in ("sample ids", "random streams", "initial weights"):
            own = row.error / max(floors.get((row.kind, row.name), eps), usual.get(row.kind, eps))
            if not own <= ratio:
                ratio, what = own, f"{row.kind}, {row.name}, step {row.step}"
    return ratio, what
