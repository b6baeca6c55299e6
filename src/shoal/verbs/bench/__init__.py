"""`shoal bench`: how fast a job is in each layout, how well it scales, where the time goes, and that it is the same."""

from shoal.verbs.bench.answer import answer
from shoal.verbs.bench.command import BenchError, command
from shoal.verbs.bench.files import claimed, keep

__all__ = ["BenchError", "answer", "claimed", "command", "keep"]
