"""What bounds processes that are started here: settings of the environment, and the memory of the control group."""

import os

from shoal.launch.machine import _own_cgroup, _read  # one reader of control groups

_PARALLEL = ("OMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TP_SOCKET_")


def parallel_settings() -> dict[str, str]:
    """The variables of the environment that change how ranks compute and talk: OMP_*, CUDA_*, NCCL_*, GLOO_*, ..."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PARALLEL)}


def memory_limit_bytes() -> tuple[int, int] | None:
    """The limit of this process's control group, and what is left of it; None where there is none.

    What files fill is given back when it is needed, so it counts as left.
    """
    own_group = _own_cgroup()
    limit, used = (_read(own_group / name).strip() for name in ("memory.max", "memory.current"))
    if not limit.isdecimal() or not used.isdecimal():
        return None
    told = dict(line.split() for line in _read(own_group / "memory.stat").splitlines())
    return int(limit), int(limit) - int(used) + int(told.get("inactive_file", 0))
