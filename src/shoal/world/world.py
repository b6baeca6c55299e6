"""The live processes, open: lone, real or fake."""

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import ShoalError, WorldError
from shoal.layout import Layout, check_world
from shoal.mesh import Mesh
from shoal.world.place import Place
from shoal.world.rendezvous import fake_store, loopback, roll_call, span

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run, open. Collectives of set-up live here; those of the step live in `parallel`."""

    kind: Literal["lone", "real", "fake"]
    layout: Layout
    mesh: Mesh
    place: Place
    device: "torch.device"
    backend: str | None = None
    group: "dist.ProcessGroup | None" = None  # every rank; None when lone
    side_group: "dist.ProcessGroup | None" = None  # for small sums, so that they never queue behind gradients

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def num_data(self) -> int:
        """Degree of data parallelism: dp x fsdp."""
        return self.layout.num_data

    @property
    def data_rank(self) -> int:
        """Coordinate of this rank on the data axes."""
        return self.mesh.data_rank(self.rank)

    @staticmethod
    @contextlib.contextmanager
    def open(
        layout: Layout | str = "lone",
        *,
        place: Place | None = None,
        kind: Literal["lone", "real", "fake"] | None = None,
        device: str | None = None,
        backend: str | None = None,
        timeout_min: float = 10.0,
    ) -> "Iterator[World]":
        """Open the world that a layout asks for, and close it whatever happens.

        Args:
            place: where this process stands; by default what its launcher says.
            kind: `fake` builds any size in this one process and computes nothing; else by the size.
            device: `cpu`, `cuda`; by default cuda where there is one.
            backend: gloo, nccl, mpi; by default the device's.
            timeout_min: minutes that a collective may take.

        Raises:
            LayoutError: the layout does not fill the world that exists.
            WorldError: the processes do not find each other, a rank is there twice, no such device or backend.
        """
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        if kind == "fake":
            place = replace(place or Place(), size=layout.num_ranks, local_size=layout.num_ranks, source="flags")
        place = place or Place.find()
        check_world(layout, place.size)
        kind = kind or ("lone" if place.size == 1 else "real")
        world = World(
            kind=kind,
            layout=layout,
            mesh=Mesh.of(layout, ranks_per_node=place.local_size),
            place=place,
            device=_device(device if kind != "fake" else "cpu", place),
        )
        if kind == "lone":
            yield world
            return
        with _process_group(world, backend, timeout_min) as opened:
            yield opened

    # -- collectives of set-up: text over tensors, never a pickle ------------------------------------------

    def gather_text(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order, on every rank."""
        if self.kind != "real":
            return [text] * self.size
        import torch
        import torch.distributed as dist

        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        lengths = [int(row[0]) for row in self.gather_floats([data.numel()])]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        rows = padded.new_empty(self.size, padded.numel())
        dist.all_gather(list(rows), padded, group=self.side_group)
        return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, lengths, strict=True)]

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """One row of figures per rank (the same number on each), in rank order, on every rank."""
        if self.kind != "real":
            return [list(values)] * self.size
        import torch
        import torch.distributed as dist

        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        # Into a list of rows: the one-tensor form was renamed between torch 2.9 and 2.13.
        rows = own.new_empty(self.size, own.numel())
        dist.all_gather(list(rows), own, group=self.side_group)
        return rows.tolist()

    def broadcast_text(self, text: str) -> str:
        """What rank 0 says, on every rank: one decides, nobody looks twice."""
        return self.gather_text(text if self.rank == 0 else "")[0]

    def decide(self, choose: Callable[[], str]) -> str:
        """What `choose` returns on rank 0, on every rank; what it raises there stops every rank.

        Raises:
            ShoalError: what rank 0 raised, elsewhere as a WorldError with the same words.
        """
        told, raised = "", None
        if self.rank == 0:
            try:
                told = "=" + choose()
            except ShoalError as error:
                told, raised = f"!{error}", error
        told = self.broadcast_text(told)
        if raised is not None:
            raise raised
        if told.startswith("!"):
            raise WorldError(told[1:])
        return told[1:]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Stop unless every rank states the same facts.

        Raises:
            WorldError: naming the fact that differs, with the value and the ranks of each side.
        """
        told = [json.loads(row) for row in self.gather_text(json.dumps(facts, default=str))]
        for name in facts:
            sides: dict[str, list[int]] = {}
            for rank, row in enumerate(told):
                sides.setdefault(str(row.get(name)), []).append(rank)
            if len(sides) > 1:
                shown = "; ".join(f"ranks {span(ranks)}: {value[:300]}" for value, ranks in sides.items())
                raise WorldError(f"the ranks do not agree on {name} ({shown}).")

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.kind == "real":
            self.gather_text("")

    def read(self, values: "torch.Tensor") -> list[float] | None:
        """The one place where a step's figures reach the host; a fake run has none to read."""
        return None if self.kind == "fake" else values.tolist()


def _device(name: str | None, place: Place) -> "torch.device":
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise WorldError(
            f"local rank {place.local_rank} needs device cuda:{place.local_rank}, but this host shows {count} "
            f"(CUDA_VISIBLE_DEVICES is {visible}). Start at most {count} ranks here, or add --device cpu."
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def _process_group(world: World, backend: str | None, timeout_min: float) -> Iterator[World]:
    import torch.distributed as dist

    if dist.is_initialized():
        raise WorldError("a process group is open in this process already; close it before World.open().")
    backend = "fake" if world.kind == "fake" else backend or ("nccl" if world.device.type == "cuda" else "gloo")
    _check_backend(backend)
    timeout = datetime.timedelta(minutes=timeout_min)
    store = fake_store() if world.kind == "fake" else roll_call(world.place)
    with loopback(world.place, backend):
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
        try:
            if dist.get_world_size() != world.size:
                raise WorldError(f"asked for {world.size} processes, but {dist.get_world_size()} met.")
            side_group = dist.new_group(timeout=timeout) if world.kind == "real" else None
            yield replace(world, backend=backend, group=dist.group.WORLD, side_group=side_group)
        finally:
            dist.destroy_process_group()


def _check_backend(backend: str) -> None:
    import torch.distributed as dist

    known = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "fake": lambda: True,
    }
    if backend not in known:
        raise WorldError(f"unknown backend {backend!r}; known: gloo (CPU), nccl (CUDA), mpi.")
    if not known[backend]():
        hint = {
            "mpi": "torch must be built from source with MPI for it. Under mpirun, gloo works: leave --backend out.",
            "nccl": "this torch has no CUDA. On CPU: --device cpu.",
        }.get(backend, "it is missing in this build of torch.")
        raise WorldError(f"backend {backend} is not in this torch: {hint}")
