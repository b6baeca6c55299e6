"""What this machine grants to a run: cores, and its memory killer's count."""

import os
from pathlib import Path

from shoal.errors import LaunchError

_CGROUP = Path("/sys/fs/cgroup")
_DEVICES = Path("/dev")
_MOST_RANKS, _MOST_PER_CORE = 64, 4


def num_cores() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    quota, _, period = _read(_own_cgroup() / "cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def most_ranks() -> int:
    """How many processes start here: more is a slip of the finger."""
    return max(_MOST_RANKS, _MOST_PER_CORE * num_cores())


def default_threads(num_ranks: int) -> int:
    """OMP_NUM_THREADS where a person has set it, else an equal share of the cores."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    return max(1, num_cores() // num_ranks)


def num_memory_kills() -> int:
    """How often the kernel's memory killer has struck: in this control group, or else on this machine."""
    for path in (_own_cgroup() / "memory.events", Path("/proc/vmstat")):
        for line in _read(path).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal() and int(count):
                return int(count)
    return 0


def has_accelerator() -> bool:
    """Whether this process sees a GPU, asked without loading a driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return (_DEVICES / "kfd").exists() or any(_DEVICES.glob("nvidia[0-9]*"))


def num_accelerators() -> int:
    """How many NVIDIA GPUs this process sees: those of CUDA_VISIBLE_DEVICES, up to a -1, or all of this machine."""
    there = len(list(_DEVICES.glob("nvidia[0-9]*")))
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None or not there:
        return there
    shown = [name.strip() for name in told.split(",") if name.strip()]
    return shown.index("-1") if "-1" in shown else len(shown)


def num_processes(told: str) -> int:
    """torchrun's --nproc-per-node: a number, `gpu`, `cpu`, or `auto`: the GPUs where there are any, else the cores.

    Raises:
        LaunchError: it is none of these, or there is no GPU.
    """
    if told.isdecimal() and int(told):
        return int(told)
    num_gpus = num_accelerators() if told in ("gpu", "auto") else 0
    if told == "gpu" and not num_gpus:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if seen is None else f" (CUDA_VISIBLE_DEVICES is {seen!r})"
        raise LaunchError(f"--nproc-per-node gpu: no GPU is seen on this machine{why}. Say cpu, or a number.")
    if told in ("gpu", "cpu", "auto"):
        return num_gpus or num_cores()
    raise LaunchError(
        f"--nproc-per-node is {told!r}; it must be a number from 1 on, or gpu, cpu or auto. Hosts with different "
        "numbers: --hosts a:2,b:1, or on each machine its own."
    )


def _own_cgroup() -> Path:
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            own = _CGROUP / line[3:].lstrip("/")
            return own if own.is_dir() else _CGROUP  # a container sees its own group as the root
    return _CGROUP


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # another kernel, or not ours to read: then there is nothing to say
