"""What the page reads of each file, and of which type it is: all else is damage, and is named with its field.

Figures may be absent where that has a meaning (null), or not finite; nothing is converted.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.errors import ShoalError
from shoal.metrics.events import MAX_COUNT

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Number = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Shares = dict[str, float | None]
Bytes = dict[str, Count]
Span = tuple[Annotated[int, Field(ge=0, lt=4096)], Count, Literal["F", "B", "I", "W"], Count, float, float]


class ReportError(ShoalError):
    """Nothing to show, a damaged file, or a page that cannot be written."""


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Spent(_Read):
    model_config = ConfigDict(strict=True, extra="forbid")  # it becomes a `shoal.metrics.shares.Spent`
    wall_s: float
    data_s: float
    phases_s: dict[str, float]
    waits_s: dict[str, float] = {}
    hidden_s: dict[str, float] = {}
    bubble_s: float = 0.0
    work_s: list[float] = []


class _Rank(_Read):
    spent: _Spent
    peak_bytes: Bytes


class _Measured(_Read):
    layout: str
    num_devices: Number
    batch_size: Count
    error: str
    log: str = ""
    threads: Count = 1
    precision: str = ""
    losses: list[float | None]
    spans: list[Span]
    promised: list[Span]
    versions: dict[str, str] = {}
    ranks: list[_Rank]

    @model_validator(mode="after")
    def _has_ranks(self) -> "_Measured":
        if not self.error and not self.ranks:
            raise ValueError("a layout that ran has ranks")
        return self


class _Row(_Read):
    layout: str
    num_devices: Number
    step_ms: float
    step_ms_min: float
    step_ms_max: float
    rate: float
    rate_per_device: float
    speed_up: float | None
    efficiency: float | None
    mfu: float | None = None
    hfu: float | None = None
    utilisation: float | None = None
    shares: Shares
    sent_bytes: Bytes
    formula_bytes: Bytes = {}
    peak_bytes: Count
    peak_gib: float
    loss_differs: float | None
    is_same: bool
    bubble: float | None


class _Bench(_Read):
    job: str
    mode: Literal["strong", "weak"]
    unit: str
    cores: Count | None = None
    seconds: float | None = None
    fields: dict[str, Any] | None = None
    table: list[_Row]
    diagnosis: list[str]
    conventions: list[str]
    measured: list[_Measured]

    @model_validator(mode="after")
    def _is_whole(self) -> "_Bench":
        layouts = [row.layout for row in self.measured]
        if [row.layout for row in self.table] != [row.layout for row in self.measured if not row.error]:
            raise ValueError("table and measured do not name the same layouts")
        if len(set(layouts)) < len(layouts):
            raise ValueError("a layout is measured twice")
        return self


class _Seconds(_Read):
    median: float
    min: float
    max: float


class _Message(_Read):
    op: str
    axis: str
    ranks: Number
    bytes: Number
    seconds: _Seconds
    algbw_gb_per_s: float | None
    busbw_gb_per_s: float | None
    ring_bound_s: float | None = None
    times_ring_bound: float | None = None


class _Fit(_Read):
    op: str
    axis: str
    latency_us: float | None
    gb_per_s: float | None
    max_deviation: float | None


class _Collectives(_Read):
    layout: str
    num_ranks: Count
    rows: list[_Message]
    fits: list[_Fit]
    machine: dict[str, Any] | None = None
    seconds: float | None = None
    sentence: str | None = None
    notes: list[str] | None = None


class _Host(_Read):
    name: str
    ranks: list[Annotated[int, Field(ge=0, lt=10**6)]]


class _World(_Read):
    hosts: list[_Host] = []


class _Run(_Read):
    job: dict[str, Any] | None = None
    layout: str = ""
    world: _World | None = None
    ledger: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None


_FORMS: dict[str, type[_Read]] = {"bench.json": _Bench, "collectives.json": _Collectives, "run.json": _Run}


def load(file: Path) -> dict[str, Any]:
    """A file of a run or of a benchmark, as it is.

    Raises:
        ReportError: it cannot be read, or is damaged; with the file and the field.
    """
    try:
        text = file.read_text("utf-8")
        told = json.loads(text)
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{file} is damaged ({error}). Make it again, or leave its folder out.") from None
    try:
        _FORMS[file.name].model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ReportError(
            f"{file} is damaged, or of another version of shoal: {where}: {_reason(first['msg'])}. Make it again, or "
            "leave its folder out."
        ) from None
    return dict(told)


def _reason(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
