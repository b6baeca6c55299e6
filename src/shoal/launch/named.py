"""Work that a fresh process can find again: a function by its import path, and arguments in JSON; no pickle."""

import functools
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.rank import Seat, Work

Named = tuple[str, dict[str, Any]]


def name_of(work: Work) -> Named:
    """(`module:function`, keyword arguments) of a function, or of a functools.partial of one.

    Raises:
        LaunchError: a fresh process could not import it, or an argument is not JSON; which, and why.
    """
    function, arguments = _unfold(work)
    path = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', '')}"  # callables may lack both
    reason = _why_not_importable(function, path)
    if reason:
        raise LaunchError(
            f"{path} cannot run in a fresh process: {reason}. A fresh process imports the work by name; nothing is "
            "pickled. Put it in a module as a plain function, and give its arguments with functools.partial."
        )
    for name, value in arguments.items():
        _check_json(path, name, value)
    return path, arguments


def spec(seat: Seat, named: Named) -> str:
    """What a fresh process is told on its command line."""
    path, arguments = named
    told = asdict(seat) | {"log": str(seat.log), "set_variables": dict(seat.set_variables)}
    return json.dumps({"seat": told, "work": path, "arguments": arguments, "path": sys.path})


def find(path: str) -> Callable[..., Any]:
    """The function behind `module:function`."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]  # whatever stands there was checked when it was named


def _unfold(work: Work) -> tuple[Callable[..., Any], dict[str, Any]]:
    if not isinstance(work, functools.partial):
        return work, {}
    if work.args:
        raise LaunchError(f"{work.func}: give the arguments of a fresh process by keyword, not by position.")
    return work.func, dict(work.keywords)


def _why_not_importable(function: Callable[..., Any], path: str) -> str:
    module, _, name = path.partition(":")
    if "<lambda>" in name:
        return "it is a lambda, which has no name to import"
    if "<locals>" in name:
        return f"it is defined inside {name.partition('.<locals>')[0]}(), so it exists only while that runs"
    if module in ("__main__", "__mp_main__"):
        return "it is defined in the script or notebook that runs now, which is no module"
    if not name:
        return f"a {type(function).__name__} object has no name to import"
    try:
        found = find(path)
    except (ImportError, AttributeError) as error:
        return str(error)
    return "" if found is function else "another object stands under that name (a method, or a decorated function)"


def _check_json(path: str, name: str, value: Any) -> None:
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise LaunchError(
            f"argument {name} of {path} is a {type(value).__name__} that JSON does not hold "
            "(texts, numbers, lists, dicts with text keys, None). Pass a name or a path, and build the object there."
        )
