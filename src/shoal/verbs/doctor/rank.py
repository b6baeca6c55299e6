"""`python -m shoal.verbs.doctor.rank SPEC`: one rank of the collective, and how fast this host multiplies.

In a process of its own: the examination goes on where torch is broken, or waits for ever.
"""

import json
import sys
import time
from typing import Any

from shoal.launch.fork import die_with
from shoal.world import Place, World, before_torch

_NUM_VALUES = 50_000  # gloo sends them in several pieces
_MATRIX, _LEAST_S, _LEAST_TIMES = 1024, 0.3, 3


def main(text: str) -> None:
    """Do what the spec asks for, and print what came out as JSON.

    Raises:
        WorldError: the ranks do not find each other.
    """
    told: dict[str, Any] = json.loads(text)
    die_with(told["parent"])
    before_torch()
    found: dict[str, Any] = {}
    if told["place"]["size"] > 1:
        found |= add_up(Place(**told["place"]), told["limit_s"])
    if told["multiplies"]:
        found["flops_per_s"] = multiply(told["cores"])
    print(json.dumps(found))


def add_up(place: Place, limit_s: float) -> dict[str, Any]:
    """An all_reduce over one rank per host; each knows the sum, and compares every value."""
    import torch
    import torch.distributed as dist

    with World.open(
        f"dp{place.size}",
        place=place,
        device="cpu",
        backend="gloo",
        timeout_min=limit_s / 60,
        setup_min=limit_s / 60,
        rendezvous_s=limit_s,
    ) as world:
        values = torch.arange(_NUM_VALUES, dtype=torch.int64) % 1009
        mine = values * (place.rank + 1)
        began = time.perf_counter()
        dist.all_reduce(mine, group=world.group)
        seconds = time.perf_counter() - began
        is_right = torch.equal(mine, values * (place.size * (place.size + 1) // 2))
    return {"is_right": is_right, "seconds": seconds}


def multiply(cores: int) -> float:
    """FLOP/s of a square float32 product on all cores of this host: the best of several."""
    import torch

    torch.set_num_threads(cores)
    a, b = torch.rand(_MATRIX, _MATRIX), torch.rand(_MATRIX, _MATRIX)
    a @ b  # warm
    times: list[float] = []
    while len(times) < _LEAST_TIMES or sum(times) < _LEAST_S:
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return float(2 * _MATRIX**3 / min(times))


if __name__ == "__main__":
    main(sys.argv[1])
