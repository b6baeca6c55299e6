"""Which device a process computes on."""

import ctypes
import os
import sys
from typing import TYPE_CHECKING

from shoal.errors import WorldError, nearest
from shoal.world.place import Place

if TYPE_CHECKING:
    import torch

_KNOWN = ("cpu", "cuda")


def find_device(name: str | None, place: Place) -> "torch.device":
    """The device of a rank: by its rank on the node, among those that CUDA_VISIBLE_DEVICES shows.

    Raises:
        WorldError: no such device here, or fewer than ranks.
    """
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in _KNOWN or (index and not index.isdecimal()):
        raise WorldError(f"there is no device {name!r}.{nearest(kind, _KNOWN)}")
    if kind == "cpu":
        return torch.device("cpu")
    if index and place.local_size > 1:
        raise WorldError(f"device {name} for {place.local_size} ranks of this node: say cuda, and each takes its own.")
    number = int(index) if index else place.local_rank
    _check_cuda(number, place)
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _check_cuda(number: int, place: Place) -> None:
    import torch

    visible = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
    if not torch.cuda.is_available():
        raise WorldError(f"this torch ({torch.__version__}) sees no CUDA device here ({visible}). Add --device cpu.")
    count = torch.cuda.device_count()
    if number >= count:
        raise WorldError(
            f"local rank {place.local_rank} needs device cuda:{number}, but this host shows {count} ({visible}). Start "
            f"at most {count} ranks here, or add --device cpu. On several hosts each process needs its LOCAL_RANK."
        )


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees, since the next step asks for the same again (CPU tensors, Linux).

    By default it hands large blocks back to the kernel, which has to zero them anew: up to 90,000 page faults per
    step of a small GPT, 5 to 10 % of its time (measured). The peak of the memory stays what it was.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):  # not in musl
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
