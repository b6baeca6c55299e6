"""What a comparison leaves: bench.json with all that was measured, bench.csv with its table; collectives.json."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.folder import new_folder

if TYPE_CHECKING:
    from shoal.verbs.bench.collectives_report import CollectivesReport
    from shoal.verbs.bench.megatron import Megatron
    from shoal.verbs.bench.report import Report


def keep(report: "Report | CollectivesReport | Megatron", folder: Path | None) -> Path | None:
    """Write the files, each at once or not at all.

    Args:
        folder: by default a new one, runs/bench-JOB.

    Returns:
        The folder; None where there is nothing to keep.
    """
    told = report.as_dict()
    kind = told["kind"]
    if kind == "megatron":
        return None
    texts = {f"{kind}.json": json.dumps(told, indent=1, default=str)}
    name = kind
    if kind == "bench":
        name = Path(told["job"].partition(":")[0]).stem.lower()
        texts["bench.csv"] = report.as_csv()  # type: ignore[union-attr]  # of its kind
    place = folder or new_folder(Path("runs") / f"bench-{name}")
    place.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        partial = place / f"{file}.tmp"
        partial.write_text(text, encoding="utf-8")
        partial.replace(place / file)
    return place
