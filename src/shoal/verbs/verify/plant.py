"""How a mistake is planted: one named seam of the production code is replaced, in the processes of one run alone."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

import shoal.run.run
import shoal.step.step
from shoal.parallel.parts import local_of
from shoal.parallel.pipeline.proof import Proof

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
        (shoal.step.step, "check_additive", None),
        (Proof, "check", "none: a mistake is planted"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in checks:
            stack.enter_context(swapped(owner, name, _always(answer)))
        yield


def _always(answer: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *args, **options: answer


@dataclass(frozen=True)
class Mutant:
    """A mistake, how it is planted, words that the explanation must hold, and where it is planted."""

    name: str
    plant: Callable[[], Plant]
    says: str
    layout: str = "dp2"
    job: Literal["words", "pixels"] = "words"

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """In this process, without the guards that would stop the run."""
        with unguarded(), self.plant():
            yield


def local_norm() -> Plant:
    """Each rank clips by the norm of what it holds."""

    def norm(params: Any, parts: Any, world: Any) -> Tensor:
        return torch.nn.utils.get_total_norm([local_of(p.grad) for p in params.values() if p.grad is not None])

    return swapped(shoal.step.step, "grad_norm", lambda _: norm)


class Posing:
    """A world that answers some questions wrongly, and all others as the true one."""

    def __init__(self, world: Any, **lies: Any) -> None:
        self.__dict__.update(lies, _world=world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)
