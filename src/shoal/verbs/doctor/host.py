"""One host measures itself: names, interfaces, limits, memory, clocks, what earlier runs have left. No torch."""

import csv
import itertools
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from shoal.errors import WorldError
from shoal.launch.limits import memory_limit_bytes, parallel_settings
from shoal.launch.machine import num_cores
from shoal.launch.muster import same_everywhere
from shoal.verbs.doctor.facts import Gpu, Gpus, HostFacts, Interface, Limits
from shoal.world.network import holder_of, resolve

_READINGS = 20_000
_SLEEP_S = 0.05
_REAPED_S = 0.5  # in which a parent that cares has asked
_GPU = "name,driver_version,memory.total,ecc.errors.uncorrected.volatile.total"
_SMI_S = 20.0


def measure(*, name: str, others: Sequence[str], port: int, job: str | None) -> dict[str, Any]:
    """All that a host knows of itself, as `HostFacts.of` reads it.

    Args:
        others: names of the other hosts, as this one would look for them.
        job: the file of the job, if it is one.
    """
    hostname = socket.gethostname()
    same = same_everywhere({} if job is None else {"job": job})
    source, steps_back, rate = clock()
    total, free = memory()
    resolved = {other: addresses_of(other) for other in others}
    facts = HostFacts(
        name=name,
        hostname=hostname,
        own_addresses=addresses_of(hostname),
        resolved=resolved,
        interfaces=interfaces(),
        route=route([address for found in resolved.values() for address in found]),
        settings=parallel_settings(),
        versions={package: str(same[package]) for package in ("python", "torch", "shoal")},
        job_hash=same.get("job"),
        limits=limits(),
        has_infiniband=Path("/dev/infiniband").is_dir(),
        writes_core_files=_writes_core_files(),
        shm_bytes=_size("/dev/shm"),
        cores=num_cores(),
        memory_bytes=total,
        memory_free_bytes=free,
        port_holder=port_holder(port),
        leftovers=leftovers(),
        zombies=zombies(),
        clock_source=source,
        clock_steps_back=steps_back,
        clock_rate=rate,
        gpus=gpus(),
    )
    return asdict(facts)


def addresses_of(name: str) -> list[str]:
    """What a name resolves to here."""
    try:
        return list(dict.fromkeys(endpoint.address for endpoint in resolve(name, 9, name)))
    except WorldError:
        return []


def interfaces() -> dict[str, Interface]:
    """All that this host has."""
    states = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: Interface(
            addresses=[each.address.partition("%")[0] for each in addresses if each.family in families],
            mtu=states[name].mtu if name in states else 0,
            is_up=name in states and states[name].isup,
        )
        for name, addresses in psutil.net_if_addrs().items()
    }


def route(addresses: Iterable[str]) -> str:
    """The interface that leads to the first of these addresses that lies outside of this host."""
    for address in addresses:
        own = _own_address(address)
        for name, interface in interfaces().items():
            if own in interface.addresses and address not in interface.addresses and not own.startswith("127."):
                return name
    return ""


def _own_address(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it only asks for the route
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def limits() -> Limits:
    """The soft limits: those that hold."""

    def soft(kind: int) -> int | None:
        found = resource.getrlimit(kind)[0]
        return None if found == resource.RLIM_INFINITY else found

    return Limits(
        nofile=soft(resource.RLIMIT_NOFILE),
        nproc=soft(resource.RLIMIT_NPROC),
        memlock_bytes=soft(resource.RLIMIT_MEMLOCK),
        core_bytes=soft(resource.RLIMIT_CORE),
    )


def _writes_core_files() -> bool:
    try:
        return not Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/"))
    except OSError:
        return False


def _size(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def memory() -> tuple[int, int]:
    """All, and what is free, in bytes: of the machine, or of this process's control group where that has less."""
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    if group := memory_limit_bytes():
        total, free = min(total, group[0]), min(free, group[1])
    return total, free


def clock() -> tuple[str, int, float]:
    """The kernel's clock source, how often the monotonic clock went back, and its seconds per second of sleep."""
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        source = "unknown"
    readings = [time.monotonic() for _ in range(_READINGS)]
    steps_back = sum(later < earlier for earlier, later in itertools.pairwise(readings))
    rates = []
    for _ in range(3):  # a sleep may be longer than asked for, on a busy machine: the best of three
        began = time.monotonic()
        time.sleep(_SLEEP_S)
        rates.append((time.monotonic() - began) / _SLEEP_S)
    return source, steps_back, min(rates)


def port_holder(port: int) -> str:
    """Who listens at a port of this host, as far as we may know."""
    try:
        with socket.create_server(("", port)):
            return ""
    except OSError as error:
        pid = holder_of(port)
        return error.strerror or str(error) if pid is None else f"pid {pid} ({_command(pid)})"


def _command(pid: int) -> str:
    try:
        return _short(psutil.Process(pid).cmdline())
    except psutil.Error:
        return "gone"


def _short(words: Sequence[str]) -> str:
    text = " ".join([Path(words[0]).name, *words[1:]]) if words else "?"
    return text if len(text) <= 60 else f"{text[:57]}..."


def leftovers() -> list[str]:
    """shoal's processes whose parent is gone: ranks of a run that was killed, or a run in the background."""
    found = []
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "create_time", "status"]):
        told = process.info
        if told["pid"] in own or not is_shoals(told["cmdline"] or []) or told["status"] == psutil.STATUS_ZOMBIE:
            continue
        if _is_orphan(told["ppid"]):
            age_min = (time.time() - told["create_time"]) / 60
            found.append(f"pid {told['pid']} ({_short(told['cmdline'])}, {age_min:.0f} min old)")
    return found


def is_shoals(words: Sequence[str]) -> bool:
    """Whether a command line is one of shoal's, but for this examination."""
    if words[1:2] == ["-m"]:
        own, rest = words[2:3], words[3:4]
        return any(word.partition(".")[0] == "shoal" for word in own) and "doctor" not in [
            *rest,
            *".".join(own).split("."),
        ]
    return any(Path(word).name == "shoal" for word in words[:2]) and "doctor" not in words[:3]


def _is_orphan(parent: int) -> bool:
    """Adopted by the first process, or by a session's manager."""
    if parent <= 1:
        return True
    try:
        return psutil.Process(parent).name() == "systemd"
    except psutil.Error:
        return True


def zombies() -> list[str]:
    """Processes of Python's that have ended, and whose parent has not asked how, for a while."""
    before = _zombies()
    time.sleep(_REAPED_S if before else 0.0)
    now = _zombies()
    return [each for each in before if each in now]


def _zombies() -> list[str]:
    found = []
    for process in psutil.process_iter(["pid", "ppid", "name", "status"]):
        told = process.info
        if told["status"] == psutil.STATUS_ZOMBIE and (told["name"] or "").startswith(("python", "shoal", "pt_")):
            found.append(f"pid {told['pid']} (of {told['ppid']})")
    return found


def gpus() -> Gpus:
    """NVIDIA's, as nvidia-smi tells them."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if shutil.which("nvidia-smi") is None:
        return Gpus(num_devices=devices, found=(), pids=(), error="there is no nvidia-smi" if devices else "")
    try:
        told = _smi(f"--query-gpu={_GPU}")
        return Gpus(num_devices=devices, found=gpus_of(told), pids=pids_of(_smi("--query-compute-apps=pid")), error="")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stdout", None) or str(error)
        return Gpus(num_devices=devices, found=(), pids=(), error=" ".join(str(said).split()))


def _smi(query: str) -> str:
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(words, capture_output=True, text=True, timeout=_SMI_S, check=True).stdout


def gpus_of(text: str) -> list[Gpu]:
    """The rows of nvidia-smi's answer.

    Raises:
        ValueError: it is no such answer.
    """
    found = []
    for name, driver, memory_mib, errors in csv.reader(text.splitlines(), skipinitialspace=True):
        memory_bytes = float(memory_mib) * 2**20 if memory_mib.isdecimal() else None
        count = int(errors) if errors.isdecimal() else None  # [N/A] without ECC
        found.append(Gpu(name=name, driver=driver, memory_bytes=memory_bytes, ecc_errors=count))
    return found


def pids_of(text: str) -> list[int]:
    """Of the processes on any of them."""
    return sorted({int(line) for line in map(str.strip, text.splitlines()) if line.isdecimal()})
