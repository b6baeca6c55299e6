"""One error class per room. A message is a short lesson: what was given, the rule, what to do."""

import difflib
from collections.abc import Iterable


class ShoalError(ValueError):
    """What a person can mend: shown without a traceback."""


class LayoutError(ShoalError):
    """The layout string, or the world it is asked to fill."""


class JobError(ShoalError):
    """What is trained: model, data, loss, optimizer, or a value of the job."""


class DataError(ShoalError):
    """The data set, or how it was handed over."""


class WorldError(ShoalError):
    """The processes: their number, rendezvous, devices, or agreement."""


class LaunchError(ShoalError):
    """Starting processes on this machine."""


class CheckpointError(ShoalError):
    """A checkpoint that is damaged, foreign, missing, or cannot be written."""


class NumericsError(ShoalError):
    """A loss or a gradient that is not finite."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint ` Did you mean 'x'?`, or the whole list where nothing is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."
