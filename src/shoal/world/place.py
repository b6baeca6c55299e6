"""Where one process stands, as told by whoever started it: torchrun, Slurm, Open MPI, MPICH, shoal, or nobody."""

import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import WorldError

HOST_VARIABLE = "SHOAL_HOST"  # the name by which whoever started this process knows its host
_SPECIAL_STEP = 0xFFFFFFF0  # Slurm's names for the batch script, the interactive shell, ...: not steps of srun


def environment(prefix: str) -> dict[str, str]:
    """The variables that start with a prefix (`SHOAL_`), for the precedence of settings."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def host_names() -> tuple[str, ...]:
    """What this host is called: by `--hosts` (or SHOAL_HOST), by itself, and that up to the first dot."""
    own = socket.gethostname()
    return tuple(dict.fromkeys(name for name in (os.environ.get(HOST_VARIABLE), own, own.partition(".")[0]) if name))


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
    record: str = ""  # the file in which it notes what it does, where its launcher reads one (`shoal.record`)
    generation: int = 0  # starts of the group before this one: above 0 it goes on from what they left
    memory: str = ""  # a folder in shared memory, the launcher's, for copies of the state that outlive this process
    folder: str = ""  # the run's, where the launcher says it
    fence: int = 0  # the number that this start has claimed in the run's folder; 0: none was claimed for it

    def __post_init__(self) -> None:
        stands = f"rank {self.rank} of {self.size} (local rank {self.local_rank} of {self.local_size}"
        if not 0 <= self.rank < self.size or not 0 <= self.local_rank < self.local_size:
            raise WorldError(
                f"{stands}, from {self.source}): ranks count from 0 to size - 1. Either the world size is too small, "
                "or more processes were started than it says."
            )
        if self.local_size > self.size:
            raise WorldError(f"{stands}, from {self.source}): a node cannot hold more ranks than the world.")

    @staticmethod
    def find(env: Mapping[str, str] | None = None) -> "Place":
        """What the launcher that started this process says: torchrun, Slurm (srun), Open MPI, MPICH, or nobody.

        Where launchers are nested, the innermost started this process: torchrun within mpirun within srun.

        Raises:
            WorldError: half of a launcher's variables, or two launchers that contradict each other.
        """
        env = os.environ if env is None else env
        torchrun = _torchrun(env)
        if torchrun is not None and "TORCHELASTIC_RUN_ID" in env:
            return torchrun
        by_mpirun = "OMPI_COMM_WORLD_RANK" in env or "MPI_LOCALRANKID" in env
        slurm = None if by_mpirun else _slurm(env)  # mpirun starts its ranks from a daemon that is a step of Slurm
        mpi = None if slurm is not None else _mpi(env)  # srun speaks PMI too, and its own variables say more
        found = [place for place in (torchrun, slurm, mpi) if place is not None]
        if len({(place.rank, place.size) for place in found}) > 1:
            told = "; ".join(f"{p.source}: rank {p.rank} of {p.size}" for p in found)
            raise WorldError(
                f"two launchers contradict each other ({told}). Unset the variables of the one that did not "
                "start this process."
            )
        if not found and "LOCAL_RANK" in env:
            raise WorldError(
                "LOCAL_RANK is set but RANK and WORLD_SIZE are not: every process would believe that it is alone. "
                "Start with torchrun, or set all three."
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
    size, rank = _int(env, "WORLD_SIZE"), _int(env, "RANK")
    local_size = max(1, _int(env, "LOCAL_WORLD_SIZE", size))
    return Place(
        rank=rank,
        size=size,
        local_rank=_int(env, "LOCAL_RANK", rank % local_size),
        local_size=local_size,
        node=_int(env, "GROUP_RANK", rank // local_size),
        num_nodes=_int(env, "GROUP_WORLD_SIZE", -(-size // local_size)),
        source="torchrun",
    )


def _slurm(env: Mapping[str, str]) -> Place | None:
    # Without a step (an `salloc` shell, an sbatch script) SLURM_PROCID is 0 everywhere and says nothing of us.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env or _int(env, "SLURM_STEP_ID") >= _SPECIAL_STEP:
        return None
    size = _int(env, "SLURM_STEP_NUM_TASKS", _int(env, "SLURM_NTASKS", 1))
    if size == 1:
        return None
    num_nodes = _int(env, "SLURM_STEP_NUM_NODES", _int(env, "SLURM_NNODES", 1))
    node = _int(env, "SLURM_NODEID", 0)
    rank = _int(env, "SLURM_PROCID")
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    local_size = _tasks_on(tasks, node) or max(1, size // num_nodes)
    first_host = _first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "")
    # Slurm gives the first ranks to the first host of the list. One node needs no name for itself.
    host = env.get("MASTER_ADDR") or (first_host if num_nodes > 1 else "127.0.0.1")
    job = f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    return Place(
        rank=rank,
        size=size,
        local_rank=_int(env, "SLURM_LOCALID", rank % local_size),
        local_size=local_size,
        node=node,
        num_nodes=num_nodes,
        rendezvous=f"tcp://{host}:{env.get('MASTER_PORT') or _port_of(job)}",
        source="slurm",
    )


# Rank, size, rank on the node, ranks on the node.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _mpi(env: Mapping[str, str]) -> Place | None:
    names = next((names for names in (_OPEN_MPI, _MPICH) if names[0] in env), None)
    if names is None:
        return None
    if names[1] not in env:
        raise WorldError(f"{names[0]} is set but {names[1]} is not: start with mpirun, or unset what is left of it.")
    rank, size = _int(env, names[0]), _int(env, names[1])
    local_size = max(1, _int(env, names[3], size))
    num_nodes = -(-size // local_size)
    if num_nodes > 1 and "MASTER_ADDR" not in env:
        raise WorldError(
            f"MPI started {size} processes on {num_nodes} nodes, but nobody said where they meet. Pass it on: "
            "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ... "
            "(MPICH: mpiexec -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500 ...)"
        )
    return Place(
        rank=rank,
        size=size,
        local_rank=_int(env, names[2], rank % local_size),
        local_size=local_size,
        node=rank // local_size,
        num_nodes=num_nodes,
        rendezvous="env://" if "MASTER_ADDR" in env else _file_of_launcher(names[0]),
        source="mpi",
    )


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise WorldError(f"{name}={text!r} is not a whole number; the launcher that started this process sets it.")
    return int(text)


def _tasks_on(counts: str, node: int) -> int | None:
    """Slurm's `4(x2),1` for nodes of 4, 4 and 1 tasks; None where it does not say."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    return None


def _first_host(nodes: str) -> str:
    """`gpu[03-05,9],cpu1` -> `gpu03`, `rack[1-2]n[7,8]x` -> `rack1n7x`."""
    first = re.match(r"(?:\[[^]]*\]|[^,\[])*", nodes)
    assert first is not None  # it matches the empty string
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first.group())


def _port_of(job: str) -> int:
    """The same on every rank, another for every job step, below the ports that systems hand out."""
    return 20000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % 12000


def _file_of_launcher(rank_variable: str) -> str:
    """A meeting file that the ranks of one mpirun on one host share and no other run can: its pid and start time."""
    import psutil

    launcher = psutil.Process(os.getppid())
    for process in psutil.Process().parents():
        launcher = process
        try:
            # Between the launcher and us may stand a shell script: a rank too, by its environment.
            if rank_variable not in process.environ():
                break
        except psutil.Error:  # not ours to look at, so not started by us
            break
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    return f"file://{folder / f'shoal-{os.getuid()}-{launcher.pid}-{launcher.create_time():.0f}'}"
