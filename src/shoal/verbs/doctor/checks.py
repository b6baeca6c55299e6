"""All checks, in the order in which they are told. docs/doctor.md shows this table, and a test holds them together."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.verbs.doctor import of_hosts, of_links
from shoal.verbs.doctor.facts import Facts
from shoal.verbs.doctor.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report.

    Attributes:
        measures: what is looked at.
        why: it matters.
    """

    group: str
    name: str
    measures: str
    why: str
    judge: Callable[[Facts], Verdict]


def _check(group: str, name: str, measures: str, why: str, judge: Callable[[Facts], Verdict]) -> Check:
    return Check(group=group, name=name, measures=measures, why=why, judge=judge)


CHECKS = (
    _check("hosts", "reach", "SSH, and shoal there", "a host that cannot be asked cannot take part", of_links.present),
    _check(
        "hosts",
        "own name",
        "what each host's own name resolves to there",
        "gloo and other libraries advertise that address, and at 127.0.1.1 nobody finds them",
        of_hosts.own_name,
    ),
    _check(
        "hosts",
        "names",
        "what each host takes the others' names for",
        "all ranks meet at node 0, by name",
        of_links.names,
    ),
    _check(
        "hosts",
        "interface",
        "the interface that leads to the others; GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
        "ranks that listen on another interface are never reached",
        of_links.interface,
    ),
    _check(
        "network",
        "meeting port",
        "who listens at the port to meet at",
        "node 0 must be able to listen there",
        of_hosts.port_free,
    ),
    _check(
        "network",
        "ports",
        "a connection of each host to each other",
        "each rank connects to each other one, and waits for it for minutes",
        of_links.ports,
    ),
    _check(
        "network",
        "mtu",
        "64 KiB and 8 MiB there and back, byte for byte; where they are lost, the largest packet",
        "where large packets vanish, small messages pass and gradients stand still",
        of_links.mtu,
    ),
    _check(
        "network", "latency", "half a round trip of one byte", "every collective of a step pays it", of_links.latency
    ),
    _check(
        "network",
        "bandwidth",
        "the largest message, one way",
        "the slowest link sets the pace of all collectives that cross it",
        of_links.bandwidth,
    ),
    _check(
        "network",
        "collective",
        "an all_reduce of whole numbers by gloo, one rank per host, compared exactly",
        "it is what training stands on",
        of_links.collective,
    ),
    _check(
        "alike",
        "versions",
        "Python, torch, shoal",
        "ranks with other versions fail late, or compute something else",
        of_links.versions,
    ),
    _check("alike", "job", "a hash of the job's file", "all ranks must train the same job", of_links.job_file),
    _check(
        "alike",
        "environment",
        "OMP_*, MKL_*, CUDA_*, NCCL_*, GLOO_*, TORCH_* and the like",
        "what one host alone has set makes it slower, or talk elsewhere",
        of_links.environment,
    ),
    _check(
        "alike",
        "wall clocks",
        "each clock against the first host's, by round trips",
        "logs and files of hosts cannot be put in order (shoal's own time limits use monotonic clocks)",
        of_hosts.clocks,
    ),
    _check(
        "storage",
        "folder",
        "a token that one host writes and the others read; reads while a file is replaced",
        "checkpoints are written by all hosts, and a new one replaces an old one by renaming",
        of_links.folder,
    ),
    _check("storage", "fsync", "the median of five", "a checkpoint is safe only after it", of_links.fsync),
    _check("storage", "space", "free bytes, and what checkpoints take", "a full disk ends a run", of_links.space),
    _check(
        "storage", "writing", "random bytes, safe at the end", "checkpoints that take longer wait", of_links.writing
    ),
    _check(
        "limits",
        "open files",
        "ulimit -n",
        "sockets to all ranks, data files and loader workers count",
        of_hosts.open_files,
    ),
    _check("limits", "processes", "ulimit -u", "each rank has dozens of threads", of_hosts.processes),
    _check(
        "limits", "pinned memory", "ulimit -l, where there is RDMA", "RDMA pins its buffers", of_hosts.locked_memory
    ),
    _check(
        "limits",
        "core files",
        "ulimit -c and the core pattern",
        "N ranks that crash fill the disk",
        of_hosts.core_files,
    ),
    _check(
        "limits",
        "shared memory",
        "the size of /dev/shm",
        "loader workers pass batches through it, and die with a bus error when it is full",
        of_hosts.shared_memory,
    ),
    _check(
        "machine",
        "leftovers",
        "shoal's processes without a parent; zombies",
        "they hold memory, cores and ports",
        of_hosts.leftovers,
    ),
    _check(
        "machine",
        "cores",
        "affinity and the container's quota, against ranks x threads",
        "more threads than cores make every step several times slower",
        of_hosts.cores,
    ),
    _check(
        "machine",
        "memory",
        "what is free of the machine or the container's limit, per rank",
        "a rank that gets none is killed without a word",
        of_hosts.memory,
    ),
    _check(
        "machine",
        "cpu speed",
        "a float32 matrix product on all cores",
        "the slowest host sets the pace of all",
        of_hosts.cpu_speed,
    ),
    _check(
        "machine",
        "clock",
        "the clock source; whether the monotonic clock goes on",
        "every time limit and every measured time stands on it",
        of_hosts.clock_source,
    ),
    _check(
        "machine",
        "gpu",
        "number, driver, memory errors and other processes, by nvidia-smi",
        "ranks take the GPUs of a host in order, and share them with whoever is there",
        of_hosts.devices,
    ),
)
