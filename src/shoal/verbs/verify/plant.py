"""How a mistake is planted: one named seam of the production code is replaced, in the processes of one run alone."""

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import shoal.run.run
import shoal.step

ASSEMBLY = import_module("shoal.run.assemble")  # as an attribute, `shoal.run.assemble` is the function

Plant = contextlib.AbstractContextManager[None]


@contextlib.contextmanager
def swapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` becomes `make(what it was)`.

    Raises:
        AttributeError: there is no such seam any more, so the mistake would be none.
    """
    before = vars(owner)[name] if name in vars(owner) else getattr(owner, name)  # a seam is found by its name
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def after(act: Callable[..., None]) -> Callable[[Any], Any]:
    """For `swapped`: call what was there, then `act(*args, **kwargs)`, and return what was returned."""

    def make(before: Any) -> Any:
        def both(*args: Any, **kwargs: Any) -> Any:
            result = before(*args, **kwargs)
            act(*args, **kwargs)
            return result

        return both

    return make


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Without the checks by which a training itself refuses to go on: here verification must find the mistake."""
    checks: list[tuple[Any, str, Any]] = [
        (shoal.run.run, "check_replicas", None),
        (shoal.run.run, "check_first_step", []),
        (ASSEMBLY, "check_optimizer", []),
        (shoal.step, "check_additive", None),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in checks:
            stack.enter_context(swapped(owner, name, _always(answer)))
        yield


def _always(answer: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *args, **options: answer


class Posing:
    """A world that answers some questions wrongly, and all others as the true one."""

    def __init__(self, world: Any, **lies: Any) -> None:
        self.__dict__.update(lies, _world=world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)
