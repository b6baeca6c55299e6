"""What a comparison leaves: bench.json with all that was measured, bench.csv with its table."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.folder import new_folder

if TYPE_CHECKING:
    from shoal.verbs.bench.collectives_report import CollectivesReport
    from shoal.verbs.bench.megatron import Megatron
    from shoal.verbs.bench.report import Report


def keep(report: "Report | CollectivesReport | Megatron", folder: Path | None) -> Path | None:
    """Write both files of a comparison of layouts, each at once or not at all.

    Args:
        folder: by default a new one, runs/bench-JOB.

    Returns:
        The folder; None where there is nothing to keep.
    """
    from shoal.verbs.bench.report import Report

    if not isinstance(report, Report):
        return None
    name = Path(report.job.partition(":")[0]).stem.lower()
    place = folder or new_folder(Path("runs") / f"bench-{name}")
    place.mkdir(parents=True, exist_ok=True)
    for file, text in (
        ("bench.json", json.dumps(report.as_dict(), indent=1)),
        ("bench.csv", report.as_csv()),
    ):
        partial = place / f"{file}.tmp"
        partial.write_text(text, encoding="utf-8")
        partial.replace(place / file)
    return place
