"""This host: the name of a process, addresses, interfaces, and who holds a port."""

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shoal.errors import WorldError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class Endpoint(NamedTuple):
    """A numeric address and its family."""

    family: socket.AddressFamily
    address: str


def whoami() -> str:
    """`host:pid`, as people find a process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def is_here_and_alive(name: str) -> bool:
    """Whether a `host:pid` is a live process of this host."""
    import psutil

    host, _, pid = name.rpartition(":")
    if host != socket.gethostname() or not psutil.pid_exists(int(pid)):
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE)
    return False


def network_id() -> str:
    """Equal for processes that share a loopback: one host, one network namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux alone has them
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(parts)


def resolve(host: str, port: int, told_by: str) -> list[Endpoint]:
    """The addresses of a host, of every family, in the system's order.

    Raises:
        WorldError: nobody knows that name.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise WorldError(f"cannot resolve {host!r} ({told_by}): {why}. Is the name spelled right?") from None
    return list(dict.fromkeys(Endpoint(family, str(address[0])) for family, _, _, _, address in found))


def holder_of(port: int) -> int | None:
    """The process that listens on a port of this host, where we may know it."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                return connection.pid
    return None


@contextlib.contextmanager
def gloo_interface(*, one_host: bool, towards: str) -> Iterator[None]:
    """While open: gloo talks over loopback among the ranks of one host, else over the way to the meeting host.

    Left alone, it takes the address that the own host name resolves to, which may be anything.

    Raises:
        WorldError: the user's GLOO_SOCKET_IFNAME does not exist, or no interface leads to the others.
    """
    told = os.environ.get(GLOO_INTERFACE)
    if told is not None:
        _check_interfaces(told)
        yield
        return
    os.environ[GLOO_INTERFACE] = _loopback_interface() if one_host else _interface_towards(towards)
    try:
        yield
    finally:
        os.environ.pop(GLOO_INTERFACE, None)


def _check_interfaces(told: str) -> None:
    import psutil

    known = psutil.net_if_addrs()
    for name in told.split(","):
        if name not in known:
            raise WorldError(
                f"{GLOO_INTERFACE}={told}, but this host has no interface {name!r}. It has: {', '.join(sorted(known))}."
            )


def _loopback_interface() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def _interface_towards(host: str) -> str:
    """The interface over which this host reaches another, or the only one that leaves the host at all."""
    import psutil

    addresses = psutil.net_if_addrs()
    own = _own_address_towards(host)
    outward = [
        name
        for name, state in psutil.net_if_stats().items()
        if state.isup and any(_leaves_the_host(a.family, a.address) for a in addresses.get(name, []))
    ]
    named = [name for name in outward if any(a.address.partition("%")[0] == own for a in addresses[name])]
    candidates = named or outward
    if len(candidates) != 1:
        raise WorldError(
            f"the ranks are on several hosts, and {host or 'the meeting file'} does not say which interface of this "
            f"one leads to the others. Choose: export {GLOO_INTERFACE}=... ({', '.join(sorted(candidates)) or 'none'})"
        )
    return candidates[0]


def _leaves_the_host(family: int, address: str) -> bool:
    if family not in (socket.AF_INET, socket.AF_INET6):
        return False
    ip = ipaddress.ip_address(address.partition("%")[0])
    return not ip.is_loopback and not ip.is_link_local


def _own_address_towards(host: str) -> str | None:
    if not host:
        return None
    endpoint = resolve(host, 9, host)[0]
    with contextlib.suppress(OSError), socket.socket(endpoint.family, socket.SOCK_DGRAM) as probe:
        probe.connect((endpoint.address, 9))  # sends nothing: it only asks for the route
        return str(probe.getsockname()[0]).partition("%")[0]
    return None
