"""What this machine grants to a run: cores, and its memory killer's count."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
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
    return Path("/dev/kfd").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


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
