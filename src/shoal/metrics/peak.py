"""The peak that MFU divides by: a vendor's dense figure on a GPU, measured on a CPU, never a guess."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.units import show_count

if TYPE_CHECKING:
    import torch

PROBE_S = 0.25
_LARGEST = 2048  # larger than the caches that matter, small enough not to be the peak of the memory


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device in `dtype` (fp32, bf16, ...), and where the figure comes from."""

    flops: float
    dtype: str
    source: str

    def __str__(self) -> str:
        return f"{show_count(self.flops)}FLOP/s {self.dtype} ({self.source})"


def device_peak(device: "torch.device", precision: str) -> Peak | None:
    """The dense peak of one device in the precision of the compute (fp64, fp32, bf16, fp16); None if unknown.

    On a CPU it is measured, with the threads of this process, in about 0.3 s; call it once per run, outside
    of anything that counts or times.
    """
    if device.type == "cuda":
        return _listed(device, precision)
    if device.type == "cpu":
        return _measured(precision)
    return None


def _listed(device: "torch.device", precision: str) -> Peak | None:
    import torch

    from shoal.cluster import find_accelerator, peak_flops  # its file reader is slow to import

    name = torch.cuda.get_device_name(device)
    reduced = precision == "fp32" and torch.get_float32_matmul_precision() != "highest"
    dtype = "tf32" if reduced else precision
    accelerator = find_accelerator(name)
    flops = peak_flops(accelerator, dtype)
    if accelerator is None or flops is None:
        return None
    return Peak(flops, dtype, f"{accelerator.name}, dense, {accelerator.source}")


def _measured(precision: str) -> Peak:
    import torch

    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    flops, size = best_product(lambda size: _product(size, dtype))
    threads = torch.get_num_threads()
    plural = "s" if threads > 1 else ""
    return Peak(flops, precision, f"measured: product of {size} x {size} matrices on {threads} CPU thread{plural}")


def _product(size: int, dtype: "torch.dtype") -> Callable[[], object]:
    import torch

    # Constant matrices: random ones would move the random stream of the job.
    a, b, out = (torch.full((size, size), 0.5, dtype=dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def best_product(
    prepare: Callable[[int], Callable[[], object]],
    *,
    budget_s: float = PROBE_S,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[float, int]:
    """The best FLOP/s of square matrix products within the time budget, and their size.

    Sizes double while one product is short, so that a slow dtype on a slow core does not overrun the budget.
    """
    end = now() + budget_s
    size, best, best_size = 128, 0.0, 128
    multiply = prepare(size)
    multiply()  # the first call sets up threads and kernels
    while True:
        began = now()
        multiply()
        took = max(now() - began, 1e-9)
        if 2 * size**3 / took > best:
            best, best_size = 2 * size**3 / took, size
        if now() + took > end:
            return best, best_size
        if took < budget_s / 32 and size < _LARGEST:
            size *= 2
            multiply = prepare(size)
