"""Whose code a file is: the user's, or a library's."""

import os
import sysconfig
from functools import cache
from pathlib import Path

OWN = str(Path(__file__).resolve().parent) + os.sep


def is_users(filename: str) -> bool:
    """Whether a frame is in code of the user's: not the standard library, an installed package, or shoal."""
    if filename.startswith("<"):
        return filename in ("<string>", "<stdin>")  # python -c, and a pipe
    parts = Path(filename).parts
    return "site-packages" not in parts and "dist-packages" not in parts and not filename.startswith(_foreign())


def short_path(filename: str) -> str:
    """A path from here where it lies below here."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


@cache
def _foreign() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (*(root + os.sep for root in (paths["stdlib"], paths["platstdlib"])), OWN)
