"""Peak memory of this process, GiB: the device's allocator on a GPU, resident memory on a CPU."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30


def peak_memory_gib(device: "torch.device") -> float:
    """The most memory in use at once so far: tensors on a GPU, everything resident on a CPU (GiB)."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / GIB
    return peak_resident_bytes() / GIB


def peak_resident_bytes() -> int:
    """The most host memory that this process ever held (bytes)."""
    status = Path("/proc/self/status")
    # getrusage() carries the peak of the parent across exec(); the kernel's own high-water mark does not.
    if status.exists() and (peak := high_water_bytes(status.read_text(encoding="utf-8"))):
        return peak
    return _rusage_bytes()


def high_water_bytes(status: str) -> int | None:
    """`VmHWM` of a Linux process status; None where the kernel does not tell."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _rusage_bytes() -> int:
    import resource  # not on Windows, which has no process group of torch's to train with either

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rusage_unit_bytes(sys.platform) * peak


def rusage_unit_bytes(platform: str) -> int:
    """`ru_maxrss` is in bytes on macOS and in KiB elsewhere."""
    return 1 if platform == "darwin" else 1024
