"""Made-up hosts that are well, for tests of `shoal doctor` that make one thing sick."""

from dataclasses import replace
from typing import Any

from shoal.verbs.doctor.facts import (
    Asked,
    Clock,
    Collective,
    Facts,
    Gpu,
    Gpus,
    HostFacts,
    Interface,
    Limits,
    Link,
    Store,
)

GIB = 2**30
LIMITS = Limits(nofile=65536, nproc=65536, memlock_bytes=None, core_bytes=0)
NO_GPUS = Gpus(num_devices=0, found=(), pids=(), error="")
H100 = Gpu(name="NVIDIA H100 80GB HBM3", driver="550.54", memory_bytes=80 * GIB, ecc_errors=0)
GPUS = Gpus(num_devices=2, found=(H100, H100), pids=(), error="")


def host(name: str, **changes: Any) -> HostFacts:
    """h1 is 10.0.0.1, h2 is 10.0.0.2."""
    others = [each for each in ("h1", "h2") if each != name]
    well = HostFacts(
        name=name,
        hostname=name,
        own_addresses=(f"10.0.0.{name[1:]}",),
        resolved={other: (f"10.0.0.{other[1:]}",) for other in others},
        interfaces={
            "lo": Interface(addresses=("127.0.0.1",), mtu=65536, is_up=True),
            "eth0": Interface(addresses=(f"10.0.0.{name[1:]}",), mtu=1500, is_up=True),
            "eth1": Interface(addresses=(f"192.168.0.{name[1:]}",), mtu=9000, is_up=True),
        },
        route="eth0",
        settings={"OMP_NUM_THREADS": "4"},
        versions={"python": "3.11", "torch": "2.13.0", "shoal": "0.1.0"},
        job_hash="3fa1",
        limits=LIMITS,
        has_infiniband=False,
        writes_core_files=False,
        shm_bytes=16 * GIB,
        cores=8,
        memory_bytes=64 * GIB,
        memory_free_bytes=60 * GIB,
        port_holder="",
        leftovers=(),
        zombies=(),
        clock_source="tsc",
        clock_steps_back=0,
        clock_rate=1.0,
        gpus=NO_GPUS,
    )
    return replace(well, **changes)


def link(source: str, target: str, *, gbit: float = 10.0, **changes: Any) -> Link:
    """A link that carries so much, with 50 us of latency."""
    speed = gbit * 1e9 / 8
    well = Link(
        source=source,
        target=target,
        address=f"10.0.0.{target[1:]}",
        large_bytes=8 * 2**20,
        latency_s=50e-6,
        there=[(size, size / speed) for size in (2**16, 2**20, 2**23)],
        back=[(size, size / speed) for size in (2**16, 2**20, 2**23)],
    )
    return replace(well, **changes)


def facts(*changed: HostFacts | Link, **changes: Any) -> Facts:
    """Two hosts and both ways between them; what is given takes the place of what is well."""
    hosts = {name: host(name) for name in ("h1", "h2")}
    links = {way: link(*way) for way in (("h1", "h2"), ("h2", "h1"))}
    for each in changed:
        if isinstance(each, HostFacts):
            hosts[each.name] = each
        else:
            links[each.source, each.target] = each
    well = Facts(
        asked=Asked(ranks_per_host=2, job="job.py", checkpoint_bytes=GIB),
        hosts=list(hosts.values()),
        absent={},
        links=list(links.values()),
        clocks={"h1": Clock(offset_s=0.0, uncertainty_s=0.0), "h2": Clock(offset_s=0.01, uncertainty_s=0.001)},
        store=Store(
            folder="runs",
            fsync_s={"h1": 0.004, "h2": 0.005},
            free_bytes={"h1": 500 * GIB, "h2": 500 * GIB},
            bytes_per_s={"h1": 1e9, "h2": 1e9},
        ),
        collective=Collective(size=2, seconds=0.002),
        flops_per_s={"h1": 100e9, "h2": 95e9},
    )
    return replace(well, **changes)
