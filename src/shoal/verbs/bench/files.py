"""What a comparison leaves: bench.json with all that was measured, bench.csv with its table; collectives.json."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.folder import missing, new_folder, to_json
from shoal.verbs.bench.command import BenchError
from shoal.verbs.bench.worlds import ENDED

if TYPE_CHECKING:
    from shoal.verbs.bench.collectives_report import CollectivesReport
    from shoal.verbs.bench.megatron import Megatron
    from shoal.verbs.bench.report import Report


@contextlib.contextmanager
def claimed(folder: Path | None) -> Iterator[None]:
    """Within, the folder takes the files of this benchmark alone; afterwards an empty one that was made here is gone.

    Raises:
        BenchError: before anything is measured: it is a file, cannot be made, holds a benchmark already, or another one
            is being measured for it now.
    """
    if folder is None:
        yield
        return
    made = missing(folder)
    lock = folder / ".bench.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = lock.open("w")
    except OSError as error:
        raise BenchError(f"--run {folder} cannot be made: {error.strerror}. Name another folder.") from None
    with held:
        try:
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when this process ends, however
        except OSError:
            raise BenchError(f"--run {folder} belongs to a benchmark that runs now. Name another folder.") from None
        try:
            if any((folder / name).exists() for name in ("bench.json", "collectives.json", "run.json")):
                raise BenchError(f"--run {folder} holds a run or a benchmark already. Name another folder.")
            yield
        finally:
            lock.unlink(missing_ok=True)
            for path in made:
                with contextlib.suppress(OSError):  # it is not empty, or not ours
                    path.rmdir()


def keep(report: "Report | CollectivesReport | Megatron", folder: Path | None) -> Path | None:
    """Write the files, each at once or not at all.

    Args:
        folder: by default a new one, runs/bench-JOB.

    Returns:
        The folder; None where there is nothing to keep: nothing was measured, and nothing failed.
    """
    told = report.as_dict()
    kind = told["kind"]
    was_ended = told["exit_code"] in ENDED and not (told.get("table") or told.get("rows"))
    if kind == "megatron" or was_ended:
        return None
    texts = {f"{kind}.json": to_json(told, indent=1)}
    name = kind
    if kind == "bench":
        name = Path(told["job"].partition(":")[0]).stem.lower()
        texts["bench.csv"] = report.as_csv()  # type: ignore[union-attr]  # of its kind
        texts |= {f"logs/{log}": text for log, text in report.logs.items()}  # type: ignore[union-attr]
    place = folder or new_folder(Path("runs") / f"bench-{name}")
    for file, text in texts.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        partial = place / f"{file}.tmp"
        partial.write_text(text, encoding="utf-8")
        partial.replace(place / file)
    return place
