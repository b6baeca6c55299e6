"""Where the time of a rank's steps goes, on the host's clock: its phases, and its waits for messages, by axis.

Every message that Python waits for is seen here, whoever sent it: torch's own parts do what shoal's do. What DDP's
reducer waits for in C++ it tells by itself (`Replica.exposed_s`).
"""

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from shoal.metrics.meter import axis_of
from shoal.world import World
from shoal.world.messages import seen

ALL = "all"
_FEW_BYTES = 48  # five float64 at most; the statistics of a BatchNorm are more


def _unmarked(what: str, axis: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Watch:
    """Seconds of this rank.

    Attributes:
        phases: by phase of the step: compute (forward and backward), update (norm, clipping, optimizer).
        waits: those of them in which it stood still for a message, by phase and axis. A sum of a few numbers takes no
            time to send: who waits for one waits for the rank that comes last, and its axis is `ALL`.

    Args:
        around: what is put around each message that is asked for (`call`, its axis) or waited for (`wait`, as above).
    """

    def __init__(
        self,
        world: World,
        now: Callable[[], float] = time.perf_counter,
        around: Callable[[str, str], contextlib.AbstractContextManager[Any]] = _unmarked,
    ) -> None:
        self.phases: defaultdict[str, float] = defaultdict(float)
        self.waits: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._world, self._now, self._around = world, now, around
        self._phase = ""
        self._on_the_way: dict[int, str] = {}  # works by id: the axis that they are on
        self._axes: dict[tuple[int, ...], str] = {}

    @property
    def worked_s(self) -> float:
        """In phases so far, waits left out."""
        return sum(self.phases.values()) - sum(self.waits.values())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a part of a step."""
        began, self._phase = self._now(), name
        try:
            yield
            if self._world.device.type == "cuda":  # it runs behind the host
                torch.cuda.synchronize(self._world.device)
        finally:
            self._phase = ""
            self.phases[name] += self._now() - began

    def messages(self) -> contextlib.AbstractContextManager[None]:
        """Within: waits are seen."""
        return seen(self._noting, self._timing)

    def _noting(self, method: Callable[..., Any], operation: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            axis = self._axis(group)
            with self._around("call", axis):
                work = method(group, *args, **kwargs)
            few = sum(tensor.nbytes for tensor in _tensors(args)) <= _FEW_BYTES
            self._on_the_way[id(work)] = ALL if few else axis
            return work

        return noted

    def _timing(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            began, axis = self._now(), self._on_the_way.pop(id(work), "")
            try:
                with self._around("wait", axis) if axis else contextlib.nullcontext():
                    return wait(work, *args, **kwargs)
            finally:
                if self._phase and axis:
                    self.waits[self._phase, axis] += self._now() - began

        return timed

    def _axis(self, group: dist.ProcessGroup) -> str:
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._axes:
            self._axes[ranks] = axis_of(ranks, self._world)
        return self._axes[ranks]


def _tensors(args: Any) -> list[torch.Tensor]:
    first = args[0] if args else ()
    found = first if isinstance(first, list | tuple) else [first]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
