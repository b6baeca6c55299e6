"""Checks of each host by itself: names, limits, memory, what is left of earlier runs, clocks, devices. Pure."""

from collections.abc import Callable, Sequence

from shoal.units import show_bytes, show_seconds
from shoal.verbs.doctor.facts import Facts, HostFacts
from shoal.verbs.doctor.verdict import Verdict, fail, listed, ok, warn

_LEAST_FILES, _GOOD_FILES = 256, 4096
_LEAST_PROCESSES = 1024
_DOCKER_SHM = 64 * 2**20  # what a container gets when nobody asks
_LEAST_MEMORY, _GOOD_MEMORY = 400 * 2**20, 2**30  # per rank: the former is an import of torch
_GOOD_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen", "unknown")
_CORE_BYTES = 2**30
_SPREAD = 0.2  # the share by which hosts may differ in speed


def own_name(facts: Facts) -> Verdict:
    """A host's own name must not mean the loopback, where others are to reach it."""
    if facts.asked.is_local:
        host = facts.hosts[0]
        known = ", ".join(host.own_addresses) or "nothing"
        return ok(f"{host.hostname} is {known}; ranks of one machine talk over loopback")
    bad = [host for host in facts.hosts if _hides(host)]
    if bad:
        found = listed(f"{host.name}: {host.hostname} is {', '.join(host.own_addresses) or 'unknown'}" for host in bad)
        told = f"export GLOO_SOCKET_IFNAME={bad[0].route or 'eth0'} there"
        return fail(found, f"give it its outward address in /etc/hosts of {bad[0].name}, or {told}")
    return ok(listed(f"{host.name}: {', '.join(host.own_addresses) or 'unknown'}" for host in facts.hosts))


def _hides(host: HostFacts) -> bool:
    """Whether gloo, left alone, would advertise the loopback: as it does too where the name is unknown."""
    outward = [address for address in host.own_addresses if not address.startswith("127.") and address != "::1"]
    return len(outward) < max(1, len(host.own_addresses)) and "GLOO_SOCKET_IFNAME" not in host.settings


def port_free(facts: Facts) -> Verdict:
    """The port where machines meet: node 0 must be able to listen there."""
    port = facts.asked.port
    if facts.asked.is_local:
        holder = facts.hosts[0].port_holder
        if holder:
            return warn(
                f"port {port} is taken by {holder}", f"for torchrun: --master-port {port + 1}; shoal takes another"
            )
        return ok(f"{port} is free")
    first = facts.hosts[0]
    if first.port_holder:
        return fail(
            f"port {port} of {first.name} is taken by {first.port_holder}", f"end it, or --master-port {port + 1}"
        )
    return ok(f"{port} of {first.name} is free")


def open_files(facts: Facts) -> Verdict:
    """Sockets, data files and loader workers of a rank all count."""
    return _least(
        facts,
        lambda host: host.limits.nofile,
        least=_LEAST_FILES,
        good=_GOOD_FILES,
        words="open files",
        fix=f"ulimit -n {_GOOD_FILES * 4} (for ever: /etc/security/limits.conf)",
    )


def processes(facts: Facts) -> Verdict:
    """Threads count too: each rank has dozens."""
    per_rank = 64
    need = max(_LEAST_PROCESSES, per_rank * facts.asked.ranks_per_host)
    return _least(
        facts,
        lambda host: host.limits.nproc,
        least=per_rank,
        good=need,
        words="processes and threads",
        fix=f"ulimit -u {4 * need}",
    )


def _least(
    facts: Facts, value: Callable[[HostFacts], int | None], *, least: int, good: int, words: str, fix: str
) -> Verdict:
    told = [(value(host), host.name) for host in facts.hosts]
    limited = sorted((limit, name) for limit, name in told if limit is not None)
    if not limited:
        return ok(f"{words}: unlimited")
    lowest, name = limited[0]
    if lowest < good:
        return (fail if lowest < least else warn)(f"{name} allows {lowest} {words}", fix)
    return ok(f"{words}: {lowest} or more")


def locked_memory(facts: Facts) -> Verdict:
    """RDMA pins its buffers."""
    bad = [
        f"{host.name} allows {show_bytes(host.limits.memlock_bytes)}"
        for host in facts.hosts
        if host.has_infiniband and host.limits.memlock_bytes is not None
    ]
    if bad:
        return fail(listed(bad) + " of pinned memory, and has RDMA devices", "ulimit -l unlimited; --ulimit memlock=-1")
    return ok("no RDMA device asks for it" if not any(h.has_infiniband for h in facts.hosts) else "unlimited")


def core_files(facts: Facts) -> Verdict:
    """A crash of N ranks would write their memory N times into the folder of the run."""
    bad = [
        host.name
        for host in facts.hosts
        if host.writes_core_files and (host.limits.core_bytes is None or host.limits.core_bytes > _CORE_BYTES)
    ]
    if bad:
        return warn(f"{listed(bad)}: a crash writes the memory of each rank into the folder of the run", "ulimit -c 0")
    return ok("a crash does not fill the folder of the run")


def shared_memory(facts: Facts) -> Verdict:
    """Loader workers pass batches through it."""
    least, asked = min(facts.hosts, key=lambda host: host.shm_bytes), facts.asked
    need = f", and the loader workers fill {show_bytes(asked.loader_bytes)}" if asked.loader_bytes else ""
    found = f"{least.name}: /dev/shm has {show_bytes(least.shm_bytes)}{need}"
    if least.shm_bytes < max(_DOCKER_SHM, asked.loader_bytes):
        level = fail
    elif least.shm_bytes <= max(_DOCKER_SHM * max(1, asked.ranks_per_host), 2 * asked.loader_bytes):
        level = warn
    else:
        return ok(found)
    return level(found, "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm; or no loader workers")


def leftovers(facts: Facts) -> Verdict:
    """They hold memory, cores and ports, and may still write to a run's folder."""
    alive = [f"{host.name}: {each}" for host in facts.hosts for each in host.leftovers]
    ended = [f"{host.name}: {each}" for host in facts.hosts for each in host.zombies]
    if alive:
        return warn(f"shoal without a parent: {listed(alive)}", "kill the pid, unless it is a run of yours")
    if ended:
        return warn(f"ended, and not reaped: {listed(ended)}", "end its parent; in a container: docker run --init")
    return ok("none")


def cores(facts: Facts) -> Verdict:
    """More threads than cores make each step several times slower."""
    asked = facts.asked
    least = min(facts.hosts, key=lambda host: host.cores)
    ranks = f"{asked.ranks_per_host} {'rank' if asked.ranks_per_host == 1 else 'ranks'}"
    threads = max((_threads(host, facts) for host in facts.hosts), default=1)
    found = f"{least.name}: {least.cores} cores for {ranks} x {threads} threads"
    if asked.ranks_per_host * threads > least.cores:
        fix = f"--threads {max(1, least.cores // asked.ranks_per_host)}"
        return warn(found, fix if asked.ranks_per_host <= least.cores else f"{fix}, and at most {least.cores} ranks")
    return ok(found)


def _threads(host: HostFacts, facts: Facts) -> int:
    """As shoal decides it: the flag, OMP_NUM_THREADS, or an equal share of the cores."""
    told = host.settings.get("OMP_NUM_THREADS", "")
    if facts.asked.threads is not None:
        return facts.asked.threads
    return int(told) if told.isdecimal() and int(told) else max(1, host.cores // facts.asked.ranks_per_host)


def memory(facts: Facts) -> Verdict:
    """A rank that gets no memory is killed by the kernel, without a word."""
    least = min(facts.hosts, key=lambda host: host.memory_free_bytes)
    each = least.memory_free_bytes / facts.asked.ranks_per_host
    need = (facts.asked.checkpoint_bytes or 0) / max(1, len(facts.hosts) * facts.asked.ranks_per_host)
    found = f"{least.name}: {show_bytes(least.memory_free_bytes)} free of {show_bytes(least.memory_bytes)}"
    found += f", {show_bytes(each)} per rank"
    if each < _LEAST_MEMORY + need:
        return fail(found, "start fewer ranks there, end what holds memory, or raise the container's limit")
    if each < _GOOD_MEMORY + 2 * need:
        return warn(found, "start fewer ranks there, or end what holds memory")
    return ok(found)


def cpu_speed(facts: Facts) -> Verdict:
    """The slowest host sets the pace of all."""
    speeds = sorted((flops, name) for name, flops in facts.flops_per_s.items())
    if not speeds:
        return warn("not measured: torch did not run", "see the check `collective`")
    (slow, slowest), (fast, _) = speeds[0], speeds[-1]
    if slow < (1 - _SPREAD) * fast:
        percent = f"{1 - slow / fast:.0%}"
        return warn(
            f"{slowest} multiplies at {slow / 1e9:.3g} GFLOP/s, {percent} below the fastest ({fast / 1e9:.3g})",
            f"look at {slowest}: other processes, power saving (cpupower), heat, a smaller CPU",
        )
    told = f"{slow / 1e9:.3g} GFLOP/s" + (f" on {slowest}, the slowest" if len(speeds) > 1 else "")
    return ok(f"a float32 product on all cores: {told}")


def clock_source(facts: Facts) -> Verdict:
    """Time limits and every measured time stand on it."""
    for host in facts.hosts:
        if host.clock_steps_back:
            return fail(f"{host.name}: the monotonic clock went back {host.clock_steps_back} times", _OTHER_CLOCK)
        if not 0.9 < host.clock_rate < 3:
            return fail(f"{host.name}: its clock counts {host.clock_rate:.2f} s per second of sleep", _OTHER_CLOCK)
    slow = [f"{host.name}: {host.clock_source}" for host in facts.hosts if host.clock_source not in _GOOD_CLOCKS]
    if slow:
        return warn(f"{listed(slow)}, where each reading takes a system call", _OTHER_CLOCK)
    return ok(f"monotonic, from {', '.join(sorted({host.clock_source for host in facts.hosts}))}")


_OTHER_CLOCK = "choose another of /sys/devices/system/clocksource/clocksource0/available_clocksource"


def devices(facts: Facts) -> Verdict:
    """Ranks take the GPUs of a host in order, and all hosts should have the same."""
    for host in facts.hosts:
        if host.gpus.error:
            seen = f"{host.gpus.num_devices} devices, and nvidia-smi says: {host.gpus.error}"
            return fail(f"{host.name}: {seen}", "mend the driver (modprobe nvidia), or the container (--gpus all)")
        if broken := [k for k, gpu in enumerate(host.gpus.found) if gpu.ecc_errors]:
            return fail(
                f"{host.name}: GPU {broken[0]} has {host.gpus.found[broken[0]].ecc_errors} uncorrected memory errors",
                f"take the host out, or the GPU: CUDA_VISIBLE_DEVICES; then nvidia-smi -r -i {broken[0]}",
            )
    if not any(host.gpus.found for host in facts.hosts):
        return ok("no GPU")
    return _unlike(facts.hosts) or _shared(facts) or ok(_kinds(facts.hosts[0]))


def _kinds(host: HostFacts) -> str:
    names = sorted({gpu.name for gpu in host.gpus.found})
    drivers = sorted({gpu.driver for gpu in host.gpus.found})
    return f"{len(host.gpus.found)} x {', '.join(names) or 'none'}, driver {', '.join(drivers) or 'none'}"


def _unlike(hosts: Sequence[HostFacts]) -> Verdict | None:
    first = hosts[0]
    for host in hosts:
        if _kinds(host) != _kinds(first):
            found = f"{first.name} has {_kinds(first)}; {host.name} has {_kinds(host)}"
            return warn(found, "--nproc-per-node for each host, and one driver on all")
    return None


def _shared(facts: Facts) -> Verdict | None:
    busy = [f"{host.name}: pid {', '.join(map(str, host.gpus.pids))}" for host in facts.hosts if host.gpus.pids]
    if busy:
        return warn(
            f"other processes hold GPU memory ({listed(busy)})", "end them, or choose others: CUDA_VISIBLE_DEVICES"
        )
    asked = facts.asked.ranks_per_host
    few = [host for host in facts.hosts if len(host.gpus.found) < asked]
    if few:
        return warn(
            f"{few[0].name} has {len(few[0].gpus.found)} GPUs for {asked} ranks", "fewer ranks, or --device cpu"
        )
    return None


def clocks(facts: Facts) -> Verdict:
    """shoal's time limits use each host's monotonic clock; names of files and lines of logs do not."""
    if not facts.clocks:
        return ok("one machine, one clock")
    offset, name = max((abs(clock.offset_s), name) for name, clock in facts.clocks.items())
    clock = facts.clocks[name]
    found = f"{name} is {show_seconds(offset)} {'ahead of' if clock.offset_s > 0 else 'behind'} {facts.hosts[0].name}"
    if offset > 1.0 + clock.uncertainty_s:
        return warn(found, f"run NTP there: timedatectl set-ntp true (on {name})")
    return ok(f"within {show_seconds(max(offset, clock.uncertainty_s))}")
