"""Opens the live processes: lone, real or fake. The only reader of the environment."""

import contextlib
import datetime
import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlparse

from shoal.errors import WorldError
from shoal.layout import Layout
from shoal.mesh import Mesh

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

ROLL_CALL_S = 60.0  # how long the processes of a world may take to find each other


def environment(prefix: str) -> dict[str, str]:
    """The variables that start with a prefix (`SHOAL_`), for the precedence of settings."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def is_terminal() -> bool:
    """Whether a person watches the standard output."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one process stands: its rank in the world and on its node, and where the world meets."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    rendezvous: str = "env://"  # env:// | tcp://host:port | file:///path
    source: str = "lone"  # lone | torchrun | slurm | mpi | shoal | flags

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or not 0 <= self.local_rank < self.local_size:
            raise WorldError(
                f"rank {self.rank} of {self.size} (local {self.local_rank} of {self.local_size}, from "
                f"{self.source}): ranks count from 0 to size - 1."
            )

    @staticmethod
    def find(env: Mapping[str, str] | None = None) -> "Place":
        """What the launcher that started this process says: torchrun, Slurm (srun), Open MPI, MPICH, or nobody.

        Raises:
            WorldError: half of a launcher's variables, or two launchers that contradict each other.
        """
        env = os.environ if env is None else env
        found = [place for read in (_torchrun, _slurm, _mpi) if (place := read(env)) is not None]
        if "TORCHELASTIC_RUN_ID" in env:
            found = found[:1]  # torchrun inside srun or mpirun: the launcher that started us wins
        if len({(place.rank, place.size) for place in found}) > 1:
            told = "; ".join(f"{p.source}: rank {p.rank} of {p.size}" for p in found)
            raise WorldError(
                f"two launchers contradict each other ({told}). Unset the variables of the one that did not "
                "start this process."
            )
        return found[0] if found else Place()


def _torchrun(env: Mapping[str, str]) -> Place | None:
    needed = ("RANK", "WORLD_SIZE")
    given = [name for name in needed if name in env]
    if not given:
        return None
    if len(given) == 1:
        (missing,) = set(needed) - set(given)
        raise WorldError(
            f"{given[0]} is set but {missing} is not: every process would believe that it is alone. Start with "
            "torchrun, or set both (and LOCAL_RANK, MASTER_ADDR, MASTER_PORT)."
        )
    size = _int(env, "WORLD_SIZE")
    local_size = _int(env, "LOCAL_WORLD_SIZE", size)
    rank = _int(env, "RANK")
    return Place(
        rank=rank,
        size=size,
        local_rank=_int(env, "LOCAL_RANK", rank % local_size),
        local_size=local_size,
        node=_int(env, "GROUP_RANK", rank // local_size),
        num_nodes=-(-size // local_size),
        source="torchrun",
    )


def _slurm(env: Mapping[str, str]) -> Place | None:
    # Without a step (an `salloc` shell, an sbatch script) SLURM_PROCID is 0 everywhere and says nothing of us.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return None
    size = _int(env, "SLURM_STEP_NUM_TASKS", _int(env, "SLURM_NTASKS", 1))
    if size == 1:
        return None
    num_nodes = _int(env, "SLURM_STEP_NUM_NODES", _int(env, "SLURM_NNODES", 1))
    local_size = _int(env, "SLURM_STEP_TASKS_PER_NODE", size // num_nodes)
    host = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    job = f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    return Place(
        rank=_int(env, "SLURM_PROCID"),
        size=size,
        local_rank=_int(env, "SLURM_LOCALID"),
        local_size=max(local_size, _int(env, "SLURM_LOCALID") + 1),
        node=_int(env, "SLURM_NODEID", 0),
        num_nodes=num_nodes,
        rendezvous=f"tcp://{host}:{env.get('MASTER_PORT') or _port_of(job)}",
        source="slurm",
    )


def _mpi(env: Mapping[str, str]) -> Place | None:
    names = {
        "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "PMI_RANK": ("PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    }
    for rank_name, (size_name, local_rank_name, local_size_name) in names.items():
        # srun exports PMI_RANK too: Slurm's own variables say more.
        if rank_name not in env or size_name not in env or ("SLURM_STEP_ID" in env and rank_name == "PMI_RANK"):
            continue
        rank, size = _int(env, rank_name), _int(env, size_name)
        local_size = _int(env, local_size_name, size)
        num_nodes = -(-size // local_size)
        if num_nodes > 1 and "MASTER_ADDR" not in env:
            raise WorldError(
                f"MPI started {size} processes on {num_nodes} nodes, but nobody said where they meet. Pass it on: "
                "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
            )
        return Place(
            rank=rank,
            size=size,
            local_rank=_int(env, local_rank_name, rank % local_size),
            local_size=local_size,
            node=rank // local_size,
            num_nodes=num_nodes,
            rendezvous="env://" if "MASTER_ADDR" in env else _file_of_parent(),
            source="mpi",
        )
    return None


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    # Slurm writes `4(x2)` for two nodes of four.
    head = (text or "").partition("(")[0].partition(",")[0]
    if not head.isdecimal():
        raise WorldError(f"{name}={text!r} is not a whole number; the launcher that started this process sets it.")
    return int(head)


def _first_host(nodes: str) -> str:
    """`gpu[03-05,9],cpu1` -> `gpu03`."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    return head + rest.replace("-", ",").replace("]", ",").partition(",")[0]


def _port_of(job: str) -> int:
    return 20000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % 20000


def _file_of_parent() -> str:
    """A meeting file that the ranks of one mpirun on one host share and no other run can: its pid and start time."""
    import psutil

    parent = psutil.Process(os.getppid())
    name = f"shoal-{os.getuid()}-{parent.pid}-{parent.create_time():.0f}"
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    return f"file://{folder / name}"


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
        layout.check_world(place.size)
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
        lengths = torch.empty(self.size, dtype=torch.int64, device=self.device)
        dist.all_gather_into_tensor(lengths, torch.tensor([data.numel()], device=self.device))
        width = int(lengths.max())
        padded = torch.zeros(width, dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        rows = torch.empty(self.size * width, dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(rows, padded)
        return [
            bytes(row[:n].tolist()).decode() for row, n in zip(rows.view(self.size, width), lengths.tolist(), strict=True)
        ]

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """One row of figures per rank (the same number on each), in rank order, on every rank."""
        if self.kind != "real":
            return [list(values)] * self.size
        import torch
        import torch.distributed as dist

        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = torch.empty(self.size * len(values), dtype=torch.float64, device=self.device)
        dist.all_gather_into_tensor(rows, own, group=self.side_group)
        return rows.view(self.size, len(values)).tolist()  # type: ignore[no-any-return]

    def broadcast_text(self, text: str) -> str:
        """What rank 0 says, on every rank: one decides, nobody looks twice."""
        return self.gather_text(text if self.rank == 0 else "")[0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Stop unless every rank states the same facts.

        Raises:
            WorldError: naming the fact that differs, with the value and the ranks of each side.
        """
        import json

        told = [json.loads(row) for row in self.gather_text(json.dumps(facts, default=str))]
        for name in facts:
            sides: dict[str, list[int]] = {}
            for rank, row in enumerate(told):
                sides.setdefault(str(row.get(name)), []).append(rank)
            if len(sides) > 1:
                shown = "; ".join(f"ranks {_span(ranks)}: {value[:300]}" for value, ranks in sides.items())
                raise WorldError(f"the ranks do not agree on {name} ({shown}).")

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.kind == "real":
            self.gather_text("")

    def read(self, values: "torch.Tensor") -> list[float] | None:
        """The one place where a step's figures reach the host; a fake run has none to read."""
        return None if self.kind == "fake" else values.tolist()


def _span(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


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
    store = _fake_store() if world.kind == "fake" else _roll_call(world.place)
    with _loopback(world.place, backend):
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )
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


def _fake_store() -> "dist.Store":
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@contextlib.contextmanager
def _loopback(place: Place, backend: str) -> Iterator[None]:
    """On one host gloo listens on loopback only; a name that resolves oddly cannot hurt, nor can a stranger."""
    name = "GLOO_SOCKET_IFNAME"
    if backend != "gloo" or place.num_nodes > 1 or name in os.environ:
        yield
        return
    os.environ[name] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ[name]


def _roll_call(place: Place) -> "dist.Store":
    """The store of the rendezvous, once every rank has said that it is there, each once."""
    import torch.distributed as dist

    deadline = time.monotonic() + ROLL_CALL_S
    _check_reachable(place, deadline)
    wait = datetime.timedelta(seconds=ROLL_CALL_S)
    try:
        store, _, _ = next(dist.rendezvous(place.rendezvous, rank=place.rank, world_size=place.size, timeout=wait))
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise WorldError(f"rank {place.rank} of {place.size} cannot meet the others at {_meeting(place)}: {first}") from error
    # A restart by an elastic agent keeps its store: each try calls its own roll.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"shoal/{attempt}", store)
    me = f"{socket.gethostname()}:{os.getpid()}"
    if store.add(f"count/{place.rank}", 1) > 1:
        other = store.get(f"who/{place.rank}").decode()
        raise WorldError(
            f"rank {place.rank} is there twice: {other} and {me}. Either two processes were started with the same "
            f"rank, or {_meeting(place)} is left over from another run: choose another port or file."
        )
    store.set(f"who/{place.rank}", me)
    _wait_for_all(store, place, deadline)
    return store


def _wait_for_all(store: "dist.Store", place: Place, deadline: float) -> None:
    missing = list(range(place.size))
    while missing:
        missing = [rank for rank in missing if not store.check([f"who/{rank}"])]
        if missing and time.monotonic() > deadline:
            here = [r for r in range(place.size) if r not in missing]
            raise WorldError(
                f"{len(missing)} of {place.size} ranks did not come to {_meeting(place)} within {ROLL_CALL_S:.0f} s. "
                f"Missing: {_span(missing)}. Present: {_span(here)}. Start as many processes as the world says."
            )
        if missing:
            time.sleep(0.005)


def _meeting(place: Place) -> str:
    if place.rendezvous != "env://":
        return place.rendezvous
    return f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"


def _check_reachable(place: Place, deadline: float) -> None:
    """Name an address that cannot work within seconds; torch would print a C++ stack after minutes."""
    if place.rendezvous.startswith("file://"):
        return
    if place.rendezvous == "env://":
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    else:
        url = urlparse(place.rendezvous)
        host, port = url.hostname, str(url.port or "")
    if not host or not port:
        raise WorldError(f"no address to meet at: {_meeting(place)}. Set MASTER_ADDR and MASTER_PORT.")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise WorldError(f"cannot resolve {host!r} ({_meeting(place)}): {error}.") from None
    if place.rank == 0:
        return
    why: Exception | None = None
    while time.monotonic() < deadline:
        for family, kind, proto, _, address in addresses:
            with socket.socket(family, kind, proto) as probe:
                probe.settimeout(5)
                try:
                    probe.connect(address)
                    return
                except ConnectionRefusedError as error:
                    why = error  # rank 0 may not listen yet
                except OSError as error:
                    raise WorldError(f"cannot reach {host}:{port} from this host ({_meeting(place)}): {error}.") from None
        time.sleep(0.05)
    raise WorldError(f"nobody listens at {host}:{port} after {ROLL_CALL_S:.0f} s ({_meeting(place)}): {why}.")
