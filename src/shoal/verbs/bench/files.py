"""What a comparison leaves: bench.json with all that was measured, bench.csv with its table; collectives.json."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.folder import new_folder
from shoal.verbs.bench.command import BenchError

if TYPE_CHECKING:
    from shoal.verbs.bench.collectives_report import CollectivesReport
    from shoal.verbs.bench.megatron import Megatron
    from shoal.verbs.bench.report import Report


def check_folder(folder: Path | None) -> None:
    """Refuse, before anything is measured, a folder that cannot take the files.

    Raises:
        BenchError: it is a file, cannot be made, or holds a benchmark already.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--run {folder} cannot be made: {error.strerror}. Name another folder.") from None
    if any((folder / name).exists() for name in ("bench.json", "collectives.json", "run.json")):
        raise BenchError(f"--run {folder} holds a run or a benchmark already. Name another folder.")


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
