"""What was measured, as data: of each host, of each link, of the folder that they share. Nothing is judged here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The run that is meant.

    Attributes:
        ranks_per_host: the most on one host.
        threads: of each rank; None where shoal divides the cores.
        port: where machines meet.
        checkpoint_bytes: of one checkpoint; None where no job was given.
        loader_bytes: that the loader workers of one host hold in shared memory, as far as it is known.
        is_local: this machine alone; its links are those of two processes over loopback.
    """

    ranks_per_host: int = 1
    threads: int | None = None
    port: int = 29500
    checkpoints: int = 3
    checkpoint_bytes: int | None = None
    loader_bytes: int = 0
    job: str | None = None
    is_local: bool = False


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A way into the network."""

    addresses: Sequence[str]
    mtu: int
    is_up: bool


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the system allows one process; None is unlimited."""

    nofile: int | None
    nproc: int | None
    memlock_bytes: int | None
    core_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One of them, as nvidia-smi tells it; None is what it does not tell."""

    name: str
    driver: str
    memory_bytes: float | None
    ecc_errors: int | None  # uncorrected, since the driver was loaded


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """All of a host.

    Attributes:
        num_devices: that the kernel shows; more than `found` where the driver fails.
        pids: of processes that hold memory on them.
    """

    num_devices: int
    found: Sequence[Gpu]
    pids: Sequence[int]
    error: str


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host about itself.

    Attributes:
        name: as it is called in --hosts.
        own_addresses: what its own host name resolves to there; empty where it resolves to nothing.
        resolved: the addresses that it finds for the others, by their names.
        route: the interface over which it reaches them; empty where there are none.
        settings: variables of the environment that change how ranks compute and talk.
        versions: python, torch, shoal.
        job_hash: of the job's file; None where it is not there, or none was given.
        writes_core_files: whether a crash leaves its memory as a file in the folder of the run.
        port_holder: who listens at the port to meet at; empty where nobody does.
        leftovers: shoal's processes without a parent that is alive, each in words.
        zombies: ended processes of Python that nobody has asked for.
        clock_steps_back: of 20 000 readings of the monotonic clock.
        clock_rate: monotonic seconds per second that the system slept.
    """

    name: str
    hostname: str
    own_addresses: Sequence[str]
    resolved: Mapping[str, Sequence[str]]
    interfaces: Mapping[str, Interface]
    route: str
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    job_hash: str | None
    limits: Limits
    has_infiniband: bool
    writes_core_files: bool
    shm_bytes: int
    cores: int
    memory_bytes: int
    memory_free_bytes: int
    port_holder: str
    leftovers: Sequence[str]
    zombies: Sequence[str]
    clock_source: str
    clock_steps_back: int
    clock_rate: float
    gpus: Gpus

    @staticmethod
    def of(told: Mapping[str, Any]) -> "HostFacts":
        """From the JSON of `dataclasses.asdict`."""
        interfaces = {name: Interface(**each) for name, each in told["interfaces"].items()}
        gpus = Gpus(**{**told["gpus"], "found": [Gpu(**each) for each in told["gpus"]["found"]]})
        return HostFacts(**{**told, "interfaces": interfaces, "limits": Limits(**told["limits"]), "gpus": gpus})


@dataclass(frozen=True, kw_only=True)
class Link:
    """From one host to another, as the first one sees it.

    Attributes:
        address: of the target, where it answered; empty where it did not.
        error: why nothing came through, on any port.
        port_error: why not at the port to meet at (of node 0 alone); empty where it was not tried.
        lost: at which size messages no longer came through, in bytes, and which way: "there", "back", "" if none.
        damaged: the size at which what came back was not what was sent; 0 if none.
        large_bytes: the largest message tried.
        largest_packet: in bytes with its headers, where larger ones vanish.
        latency_s: one way, of one byte.
        there, back: (bytes, seconds) of messages one way.
    """

    source: str
    target: str
    address: str = ""
    error: str = ""
    port_error: str = ""
    lost: tuple[int, str] | None = None
    damaged: int = 0
    large_bytes: int = 0
    largest_packet: int | None = None
    latency_s: float | None = None
    there: Sequence[tuple[int, float]] = ()
    back: Sequence[tuple[int, float]] = ()

    @property
    def bytes_per_s(self) -> float | None:
        """Of the largest message that went there, at its best."""
        if self.large_bytes == 0:
            return None
        return self.large_bytes / min(seconds for size, seconds in self.there if size == self.large_bytes)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A host's wall clock less that of the first host, and how sure that is: half the round trips."""

    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True, kw_only=True)
class Store:
    """The folder of the run.

    Attributes:
        unseen: hosts that do not see there what the first one has written, and what they said.
        torn: reads of a file, while it was replaced, that were neither the old one nor the new one.
        fsync_s, free_bytes, bytes_per_s: by host.
    """

    folder: str
    error: str = ""
    unseen: Mapping[str, str] = field(default_factory=dict)
    torn: int = 0
    fsync_s: Mapping[str, float] = field(default_factory=dict)
    free_bytes: Mapping[str, int] = field(default_factory=dict)
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """An all_reduce of whole numbers over one rank per host.

    Attributes:
        not_run: why it was not tried; empty where it was.
        error: why it failed.
        wrong: hosts whose result was not the sum.
        seconds: of the slowest.
    """

    size: int = 0
    not_run: str = ""
    error: str = ""
    wrong: Sequence[str] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All of it.

    Attributes:
        absent: hosts that could not be asked, and why.
        flops_per_s: of a float32 matrix product on all cores, by host.
    """

    asked: Asked
    hosts: Sequence[HostFacts]
    absent: Mapping[str, str]
    links: Sequence[Link]
    clocks: Mapping[str, Clock]
    store: Store
    collective: Collective
    flops_per_s: Mapping[str, float]
