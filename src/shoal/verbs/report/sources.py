"""What a page is made of: the files of runs and benchmarks, as they lie in their folders."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.metrics.events import Event, read_events
from shoal.verbs.report.schema import ReportError, load

Facts = Mapping[str, Any]
Hosts = tuple[tuple[str, int], ...]  # the name of each, in the order of the ranks, and how many ranks it has


@dataclass(frozen=True, kw_only=True)
class Run:
    """What `shoal train` has left. `facts` is run.json; `schedule` the text of schedule.svg."""

    name: str
    date: str
    facts: Facts = field(default_factory=dict)
    events: Sequence[Event] = ()
    schedule: str | None = None

    @property
    def layout(self) -> str:
        return str(self.facts.get("layout", ""))

    @property
    def title(self) -> str:
        """Name and layout."""
        return f"{self.name} ({self.layout})" if self.layout else self.name

    @property
    def hosts(self) -> Hosts | None:
        """Where its ranks were; None where run.json does not say so of each of them."""
        told = (self.facts.get("world") or {}).get("hosts") or []
        at = {rank: host["name"] for host in told for rank in host["ranks"]}
        if not at or set(at) != set(range(len(at))):
            return None
        stretches = itertools.groupby(at[rank] for rank in range(len(at)))
        return tuple((name, len(list(ranks))) for name, ranks in stretches)

    def points(self, key: str) -> list[tuple[float, float | None]]:
        """Of one figure, the steps at which it was written, and its values."""
        return [(event["step"] or 0, event[key]) for event in self.events if key in event]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """bench.json of `shoal bench`."""

    name: str
    date: str
    told: Facts

    @property
    def table(self) -> list[Facts]:
        """The figures of the layouts that ran."""
        return list(self.told["table"])

    @property
    def good(self) -> list[Facts]:
        """What was measured of them."""
        return [row for row in self.told["measured"] if not row["error"]]

    @property
    def refused(self) -> list[Facts]:
        """The others, with their errors."""
        return [row for row in self.told["measured"] if row["error"]]

    @property
    def base(self) -> Facts | None:
        """What the others are held against: as the benchmark has it, `lone` or the first."""
        return next((row for row in self.good if row["layout"] == "lone"), self.good[0] if self.good else None)


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """collectives.json of `shoal bench collectives`."""

    name: str
    date: str
    told: Facts


Source = Run | Bench | Collectives


def read_all(paths: Sequence[Path]) -> list[Source]:
    """What lies in the folders, in their order; a folder that is named twice is read once.

    Raises:
        ReportError: a folder with nothing to show, or a damaged file.
        MetricsError: a damaged metrics.jsonl.
    """
    if not paths:
        raise ReportError("a report needs a folder: shoal report runs/digits")
    folders = list(dict.fromkeys(Path(path).resolve() for path in paths))
    names = [folder.name for folder in folders]
    return [
        source
        for folder in folders
        for source in _read(folder, folder.name if names.count(folder.name) == 1 else str(Path(*folder.parts[-2:])))
    ]


def _read(folder: Path, name: str) -> list[Source]:
    if not folder.is_dir():
        raise ReportError(
            f"{folder} is not a folder. Name the folder of a run or of a benchmark: shoal report runs/digits"
        )
    found: list[Source] = []
    if (file := folder / "bench.json").is_file():
        found.append(Bench(name=name, date=_date(file), told=load(file)))
    if (file := folder / "collectives.json").is_file():
        found.append(Collectives(name=name, date=_date(file), told=load(file)))
    if (folder / "run.json").is_file() or (folder / "metrics.jsonl").is_file():
        found.append(_read_run(folder, name))
    if not found:
        raise ReportError(
            f"{folder} has nothing to show: no run.json, metrics.jsonl, bench.json or collectives.json. "
            "Make a run: shoal train digits --layout dp2; or a benchmark: shoal bench digits --layouts lone,dp2"
        )
    return found


def _read_run(folder: Path, name: str) -> Run:
    facts, metrics, schedule = folder / "run.json", folder / "metrics.jsonl", folder / "schedule.svg"
    return Run(
        name=name,
        date=_date(metrics if metrics.is_file() else facts),
        facts=load(facts) if facts.is_file() else {},
        events=read_events(metrics) if metrics.is_file() else (),
        schedule=_text(schedule) if schedule.is_file() else None,
    )


def _text(file: Path) -> str:
    """Of a picture, that is left out where it cannot be read."""
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _date(file: Path) -> str:
    """When it was last written: the page itself has no date, so that it is the same each time."""
    return datetime.fromtimestamp(file.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")
