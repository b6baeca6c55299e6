"""One step of replicas in threads: where they hand each other tensors, whose turn it is, what random numbers it has.

Nothing in here depends on which thread is faster: what is brought is added in the order of the replicas, and replicas
that draw take turns, each with streams of its own.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import JobError
from shoal.parallel.norm import Scope
from shoal.parallel.stillness import LOOK_S, Stillness, place_of
from shoal.parallel.writes import written_by

T = TypeVar("T")
Modes = Sequence[contextlib.AbstractContextManager[Any]]


class Meeting(Generic[T]):
    """A step of so many replicas. With `seed` they take turns: whoever runs has the turn, but while it waits.

    Attributes:
        has_drawn: whether a replica left one of its streams elsewhere than where its turn began.
        after: the streams that the caller goes on with: as the first replica left them.
    """

    def __init__(self, num: int, seed: Callable[[int], None] | None) -> None:
        self.num = num
        self.has_drawn = False
        self.after = Streams()
        self._seed = seed
        self._running = threading.Lock()  # held by the replica whose turn it is
        self._changed = threading.Condition()  # what follows
        self._here = threading.local()
        self._threads: dict[int, int] = {}  # of each replica that has begun
        self._made: dict[int, T] = {}
        self._raised: dict[int, BaseException] = {}
        self._brought: dict[int, Tensor] = {}
        self._handed_out: list[Tensor] = []
        self._stray: JobError | None = None
        self._num_exchanges = 0
        self._one_has_left = False

    @property
    def in_turns(self) -> bool:
        """Whether one replica runs at a time."""
        return self._seed is not None

    @property
    def number(self) -> int:
        """Of the replica in this thread."""
        return int(self._here.number)

    def take_part(self, work: Callable[[nn.Module, int], T], replica: nn.Module, number: int, modes: Modes) -> None:
        """Work on one part, within these modes."""
        self._here.number, self._threads[number] = number, threading.get_ident()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._turn(number))
                for mode in modes:
                    stack.enter_context(mode)
                self._made[number] = work(replica, number)
        except BaseException as error:  # `results` raises it, when the others have ended too
            self._raised[number] = error
        with self._changed:
            self._one_has_left = True
            self._changed.notify_all()

    def results(self) -> list[T]:
        """What each replica made.

        Raises:
            BaseException: of the first one that failed; who only waited for it is not meant.
        """
        if self._stray is not None:  # whatever the forward made of it
            raise self._stray
        failed = sorted(self._raised.items(), key=lambda raised: (isinstance(raised[1], _LeftAloneError), raised[0]))
        for _, error in failed:
            raise error
        return [self._made[number] for number in range(self.num)]

    def exchange(self, own: Tensor, name: str) -> list[Tensor]:
        """What every replica brings, in their order; nobody may write into it.

        Args:
            name: of the norm.

        Raises:
            JobError: another replica has left, is elsewhere, or cannot come; or this thread is none of a replica.
        """
        if not hasattr(self._here, "number"):  # before the lock, which the replica itself may hold
            self._stray = JobError(
                f"{name} is called in a thread that the forward itself has started, where it is unknown of which "
                f"replica it is. Its batch is that of all replicas. Call it in the forward's own thread, or take "
                f"dp{self.num}, where each process has one replica."
            )
            raise self._stray
        with self._changed:
            before = self._num_exchanges
            self._brought[self.number] = own
            if len(self._brought) == self.num:
                self._handed_out = [self._brought[number] for number in range(self.num)]
                self._brought = {}
                self._num_exchanges += 1
                self._changed.notify_all()
        if self._num_exchanges == before:
            self._wait(lambda: self._num_exchanges > before or self._one_has_left, name)
        if self._num_exchanges == before or any(other.shape != own.shape for other in self._handed_out):
            raise _LeftAloneError(
                "a replica stands in a BatchNorm that another one does not come to. Its batch is that of all "
                "replicas, so all must call the same norms in the same order: keep it out of branches, take "
                "GroupNorm or LayerNorm in there, or say batch_norm='local' in the job."
            )
        return self._handed_out

    def _wait(self, is_over: Callable[[], bool], name: str) -> None:
        """Let others run until they have come.

        Raises:
            JobError: they stand still. Whoever has the turn may be among them, so it is not taken again.
        """
        streams = Streams() if self.in_turns else None
        self._end_turn()
        stillness = Stillness()
        with self._changed:
            while not self._changed.wait_for(is_over, LOOK_S):
                missing = {number: thread for number, thread in self._threads.items() if number not in self._brought}
                if len(missing) + len(self._brought) == self.num and stillness.lasts(missing.values()):
                    raise self._never_comes(name, missing)
        if streams is not None:
            self._begin_turn()
            streams.restore()

    def _never_comes(self, name: str, missing: Mapping[int, int]) -> JobError:
        number, thread = next(iter(missing.items()))
        return JobError(
            f"replica {self.number} waits in {name} for replica {number}, which stands still at {place_of(thread)}. "
            "The batch of a BatchNorm is that of all replicas: when one calls it under a lock that the others need, "
            f"they never come. Call it outside of the lock, or take dp{self.num}, where each process has one replica."
        )

    @contextlib.contextmanager
    def _turn(self, number: int) -> Iterator[None]:
        if self._seed is None:
            yield
            return
        self._begin_turn()
        try:
            self._seed(number)
            begun = Streams()
            yield
            self.has_drawn |= begun.have_moved()
            if number == 0:
                self.after = Streams()
        finally:
            self._end_turn()

    def _begin_turn(self) -> None:
        self._running.acquire()
        self._here.has_turn = True

    def _end_turn(self) -> None:
        if getattr(self._here, "has_turn", False):  # of this thread alone: nobody has set it before its first turn
            self._here.has_turn = False
            self._running.release()


class _LeftAloneError(JobError):
    """A replica waits for one that does not come."""


class Replicas(Scope):
    """The replicas that share one batch: what ranks of a group are to a BatchNorm."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num_ranks = num
        self._meeting: Meeting[Any] | None = None

    @contextlib.contextmanager
    def meet(self, meeting: Meeting[Any]) -> Iterator[None]:
        """Within: in every replica that takes part. Outside of it the master is alone."""
        self._meeting, self.num_ranks = meeting, meeting.num
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self._meeting, self.num_ranks = None, 1

    @property
    def tracks(self) -> bool:
        return self._met.number == 0

    def gather(self, own: Tensor) -> Tensor:
        return torch.stack(self._met.exchange(own, f"the BatchNorm {self.names[int(own[-1])]!r}"))

    def add_up(self, own: Tensor) -> None:
        own.copy_(torch.stack(self._met.exchange(own.clone(), "the backward of a BatchNorm")).sum(0))

    @property
    def _met(self) -> Meeting[Any]:
        assert self._meeting is not None, "a norm asks where there is more than one replica"
        return self._meeting


class Streams:
    """The random streams of this process as they are now; there is one of each, whatever the thread."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore(self) -> None:
        """Go back to here."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)

    def have_moved(self) -> bool:
        """Whether something was drawn since."""
        now = Streams()
        same = self._python == now._python and torch.equal(self._torch, now._torch)
        return not (same and all(map(np.array_equal, self._numpy, now._numpy)))


class Chance(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook has no types
    """Sees what torch draws, also where the stream is put back behind it (`torch.random.fork_rng`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor has its constructor
        self.has_drawn = False
        self.written: set[int] = set()  # memory that operations write into, also where no version tells of it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch wraps the handler below in a function that imports torch._dynamo, one second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.written |= written_by(func, args, kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()  # such an operation may draw nothing: attention without dropout
        made = func(*args, **(kwargs or {}))
        self.has_drawn |= not torch.equal(before, torch.get_rng_state())
        return made
