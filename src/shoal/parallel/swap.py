"""A module that runs otherwise but stays the same object: its class is exchanged for a subclass of it."""

from typing import Any


def become(module: Any, first: type) -> None:
    """Put the methods of `first` before those of the module's own class.

    The new class keeps the name of the user's, so that a printed model reads as before, and `isinstance` holds.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, (first, kind), {"__module__": kind.__module__})
