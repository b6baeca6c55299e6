"""`shoal report`: runs and benchmarks as one page that needs nothing else, on a phone, on paper, in the dark."""

from shoal.verbs.report.command import write_page
from shoal.verbs.report.schema import ReportError

__all__ = ["ReportError", "write_page"]
