"""Where one process stands, as told by whoever started it: torchrun, Slurm, Open MPI, MPICH, shoal, or nobody."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import WorldError


def environment(prefix: str) -> dict[str, str]:
    """The variables that start with a prefix (`SHOAL_`), for the precedence of settings."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def before_torch() -> None:
    """Two settings that torch reads when it is imported, where the user has not set them.

    The reducer warns that looking for unused parameters costs time: it is asked to, on purpose, on every run.
    OpenMP threads that spin while they wait make a step 10 times slower as soon as anything else runs (measured).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


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
        "OMPI_COMM_WORLD_RANK": (
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
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
