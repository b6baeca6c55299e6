"""A plain distributed script, unchanged: run as `python script.py`, told by environment variables alone."""

import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError, nearest
from shoal.launch.fork import fork_quietly, leave_parent
from shoal.launch.nodes import listening
from shoal.world import Place

# What other launchers say of one process: of no use, and a lie, in the processes that are started here.
_LEFTOVERS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_ID")
_LEFTOVER_PREFIXES = (
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_",
    "MV2_COMM_WORLD_",
    "MPI_LOCAL",
    "SLURM_STEP_",
    "TORCHELASTIC_",
)
LOOPBACK = "127.0.0.1"


def leftovers(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The variables of another launcher that say which process this is."""
    return tuple(n for n in sorted(environment) if n in _LEFTOVERS or n.startswith(_LEFTOVER_PREFIXES))


def ranks_variables(place: Place) -> dict[str, str]:
    """Which process this is, in the words that libraries look for."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_WORLD_SIZE": str(place.local_size),
    }


def torchrun_variables(
    place: Place, port: int, run_id: str, address: str = LOOPBACK, *, max_restarts: int = 0
) -> dict[str, str]:
    """The environment that torchrun gives; the store is ours, so no rank opens one."""
    return ranks_variables(place) | {
        "GROUP_RANK": str(place.node),
        "NODE_RANK": str(place.node),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": "default",
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_WORLD_SIZE": str(place.size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(place.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def check_script(script: Path) -> None:
    """Refuse a script that is not there.

    Raises:
        LaunchError: no such file, with the nearest name in its folder.
    """
    if script.is_file():
        return
    if script.is_dir():
        raise LaunchError(f"{script} is a folder, not a script. A package is started with -m NAME.")
    names = [p.name for p in script.parent.glob("*.py")] if script.parent.is_dir() else []
    hint = nearest(script.name, names) if names else f" There is no script in {script.parent}."
    raise LaunchError(f"no script {script}.{hint}")


def run_as_main(place: Place, *, target: str, arguments: list[str], is_module: bool) -> None:
    """Run a script or module as `__main__`, as a process of its own would."""
    _fresh_seeds()
    _keep_groups()
    if is_module:
        sys.argv[:] = [target, *arguments]
        sys.path.insert(0, os.getcwd())
        names = runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [target, *arguments]
        sys.path.insert(0, str(Path(target).resolve().parent))
        names = runpy.run_path(target, run_name="__main__")
    # They live until the process is gone, as in one of its own: handlers and threads may still look for them.
    sys.modules["__main__"].__dict__.update(names)


def _fresh_seeds() -> None:
    # A script that seeds nothing expects its ranks to draw different numbers; forked ones would draw the same.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _keep_groups() -> None:
    """Let a destroyed process group live on, closed, until this process ends.

    A DDP model that outlives destroy_process_group(), as in most scripts with a main(), holds the group's last
    reference. Freed with it, the group waits for its own threads while they wait for the interpreter: with torch
    2.13 and gloo such scripts hang at their end in 3 of 8 runs, under torchrun as well.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None:
        return  # a fresh process: it serves GPUs, where the group is not gloo's
    destroy = dist.destroy_process_group
    kept = []

    @functools.wraps(destroy)
    def keep_and_destroy(group: object = None) -> None:
        kept.append(dist.group.WORLD if group is None else group)
        destroy(group)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = keep_and_destroy


@contextlib.contextmanager
def meeting_point(address: str = LOOPBACK) -> Iterator[int]:
    """The port of a store that answers at an address until the end, in a small process of its own.

    The socket is ours from the start, so nobody can take the port in between. In this process the store's threads
    would be there when ranks are forked, also those of another run: a rank that inherits a lock from them hangs.
    """
    with socket.create_server((listening(address), 0), backlog=1024) as listener:
        port: int = listener.getsockname()[1]
        host = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, os.getpid()))
        fork_quietly(host)
    try:
        yield port
    finally:
        host.kill()
        host.join()
        host.close()


def _serve(listener: socket.socket, parent: int) -> None:
    leave_parent(parent)
    # A terminal and a batch system signal every process, and ranks that still save need the store.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # it would report every rank that hangs up
    os.dup2(silence, 2)
    store = open_store(listener)
    while store:
        signal.pause()


def open_store(listener: socket.socket) -> Any:
    """torch's store on a socket that listens already. It is a client of its own too, and so must be able to reach it:
    one at another address of this host serves for the five minutes in which it tries, and then ends the process.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not by name

    address, port = listener.getsockname()[:2]
    reached = LOOPBACK if address in ("0.0.0.0", "::") else address
    return TCPStore(reached, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
