"""shoal report PATH ...: read what runs and benchmarks have left, and write one page of it."""

from collections.abc import Sequence
from pathlib import Path

from shoal.verbs.report.schema import ReportError
from shoal.verbs.report.sources import read_all


def write_page(paths: Sequence[Path], to: Path | None = None) -> Path:
    """Write the page; the same input gives the same bytes.

    Args:
        paths: folders of runs, or with a bench.json or a collectives.json; what they hold is shown side by side.
        to: the file; by default report.html in the first of them.

    Returns:
        The file, written at once or not at all.

    Raises:
        ReportError: a folder with nothing to show, a damaged file, or the extra `report` is not installed.
        MetricsError: a damaged metrics.jsonl.
    """
    if to is not None and to.exists() and not to.read_bytes()[:15].lower().startswith(b"<!doctype html"):
        raise ReportError(f"{to} exists and is not a page: name another file, such as --to report.html")
    sources = read_all(paths)
    _require_extra()
    from shoal.verbs.report.page import page

    file = to or Path(paths[0]) / "report.html"
    partial = file.with_name(f"{file.name}.tmp")
    try:
        partial.write_text(page(sources), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise ReportError(f"cannot write {file}: {error.strerror}. Name another file: --to FILE") from None
    return file


def _require_extra() -> None:
    try:
        import jinja2
        import matplotlib
    except ImportError as error:
        raise ReportError(
            f"the page is drawn with matplotlib and jinja2, and {error.name} is not installed. They are an extra: "
            "pip install 'shoal[report]'"
        ) from None
    del jinja2, matplotlib
