"""A module that runs otherwise but stays the same object: its class is exchanged for a subclass of it."""

import functools
from typing import Any


def become(module: Any, first: Any) -> None:
    """Put the methods of `first` before those of the module's own class; modules of one class stay of one class.

    The new class keeps the name of the user's, so that a printed model reads as before, and `isinstance` holds.
    """
    module.__class__ = _joined(first, type(module))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _joined(first: Any, kind: Any) -> Any:
    return type(kind.__name__, (first, kind), {"__module__": kind.__module__})
