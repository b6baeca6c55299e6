"""One error class per room. A message is a short lesson: what was given, the rule, what to do."""

import difflib
import types
import typing
from collections.abc import Iterable
from enum import Enum
from typing import Any


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


def expected(hint: Any) -> str:
    """What fits a type, in words: `a whole number, such as 64`, `one of relu, gelu`."""
    args, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(map(expected, args))
    if origin in (list, tuple):
        return f"{hint}, written as a list: [0.9, 0.95]"
    if isinstance(hint, type) and issubclass(hint, Enum):
        args = tuple(member.value for member in hint)
    if args and (origin is typing.Literal or origin is None):
        return f"one of {', '.join(map(str, args))}"
    words = {
        int: "a whole number, such as 64",
        float: "a number, such as 3e-4",
        bool: "true or false",
        str: "a text",
        types.NoneType: "none",
    }
    return words.get(hint) or f"a {getattr(hint, '__name__', hint)}"
