"""Data parallelism in one process, as torch's nn.DataParallel has it: one master, and replicas of it in threads.

    master ─┬─────────── first part ─── forward, backward ─┐
            ├─ a copy ── second part ── forward, backward ─┼─ gradients, added in this order ── update of the master
            └─ a copy ── third part ─── forward, backward ─┘

A copy lives for one step: the modules and attributes that the master has now, over the same memory of parameters and
buffers; its gradients alone are its own. The master is the first replica, in the thread of the caller. (torch's own
replicate, scatter and gather refuse what is on a CPU.)
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from shoal.errors import JobError, LayoutError
from shoal.parallel.meeting import Chance, Meeting, Modes, Replicas, Streams
from shoal.parallel.writes import memory_of
from shoal.world import World

T = TypeVar("T")
Pairs = list[tuple[nn.Parameter, nn.Parameter]]  # the master's, and a replica's


class Threads:
    """The replicas of a model.

    Invariant: nothing that a step computes depends on which thread is faster. So replicas that draw random numbers run
    one after the other: torch, numpy and Python have one stream for all threads of a process.

    Attributes:
        scope: of the BatchNorms, whose batch is that of all replicas.
        local_norms: those that see the part of one replica; their running statistics are of the master's part.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        _check(world)
        self._model, self._num = model, world.layout.threads
        self.scope = Replicas(self._num)
        self.local_norms: list[str] = []
        self._draws: bool | None = None  # in the forward; the first step tells
        self._pool: ThreadPoolExecutor | None = None
        world.at_close(self._close)

    @property
    def takes_turns(self) -> bool:
        """Whether replicas run one after the other."""
        return self._draws is not False

    def start(self) -> None:
        """The model is placed: outside of a step the master is alone from here on.

        Raises:
            JobError: the model cannot be copied, and why.
        """
        self.scope.release()
        try:
            self._replica()
        except Exception as error:  # whatever the user's own objects raise
            raise JobError(
                f"threads{self._num} copies the model, and {type(self._model).__name__} cannot be copied "
                f"({type(error).__name__}: {error}). Keep such objects out of its attributes, or take dp{self._num}, "
                "where each process builds the model."
            ) from error

    def run(self, work: Callable[[nn.Module, int], T], num: int, seed: Callable[[int], None]) -> list[T]:
        """What `work(replica, number)` returns of each part; afterwards the gradients are on the master.

        Args:
            work: forward and backward of one part, in a thread of its own.
            num: of parts, at most one for each thread.
            seed: begins the random streams of a part.

        Raises:
            BaseException: of the first replica that failed, when all have ended.
            JobError: the forward does what replicas cannot do side by side.
        """
        modes: Modes = _get_current_dispatch_mode_stack()  # what counts or watches is not made for threads: in turns
        meeting: Meeting[T] = Meeting(num, seed if modes or self.takes_turns else None)
        modes = [*modes, *_get_current_function_mode_stack()]  # type: ignore[no-untyped-call]  # of torch
        chance = Chance()
        first = [chance] if self._draws is None else []
        copies = [self._replica() for _ in range(num - 1)]
        versions, shared, begun = self._versions(), self._shared(), Streams()
        with self._shared_cores() as pool, self.scope.meet(meeting):
            others = [
                pool.submit(meeting.take_part, work, replica, number, [*modes, *first])
                for number, (replica, _) in enumerate(copies, start=1)
            ]
            meeting.take_part(work, self._model, 0, first)
            wait(others)
        made = meeting.results()
        self._check_written(versions, chance.written)
        self._check_shared(shared)
        if meeting.in_turns:
            meeting.after.restore()
            self._draws = bool(self._draws) or meeting.has_drawn or chance.has_drawn
        elif begun.have_moved():
            raise JobError(
                "the forward draws random numbers in this step, and in the first it did not: replicas in threads share "
                f"one stream, and it is chance who drew first. No weight was changed by this step. Take dp{self._num}."
            )
        for _, pairs in copies:
            _add_gradients(pairs)
        return made

    def _versions(self) -> list[int]:
        return [param._version for param in self._model.parameters()]

    def _shared(self) -> dict[str, int]:
        """Versions of what replicas share and must not write: buffers that no BatchNorm moves, and plain tensors."""
        norms = tuple(n for n, m in self._model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase))
        found = {name: b._version for name, b in self._model.named_buffers() if name.rpartition(".")[0] not in norms}
        for name, module in self._model.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, Tensor):
                    found[f"{name}.{key}".strip(".")] = value._version
        return found

    def _check_shared(self, before: dict[str, int]) -> None:
        after = self._shared()
        moved = next((name for name, version in before.items() if after.get(name, version) != version), None)
        if moved is not None:
            raise JobError(
                f"the forward writes into {moved}, in place, and the replicas share it: each of them would write. No "
                f"weight was changed by this step. Keep that state out of the forward, or take dp{self._num}."
            )

    def _check_written(self, versions: Sequence[int], memory: set[int]) -> None:
        for (name, param), version in zip(self._model.named_parameters(), versions, strict=True):
            if param._version != version or memory_of(param) in memory:
                raise JobError(
                    f"the forward writes into the parameter {name} (an embedding with max_norm does), whose memory the "
                    "replicas share. Do it after the update, in the optimizer's own step, or take --layout lone."
                )

    def _replica(self) -> tuple[nn.Module, Pairs]:
        pairs = [(param, _alias(param)) for param in self._model.parameters()]
        memo: dict[int, Any] = {id(kept): kept for kept in _kept(self._model, self.local_norms)}
        memo |= {id(param): alias for param, alias in pairs}
        replica = copy.deepcopy(self._model, memo)
        if [id(param) for param in replica.parameters()] != [id(alias) for _, alias in pairs]:
            raise TypeError("a __deepcopy__ of its own makes new parameters, so their gradients would be lost")
        return replica, pairs

    @contextlib.contextmanager
    def _shared_cores(self) -> Iterator[ThreadPoolExecutor]:
        """Within: each replica has its share of the threads that one operation may use."""
        cores = torch.get_num_threads()
        share = max(1, cores // self._num)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num - 1, "shoal-replica", torch.set_num_threads, (share,))
        torch.set_num_threads(share)
        try:
            yield self._pool
        finally:
            torch.set_num_threads(cores)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _check(world: World) -> None:
    layout = world.layout
    if world.kind == "fake" or world.device.type != "cpu":
        where = "shapes alone" if world.kind == "fake" else f"a {world.device.type} device"
        raise LayoutError(
            f"{layout}: replicas in threads run on a CPU, where they share the memory of the weights, not on {where}. "
            f"Take dp{layout.threads}: one process per device, the same training, and what torch advises there too."
        )
    unfit = [name for name in ("micro", "recompute", "compile") if getattr(layout, name) not in (1, "none")]
    if unfit:
        raise LayoutError(
            f"{layout}: {unfit[0]}= is not made for replicas that run side by side over the same buffers. Drop it, or "
            f"take dp{layout.threads}."
        )


def _kept(model: nn.Module, local_norms: Sequence[str]) -> Iterator[Any]:
    """What a copy has in common with the master: hooks, buffers, and tensors that a forward has left on a module."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if "hooks" in key or key.startswith("_shoal"):
                yield value
            elif key == "_buffers":
                yield from () if name in local_norms else (buffer for buffer in value.values() if buffer is not None)
            elif key not in _names_of_torch():
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


@cache
def _names_of_torch() -> frozenset[str]:
    """Attributes that every module has."""
    return frozenset(vars(nn.Module()))


def _alias(param: nn.Parameter) -> nn.Parameter:
    """The same memory, with a gradient of its own."""
    alias = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
    alias.__class__ = type(param)  # a subclass of the user's
    alias.__dict__.update(vars(param))
    return alias


def _add_gradients(pairs: Pairs) -> None:
    for param, alias in pairs:
        if param.grad is None:
            param.grad = alias.grad
        elif alias.grad is not None:
            param.grad += alias.grad
