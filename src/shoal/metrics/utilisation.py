"""How busy the device was: NVML's figure on a GPU, CPU time over wall time x threads on a CPU.

Busy is not useful: a kernel that waits for another rank counts as busy. MFU says what the time was worth.
"""

import multiprocessing
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Meter(Protocol):
    def read(self) -> float | None:
        """Share of 1 since the last read; None where it cannot be known."""


def open_meter(device: "torch.device", num_threads: int) -> Meter:
    """The meter of one rank's device; `num_threads` are the CPU threads it may use."""
    return GpuMeter(device) if device.type == "cuda" else CpuMeter(num_threads)


class CpuMeter:
    """CPU time of this process and its data workers, over wall time x threads.

    Above 1 when workers keep more cores busy than the rank has threads.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        now: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] | None = None,
    ) -> None:
        self._num_threads, self._now, self._cpu_s = num_threads, now, cpu_s or family_cpu_s
        self._last = self._now(), self._cpu_s()

    def read(self) -> float | None:
        wall, cpu = self._now(), self._cpu_s()
        last_wall, last_cpu = self._last
        self._last = wall, cpu
        if wall <= last_wall:
            return None
        return max(0.0, cpu - last_cpu) / ((wall - last_wall) * self._num_threads)


class GpuMeter:
    """NVML's share of time in which a kernel ran; None without the `pynvml` package or the right to ask."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._refusals = _refusals()

    def read(self) -> float | None:
        import torch

        try:
            return torch.cuda.utilization(self._device) / 100
        except self._refusals:
            return None


def _refusals() -> tuple[type[Exception], ...]:
    """What a driver answers that cannot tell; a slice of a GPU (MIG), for one, has no utilisation."""
    try:
        from pynvml import NVMLError
    except ImportError:
        return ImportError, RuntimeError
    return ImportError, RuntimeError, NVMLError


def family_cpu_s() -> float:
    """CPU seconds that this process, its ended children and its living data workers have used so far."""
    import psutil

    own = psutil.Process().cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    for worker in multiprocessing.active_children():
        try:
            times = psutil.Process(worker.pid).cpu_times()
        except psutil.Error:
            continue  # it ended just now
        total += times.user + times.system
    return float(total)
