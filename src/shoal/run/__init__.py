"""A job on a world, ready to walk: `assemble` builds it, `Run` is it."""

from shoal.run.assemble import assemble
from shoal.run.run import Run

__all__ = ["Run", "assemble"]
