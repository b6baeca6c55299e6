"""The process groups of a world: opened for ranks that have found each other, destroyed whatever happens."""

import contextlib
import datetime
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.errors import WorldError, nearest
from shoal.world.network import gloo_interface
from shoal.world.place import Place
from shoal.world.rendezvous import first_line
from shoal.world.roll import Met, meet, span

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed import Store  # type: ignore[attr-defined]  # exported from C++


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long ranks wait for each other."""

    collective: datetime.timedelta
    setup: datetime.timedelta
    rendezvous_s: float

    @staticmethod
    def of(*, timeout_min: float, setup_min: float, rendezvous_s: float) -> "Limits":
        """Check and convert.

        Raises:
            WorldError: a limit that is no positive number.
        """
        given = {"timeout_min": timeout_min, "setup_min": setup_min, "rendezvous_s": rendezvous_s}
        for name, value in given.items():
            if not 0 < value < math.inf:
                raise WorldError(f"{name} is {value}; it must be a positive number.")
        return Limits(
            collective=datetime.timedelta(minutes=timeout_min),
            setup=datetime.timedelta(minutes=setup_min),
            rendezvous_s=rendezvous_s,
        )


@dataclass(kw_only=True)
class Opened:
    """The live groups of a world; all None when lone, and once it is closed: whoever keeps it keeps no socket open."""

    rank: int = 0
    backend: str | None = None
    group: "dist.ProcessGroup | None" = None
    side_group: "dist.ProcessGroup | None" = None
    setup_group: "dist.ProcessGroup | None" = None  # on the host and patient: one rank may be preparing data
    met: Met | None = None
    setup_limit: datetime.timedelta = datetime.timedelta()
    limit: datetime.timedelta = datetime.timedelta(minutes=10)
    subgroups: dict[tuple[Sequence[int], bool], "dist.ProcessGroup"] = field(default_factory=dict)
    exchanges: Iterator[int] = field(default_factory=itertools.count)
    releases: list[Callable[[], None]] = field(default_factory=list)

    def all_gather(self, own: "torch.Tensor") -> "torch.Tensor":
        """A small tensor of the host from every rank, of one shape (N) -> (R, N).

        Raises:
            WorldError: naming the ranks that did not come in time.
        """
        import torch.distributed as dist

        if self.met is None:
            raise WorldError("this world is closed: its processes have parted. Stay within `with World.open(...)`.")
        number = next(self.exchanges)
        self.met.store.set(f"at/{self.rank}", str(number))
        # Into a list of rows: the one-tensor form was renamed between torch 2.9 and 2.13.
        rows = own.new_empty(len(self.met.names), own.numel())
        try:
            dist.all_gather(list(rows), own, group=self.setup_group)
        except RuntimeError as error:
            late = self._late(number)
            if "imed out" not in str(error) or not late:
                raise
            raise WorldError(
                f"{span(late)} did not come within {self.setup_limit.total_seconds() / 60:g} min to where rank "
                f"{self.rank} waits while the run is set up. Their own output says where they are; if that takes "
                "so long rightly, prepare it before the run."
            ) from error
        return rows

    def subgroup(self, ranks: Sequence[int], *, side: bool = False) -> "dist.ProcessGroup":
        """The group of these ranks, this one among them, made when first asked for, by its members alone."""
        import torch.distributed as dist

        found = self.subgroups.get((ranks, side))
        if found is None:
            alone = self.backend != "fake"  # whose other ranks never come
            found = dist.new_group(list(ranks), timeout=self.limit, use_local_synchronization=alone)
            self.subgroups[ranks, side] = found
        return found

    def close(self) -> None:
        """Let go of the groups, and tell whoever meets in the same place next.

        First of all the models: a DDP that outlives its group waits for ever, when it is freed, for threads of
        gloo that wait for the interpreter (half of all runs, with torch 2.13).
        """
        for release in self.releases:
            release()
        if self.met is not None:
            with contextlib.suppress(RuntimeError):  # rank 0 may be gone, and the store with it
                self.met.store.set(f"left/{self.rank}", "")
        self.group = self.side_group = self.setup_group = self.met = None
        self.subgroups.clear()

    def _late(self, number: int) -> list[str]:
        assert self.met is not None
        store, late = self.met.store, []
        for rank, name in enumerate(self.met.names):
            if not store.check([f"at/{rank}"]) or int(store.get(f"at/{rank}")) < number:
                late.append(f"rank {rank} ({name})")
        return late


@contextlib.contextmanager
def open_group(place: Place, device: "torch.device", *, backend: str | None, limits: Limits) -> Iterator[Opened]:
    """Find the other ranks, open the groups, and destroy them at the end.

    Raises:
        WorldError: no such backend, a group is open already, or the ranks do not find each other.
    """
    import torch.distributed as dist

    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    check_backend(backend, device.type)
    if dist.is_initialized():
        raise WorldError("a process group is open in this process already; close it before World.open().")
    if backend == "fake":
        with _destroyed():
            dist.init_process_group("fake", store=fake_store(), rank=place.rank, world_size=place.size)
            yield Opened(rank=place.rank, backend="fake", group=dist.group.WORLD)
        return
    met = meet(place, limit_s=limits.rendezvous_s)
    with gloo_interface(one_host=met.one_host, towards=met.host), _destroyed():
        try:
            opened = _open_real(place, backend, met, limits)
        except RuntimeError as error:
            raise WorldError(
                f"rank {place.rank} found the others but cannot talk to them: {first_line(error)}."
            ) from None
        try:
            yield opened
        finally:
            del met
            opened.close()


def _open_real(place: Place, backend: str, met: Met, limits: Limits) -> Opened:
    import torch.distributed as dist

    # MPI has its own roll, and numbers the ranks itself.
    seat: dict[str, Any] = (
        {} if backend == "mpi" else {"store": met.store, "rank": place.rank, "world_size": place.size}
    )
    dist.init_process_group(backend, timeout=limits.collective, **seat)
    if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
        raise WorldError(
            f"asked for rank {place.rank} of {place.size}, but {backend} made this process rank {dist.get_rank()} of "
            f"{dist.get_world_size()}."
        )
    on_host = None if backend == "mpi" else "gloo"
    return Opened(
        rank=place.rank,
        backend=backend,
        group=dist.group.WORLD,
        side_group=dist.new_group(timeout=limits.collective),
        setup_group=dist.new_group(timeout=limits.setup, backend=on_host),
        met=met,
        setup_limit=limits.setup,
        limit=limits.collective,
    )


@contextlib.contextmanager
def _destroyed() -> Iterator[None]:
    import torch.distributed as dist

    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def fake_store() -> "Store":
    """A store for a world of which only this process exists; importing it makes torch know the backend `fake`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def check_backend(backend: str, device_kind: str) -> None:
    """Refuse a backend that torch does not have, or that cannot serve the device.

    Raises:
        WorldError: with the reason.
    """
    import torch.distributed as dist

    if backend == "fake":
        return
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    if backend not in known:
        raise WorldError(f"there is no backend {backend!r}.{nearest(backend, known)}")
    if not known[backend]():
        hint = {
            "mpi": "torch must be built from source with MPI for it. Under mpirun, gloo works: leave --backend out.",
            "nccl": "it has no CUDA. On CPU: --device cpu, which takes gloo.",
        }.get(backend, "it was left out of that build.")
        raise WorldError(f"backend {backend} is not in this torch: {hint}")
    if backend == "nccl" and device_kind != "cuda":
        raise WorldError(f"backend nccl talks between GPUs, and the device is {device_kind}. Leave the backend out.")
