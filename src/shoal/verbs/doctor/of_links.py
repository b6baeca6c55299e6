"""Checks of what hosts are to each other: ways, speeds, versions, the folder that they share. Pure."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from shoal.units import show_bytes, show_seconds
from shoal.verbs.doctor.facts import Facts, HostFacts, Link
from shoal.verbs.doctor.verdict import Verdict, fail, listed, ok, warn

_FAR_S = 2e-3
_SLOW_BYTES_PER_S = 50e6  # half of 1 Gbit/s
_FSYNC_S = 0.1
_WRITE_BYTES_PER_S = 30e6
_CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_OWN = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")  # each host's own, rightly


def present(facts: Facts) -> Verdict:
    """Every host must be reached by SSH, and have shoal."""
    if facts.absent:
        bad = listed(f"{name}: {why}" for name, why in facts.absent.items())
        return fail(bad, "mend it, or leave the host out of --hosts; nothing else is known of it")
    return ok("this machine" if facts.asked.is_local else ", ".join(host.name for host in facts.hosts))


def names(facts: Facts) -> Verdict:
    """All hosts must find node 0, and every name must mean the host that has it."""
    if len(facts.hosts) < 2:
        return ok("no other host to find")
    unknown, wrong = [], []
    for host in facts.hosts:
        for other in facts.hosts:
            found = host.resolved.get(other.name, ()) if host is not other else None
            has = {address for each in other.interfaces.values() for address in each.addresses}
            if found is not None and not found:
                unknown.append((other, f"{host.name} does not know {other.name}"))
            elif found is not None and not has & set(found):
                wrong.append(f"{host.name} takes {other.name} for {', '.join(found)}, which is not its address")
            elif found is not None and any(address.startswith("127.") for address in found):
                wrong.append(f"{host.name} takes {other.name} for {', '.join(found)}: itself")
    fix = "the same lines in /etc/hosts of all hosts, or addresses in --hosts"
    if wrong or any(other is facts.hosts[0] for other, _ in unknown):
        return fail(listed([*wrong, *(line for _, line in unknown)]), fix)
    if unknown:
        return warn(listed(line for _, line in unknown), fix)
    return ok("each host finds all others")


def interface(facts: Facts) -> Verdict:
    """gloo and nccl connect over one interface, and it must be the one that leads to the others."""
    for host in facts.hosts:
        for name in _CHOICES:
            told = host.settings.get(name)
            if told is not None and (verdict := _chosen(host, name, told)):
                return verdict
    if facts.asked.is_local:
        return ok("loopback")
    lost = [host.name for host in facts.hosts if not host.route]
    if lost and len(facts.hosts) > 1:
        return fail(f"{listed(lost)}: no interface leads to the others", "ip addr; ip route")
    return ok(
        listed(f"{host.name}: {host.route} ({_addresses(host, host.route)})" for host in facts.hosts if host.route)
    )


def _chosen(host: HostFacts, name: str, told: str) -> Verdict | None:
    """What is wrong with a choice of interfaces, if anything is."""
    chosen = [each for each in host.interfaces if matches(each, told, exact=name == "GLOO_SOCKET_IFNAME")]
    fix = f"export {name}={host.route}" if host.route else f"unset {name}"
    if not chosen:
        return fail(f"{host.name}: {name}={told}, and it has {', '.join(sorted(host.interfaces))}", fix)
    if host.route and host.route not in chosen:
        return fail(f"{host.name}: {name}={told}, and the others are reached over {host.route}", fix)
    return None


def matches(interface: str, told: str, *, exact: bool) -> bool:
    """Whether a choice means this interface: gloo takes names; nccl takes beginnings, `=name`, `^not,these`."""
    if exact:
        return interface in told.split(",")
    if told.startswith("^"):
        return not matches(interface, told[1:], exact=False)
    if told.startswith("="):
        return interface in told[1:].split(",")
    return any(interface.startswith(each) for each in told.split(","))


def _addresses(host: HostFacts, name: str) -> str:
    found = host.interfaces[name].addresses if name in host.interfaces else ()
    return ", ".join(address for address in found if not address.startswith("fe80:"))


def ports(facts: Facts) -> Verdict:
    """Every rank connects to every other, at ports that the system chooses."""
    if not facts.links:
        return ok("no other host to reach")
    blocked = [f"{link.source} -> {link.target}: {link.error}" for link in facts.links if link.error]
    if blocked:
        return fail(listed(blocked), "open all TCP ports among these hosts (they choose them), both ways")
    shut = [f"{link.source} -> {link.target}: {link.port_error}" for link in facts.links if link.port_error]
    if shut:
        return fail(listed(shut), f"open TCP port {facts.asked.port} of node 0, or --master-port with an open one")
    return ok(f"{_ways(facts.links)} connect" if not facts.asked.is_local else "two processes connect over loopback")


def _ways(links: Sequence[Link]) -> str:
    return f"all {len(links)} ways" if len(links) > 2 else "both ways"


def mtu(facts: Facts) -> Verdict:
    """Where large packets vanish, small messages pass and gradients stand still for ever."""
    for link in facts.links:
        if link.lost:
            return _black_hole(facts, link)
        if link.damaged:
            found = f"{link.source} -> {link.target}: of {show_bytes(link.damaged)} not all came back as it was sent"
            return fail(found, "change the cable, the network card or its driver; switch its offloads off: ethtool -K")
    unlike = {each.mtu for host in facts.hosts for name, each in host.interfaces.items() if name == host.route}
    tried = [link.large_bytes for link in facts.links if not link.error]
    if len(unlike) > 1:
        told = listed(f"{h.name}: {h.interfaces[h.route].mtu}" for h in facts.hosts if h.route in h.interfaces)
        return warn(f"hosts have unlike MTUs ({told})", f"ip link set dev eth0 mtu {min(unlike)}, on all")
    if not tried:
        return ok("no message was tried")
    return ok(f"64 KiB and {show_bytes(min(tried))} come back byte for byte")


def _black_hole(facts: Facts, link: Link) -> Verdict:
    assert link.lost is not None
    size, way = link.lost
    source, target = (link.source, link.target) if way == "there" else (link.target, link.source)
    found = f"{source} -> {target}: {show_bytes(size)} are lost, and smaller messages pass"
    host = next((host for host in facts.hosts if host.name == source), facts.hosts[0])
    own = host.interfaces[host.route].mtu if host.route in host.interfaces else None
    largest = link.largest_packet
    if own is not None and largest is not None and largest < own:
        found += f": packets above {largest} bytes vanish, and its MTU is {own} (a black hole)"
    passes = min((each.largest_packet for each in facts.links if each.largest_packet), default=1280)
    fix = f"ip link set dev {host.route or 'eth0'} mtu {passes} on all hosts, or let ICMP through"
    return fail(found, fix)


def latency(facts: Facts) -> Verdict:
    """Each collective of a step waits for it several times."""
    told = [(link.latency_s, link) for link in facts.links if link.latency_s is not None]
    if not told:
        return ok("no link to measure")
    worst, link = max(told, key=lambda each: each[0])
    found = f"one way {show_seconds(worst)}"
    if facts.asked.is_local:
        return ok(f"{found} over loopback")
    found += f" at worst ({link.source} -> {link.target})"
    if worst > _FAR_S:
        return warn(found, "let only dp and pp cross this link (tp and fsdp inside a site), or use nearer hosts")
    return ok(found)


def bandwidth(facts: Facts) -> Verdict:
    """The slowest link sets the pace of every ring that crosses it."""
    told = [(speed, link) for link in facts.links if (speed := link.bytes_per_s) is not None]
    if not told:
        return ok("no link to measure")
    worst, link = min(told, key=lambda each: each[0])
    if facts.asked.is_local:
        return ok(f"{_gbit(worst)} over loopback")
    middle = median(speed for speed, _ in told)
    found = f"{link.source} -> {link.target} is the slowest: {_gbit(worst)}"
    if len(told) > 1:
        found += f" (median {_gbit(middle)})"
    if worst < _SLOW_BYTES_PER_S:
        return warn(
            found, f"look at it: ethtool on {link.source} and {link.target}; a layout that sends less: shoal plan"
        )
    if worst < middle / 2:
        return warn(found, f"look at the cable, the switch port and the card of {link.source} and {link.target}")
    return ok(found)


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g} Gbit/s" if bytes_per_s > 12.5e6 else f"{bytes_per_s * 8 / 1e6:.3g} Mbit/s"


def collective(facts: Facts) -> Verdict:
    """What c10d itself can do between these hosts."""
    told = facts.collective
    if told.not_run:
        return (
            ok(f"not run: {told.not_run}")
            if len(facts.hosts) < 2
            else fail(f"not run: {told.not_run}", "mend what the checks `ports` and `mtu` name")
        )
    if told.error:
        return fail(f"gloo's all_reduce failed: {told.error}", "mend what is named; then shoal test")
    if told.wrong:
        return fail(
            f"all_reduce gives wrong sums on {listed(told.wrong)}", "test the memory and the network card there"
        )
    return ok(f"all_reduce over {told.size} ranks is exact ({show_seconds(told.seconds)})")


def versions(facts: Facts) -> Verdict:
    """All ranks must run the same code."""
    first = facts.hosts[0]
    for host in facts.hosts:
        if host.versions.get("torch") == "not installed":
            return fail(f"{host.name} has no torch", "pip install torch, the same version on all hosts")
        for package, version in host.versions.items():
            if version != first.versions.get(package):
                found = f"{package} is {first.versions.get(package)} on {first.name} and {version} on {host.name}"
                return fail(found, "the same environment on all hosts; --hosts a,b=/path/to/python names another")
    return ok(", ".join(f"{package} {version}" for package, version in first.versions.items()))


def job_file(facts: Facts) -> Verdict:
    """All ranks must train the same job."""
    job = facts.asked.job
    hashes = {host.name: host.job_hash for host in facts.hosts}
    if job is None or not Path(job.partition(":")[0]).suffix:
        return ok("no job file was given" if job is None else f"{job} is a part of an installed package")
    first = facts.hosts[0]
    if missing := [name for name, found in hashes.items() if found is None]:
        return fail(f"{listed(missing)}: there is no {job}", "the same folder on all hosts, or copy the file there")
    if unlike := [name for name, found in hashes.items() if found != hashes[first.name]]:
        return fail(f"{job} differs on {listed(unlike)} from {first.name}", f"copy it from {first.name}")
    return ok(f"{job} is {first.job_hash}" + (" on all hosts" if len(hashes) > 1 else ""))


def environment(facts: Facts) -> Verdict:
    """A variable that one host alone has changes what it computes with, or over what it talks."""
    first = facts.hosts[0]
    unlike = []
    for name in sorted({name for host in facts.hosts for name in host.settings} - set(_OWN)):
        told = {host.name: host.settings.get(name, "unset") for host in facts.hosts}
        if len(set(told.values())) > 1:
            other = next(host for host, value in told.items() if value != told[first.name])
            unlike.append(f"{name}={told[first.name]} on {first.name}, {told[other]} on {other}")
    if unlike:
        return warn("; ".join(unlike), "set it alike where a login shell of every host sets its variables")
    return ok(f"{len(first.settings)} set" + (", alike on all hosts" if len(facts.hosts) > 1 else ""))


def folder(facts: Facts) -> Verdict:
    """Checkpoints are written by all hosts and read by others."""
    store = facts.store
    if store.error:
        return fail(f"{store.folder} cannot be written ({store.error})", "another folder: --run; or its owner: chown")
    if store.unseen:
        bad = listed(f"{name}: {why}" for name, why in store.unseen.items())
        return fail(
            f"{store.folder} is not one folder ({bad})", "a folder on NFS, Lustre or the like, at one path: --run"
        )
    if store.torn:
        return fail(
            f"{store.folder}: {store.torn} reads met a file half replaced",
            "another file system: checkpoints count on rename being whole",
        )
    hosts = "seen by all hosts, " if len(facts.hosts) > 1 else ""
    return ok(f"{store.folder}: {hosts}a rename is whole")


def fsync(facts: Facts) -> Verdict:
    """A checkpoint is safe only then."""
    if not facts.store.fsync_s:
        return ok("not measured")
    slowest, name = max((seconds, name) for name, seconds in facts.store.fsync_s.items())
    found = f"{show_seconds(slowest)}" + (f" on {name}, the slowest" if len(facts.store.fsync_s) > 1 else "")
    return (
        warn(found, "a faster folder for --run, or fewer checkpoints: --save-every")
        if slowest > _FSYNC_S
        else ok(found)
    )


def space(facts: Facts) -> Verdict:
    """A full disk ends a run at its next checkpoint."""
    if not facts.store.free_bytes:
        return ok("not measured")
    free, name = min((free, name) for name, free in facts.store.free_bytes.items())
    size, num = facts.asked.checkpoint_bytes, facts.asked.checkpoints
    if size is None:
        return ok(f"{show_bytes(free)} are free (name a job to know how many checkpoints that is)")
    found = f"{show_bytes(free)} are free on {name}; {num} checkpoints take {show_bytes(num * size)}"
    # A new one is written before an old one goes.
    if free < size:
        return fail(found, "free some, or another folder: --run")
    return warn(found, "keep fewer: --keep; or another folder: --run") if free < (num + 1) * size else ok(found)


def writing(facts: Facts) -> Verdict:
    """While the last checkpoint is still on its way, the next one waits."""
    if not facts.store.bytes_per_s:
        return ok("not measured")
    speed, name = min((speed, name) for name, speed in facts.store.bytes_per_s.items())
    found = f"{show_bytes(speed)}/s" + (f" on {name}, the slowest" if len(facts.store.bytes_per_s) > 1 else "")
    if size := facts.asked.checkpoint_bytes:
        found += f": a checkpoint of {show_bytes(size)} takes {show_seconds(size / (speed * len(facts.hosts)))}"
    return (
        warn(found, "a faster folder for --run, or fewer checkpoints: --save-every")
        if speed < _WRITE_BYTES_PER_S
        else ok(found)
    )
