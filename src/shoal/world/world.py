"""The live processes, open: lone, real or fake."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import LayoutError, ShoalError, WorldError
from shoal.layout import Layout, check_world
from shoal.mesh import Mesh
from shoal.record import Record
from shoal.world.desync import watched
from shoal.world.device import find_device, keep_freed_memory
from shoal.world.group import Limits, Opened, open_group
from shoal.world.messages import Noted
from shoal.world.network import network_id
from shoal.world.place import Place
from shoal.world.roll import span

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

_LENGTH_BYTES, _FRAME_BYTES = 8, 504


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run, open. Collectives of set-up live here; those of the step live in `parallel`."""

    kind: Literal["lone", "real", "fake"]
    layout: Layout
    mesh: Mesh
    place: Place
    device: "torch.device"
    opened: Opened = field(default_factory=Opened)
    record: Record = field(default_factory=Record, repr=False, compare=False)  # of what this process does
    calls: Noted | None = field(default=None, repr=False, compare=False)  # its collectives; None where it is alone

    @property
    def backend(self) -> str | None:
        """gloo, nccl, mpi, fake; None when lone."""
        return self.opened.backend

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """Every rank; None when lone."""
        return self.opened.group

    @property
    def side_group(self) -> "dist.ProcessGroup | None":
        """Every rank, for small sums, so that they never queue behind gradients; None unless real."""
        return self.opened.side_group

    def axis_group(self, *axes: str, side: bool = False) -> "dist.ProcessGroup | None":
        """The ranks that differ from this one on these axes alone; None where it is the only one.

        Collective when first asked for. `side`: for small sums, so that they never queue behind large ones.
        """
        ranks = self.mesh.group(self.rank, axes)
        if self.kind == "lone" or len(ranks) == 1:
            return None
        if len(ranks) == self.size:
            return self.side_group if side else self.group
        return self.opened.subgroup(ranks, side=side)

    @property
    def data_group(self) -> "dist.ProcessGroup | None":
        """The ranks with the other slices of the global batch, over dp x fsdp; None where there is one slice."""
        return self.axis_group("dp", "fsdp")

    @property
    def data_side_group(self) -> "dist.ProcessGroup | None":
        """The same ranks, for small sums; None in a world that computes nothing."""
        return self.axis_group("dp", "fsdp", side=True) if self.kind == "real" else None

    def device_mesh(self, *axes: str) -> "DeviceMesh":
        """torch's own mesh of these axes, outermost first, around this rank."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        from shoal.dry import numbers

        groups = [self.opened.subgroup(self.mesh.group(self.rank, axis)) for axis in axes]
        with numbers():
            ranks = torch.tensor(self.mesh.group(self.rank, axes)).view([self.mesh.sizes[axis] for axis in axes])
            return DeviceMesh.from_group(
                groups if len(axes) > 1 else groups[0], self.device.type, mesh=ranks, mesh_dim_names=axes
            )

    def at_close(self, release: Callable[[], None]) -> None:
        """Call it before the groups go: whoever holds one lets go of it."""
        self.opened.releases.append(release)

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
        setup_min: float = 60.0,
        rendezvous_s: float = 60.0,
    ) -> "Iterator[World]":
        """Open the world that a layout asks for, and close it whatever happens.

        Args:
            place: where this process stands; by default what its launcher says.
            kind: `fake` builds any size in this one process and computes nothing; else by the size.
            device: `cpu`, `cuda`; by default cuda where there is one.
            backend: gloo, nccl, mpi; by default the device's.
            timeout_min: minutes that a collective of the training may take.
            setup_min: minutes that ranks wait for each other while they set up, when one may prepare data.
            rendezvous_s: seconds that the processes may take to find each other.

        Raises:
            LayoutError: the layout does not fill the world that exists.
            WorldError: the processes do not find each other, a rank is there twice, no such device or backend.
        """
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        limits = Limits.of(timeout_min=timeout_min, setup_min=setup_min, rendezvous_s=rendezvous_s)
        if kind == "fake":
            size = layout.num_ranks
            place = place or Place(size=size, local_size=size, source="flags")
        place = place or Place.find()
        try:
            check_world(layout, place.size)
        except LayoutError as error:
            if place.source != "lone":
                raise
            start = f"shoal launch --nproc-per-node {layout.num_ranks} script.py"
            raise LayoutError(f"{error}\nA script of your own is started by: {start}") from None
        kind = _kind(kind, place)
        world = World(
            kind=kind,
            layout=layout,
            mesh=Mesh.of(layout, ranks_per_node=place.local_size),
            place=place,
            device=find_device("cpu" if kind == "fake" else device, place),
            record=Record(place.record),
        )
        world.record.stand(world.mesh.coordinate(place.rank, "pp"))
        if world.device.type == "cpu":
            keep_freed_memory()
        if kind == "lone":
            try:
                yield world
            finally:
                world.opened.close()
            return
        backend = "fake" if kind == "fake" else backend
        with (
            open_group(place, world.device, backend=backend, limits=limits) as opened,
            watched(replace(world, opened=opened)) as watched_world,
        ):
            yield watched_world

    # -- collectives of set-up: text over tensors, never a pickle ------------------------------------------

    def gather_text(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order, on every rank.

        Raises:
            WorldError: naming the ranks that did not come within `setup_min`.
        """
        if self.kind != "real":
            return [text] * self.size
        told = text.encode("utf-8", "surrogatepass")  # a path may hold what is no text
        # Its length and its beginning, which is all of most texts: one collective; what is left over, another.
        framed = len(told).to_bytes(_LENGTH_BYTES, "little") + told[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0")
        rows = [row.numpy().tobytes() for row in self.opened.all_gather(_bytes(framed))]
        lengths = [int.from_bytes(row[:_LENGTH_BYTES], "little") for row in rows]
        texts = [row[_LENGTH_BYTES:] for row in rows]
        longest = max(lengths)
        if longest > _FRAME_BYTES:
            rest = self.opened.all_gather(_bytes(told[_FRAME_BYTES:].ljust(longest - _FRAME_BYTES, b"\0")))
            texts = [begin + row.numpy().tobytes() for begin, row in zip(texts, rest, strict=True)]
        return [text[:n].decode("utf-8", "surrogatepass") for text, n in zip(texts, lengths, strict=True)]

    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host by its name, in their order, on every rank; hosts of one name are numbered."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.gather_text(network_id())):
            found.setdefault(host, []).append(rank)
        names = [host.partition(" ")[0] for host in found]
        before = [names[:at].count(name) for at, name in enumerate(names)]
        told = [f"{name} ({number + 1})" if number else name for name, number in zip(names, before, strict=True)]
        return dict(zip(told, found.values(), strict=True))

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """The figures of every rank (as many on each), in rank order, on every rank, in one collective."""
        if self.kind != "real":
            return [list(values)] * self.size
        import torch
        import torch.distributed as dist

        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = own.new_empty(self.size, own.numel())
        dist.all_gather(list(rows), own, group=self.side_group)
        return rows.tolist()

    def broadcast_text(self, text: str) -> str:
        """What rank 0 says, on every rank: one decides, nobody looks twice."""
        return self.gather_text(text if self.rank == 0 else "")[0]

    def decide(self, choose: Callable[[], str]) -> str:
        """What `choose` returns on rank 0, on every rank; what it raises there stops every rank.

        Raises:
            Exception: on rank 0 what `choose` raised; elsewhere a WorldError with the same words.
        """
        told = ""
        raised: Exception | None = None
        if self.rank == 0:
            try:
                told = "=" + choose()
            except ShoalError as error:
                told, raised = f"!{error}", error
            except Exception as error:  # raised again below, once the others are told
                told, raised = f"!rank 0 failed: {type(error).__name__}: {error}", error
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
        for name in {name: None for row in told for name in row}:
            sides: dict[str, list[int]] = {}
            for rank, row in enumerate(told):
                value = json.dumps(row[name], ensure_ascii=False, sort_keys=True) if name in row else "not stated"
                sides.setdefault(value, []).append(rank)
            if len(sides) > 1:
                shown = "; ".join(f"{_ranks(ranks)}: {value[:300]}" for value, ranks in sides.items())
                raise WorldError(f"the ranks do not agree on {name} ({shown}).")

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.kind == "real":
            self.gather_text("")

    def read(self, values: "torch.Tensor") -> list[float] | None:
        """The one place where a step's figures reach the host; a fake run has none to read."""
        return None if self.kind == "fake" else values.tolist()


def _bytes(text: bytes) -> "torch.Tensor":
    import torch

    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _kind(kind: Literal["lone", "real", "fake"] | None, place: Place) -> Literal["lone", "real", "fake"]:
    if kind == "lone" and place.size > 1:
        raise WorldError(f"a lone world is one process, and this is rank {place.rank} of {place.size}. Leave out kind.")
    return kind or ("lone" if place.size == 1 else "real")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {span(ranks)}"
