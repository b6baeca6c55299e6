"""From an address to a store that every rank can reach: env://, tcp://host:port or file:///path, within a time limit.

The store is opened here and not by torch's own rendezvous, because that listens on every interface, tries one address
family for minutes, and waits without end for a listener that is no store.
"""

import datetime
import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlparse

from shoal.errors import WorldError
from shoal.world.network import Endpoint, holder_of, resolve
from shoal.world.place import Place

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # exported from C++

T = TypeVar("T")
CONNECT_S = 5.0  # a host that answers at all does so in less


class PortTakenError(WorldError):
    """Rank 0 cannot listen: the port is another process's."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks meet: a file, or a host and port."""

    text: str  # as the user knows it
    path: Path | None = None
    host: str = ""
    port: int = 0
    agent: bool = False  # an elastic agent holds the store, over all restarts of its workers

    @property
    def lasting(self) -> bool:
        """Whether the store may hold what processes that are gone left there."""
        return self.path is not None or self.agent

    @staticmethod
    def of(place: Place) -> "Meeting":
        """Read an address.

        Raises:
            WorldError: it is no address, or env:// without MASTER_ADDR and MASTER_PORT.
        """
        if place.rendezvous == "env://":
            return _meeting_of_env()
        url = urlparse(place.rendezvous)
        if url.scheme == "file" and url.path and not url.netloc:
            return Meeting(text=place.rendezvous, path=Path(url.path))
        try:
            host, port = url.hostname, url.port
        except ValueError:  # a port that is no number, or too large
            host, port = None, None
        if url.scheme == "tcp" and host and port:
            return Meeting(text=place.rendezvous, host=host, port=port)
        raise WorldError(
            f"{place.rendezvous!r} is no address to meet at. Known: env://, tcp://host:port, file:///path (three /)."
        )


def _meeting_of_env() -> Meeting:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    text = f"MASTER_ADDR={host} MASTER_PORT={port}"
    if not host or not port:
        raise WorldError(
            f"env:// needs an address to meet at, but it is {text}. Set MASTER_ADDR to the host of rank 0 and "
            "MASTER_PORT to a free port there, or start with torchrun."
        )
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise WorldError(f"MASTER_PORT={port!r} is no port: a whole number from 1 to 65535.")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Meeting(text=text, host=host, port=int(port), agent=agent)


def open_store(meeting: Meeting, place: Place, deadline: float) -> "Store":
    """The store at a meeting point; rank 0 hosts it where nobody else does.

    Raises:
        WorldError: the address is unknown, unreachable, taken by a stranger, or no store, by `time.monotonic()` =
            `deadline`.
    """
    if meeting.path is not None:
        return _open_file(meeting.path, place, deadline)
    if place.rank == 0 and not meeting.agent:
        return _host(meeting, place, deadline)
    return join_store(meeting, place, deadline)


def join_store(meeting: Meeting, place: Place, deadline: float) -> "Store":
    """The store that somebody else hosts at a host and port."""
    endpoints = resolve(meeting.host, meeting.port, meeting.text)
    return _tcp_store(meeting, _first_reachable(meeting, endpoints, place, deadline).address, deadline)


def first_line(error: BaseException) -> str:
    """What torch has to say, without its stack and source positions."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"\[[^\]\s]*\.(cc|cpp|h|hpp):\d+\]\s*", "", lines[0]).strip().rstrip(".")


def within(deadline: float, work: Callable[[], T], late: str) -> T:
    """What `work` returns. Where torch ignores its own time limit, the thread is left behind and we go on."""
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.1, deadline - time.monotonic()))
    if failed:
        raise failed[0]
    if not done:
        raise WorldError(late)
    return done[0]


def _open_file(path: Path, place: Place, deadline: float) -> "Store":
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported from C++

    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise WorldError(f"file://{path}: ranks meet in a file that they can write, and its folder must be there.")
    if not _may_be_store(path):
        raise WorldError(f"file://{path} is no meeting file, and stays as it is. Choose one that does not exist yet.")
    store: Store = FileStore(str(path), place.size)
    store.set_timeout(_rest(deadline))
    return store


def _may_be_store(path: Path) -> bool:
    """A store begins with the length of its first key, a number with zero bytes; torch would read a text for ever."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        head = file.read(4)
    return not head or 0 in head


def _host(meeting: Meeting, place: Place, deadline: float) -> "Store":
    endpoint = resolve(meeting.host, meeting.port, meeting.text)[0]
    # Without a listener: this process holds the port since an earlier world, and torch shares that server.
    listener = _listen(meeting, endpoint, place)
    return _tcp_store(meeting, endpoint.address, deadline, host=True, listener=listener)


def _listen(meeting: Meeting, endpoint: Endpoint, place: Place) -> int | None:
    family, address = _address_to_bind(meeting, endpoint, place)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not address:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind((address, meeting.port))
            listener.listen(2048)
        except OSError as error:
            if holder_of(meeting.port) == os.getpid():
                return None
            raise _taken(meeting, error) from None
        return listener.detach()


def _address_to_bind(meeting: Meeting, endpoint: Endpoint, place: Place) -> tuple[socket.AddressFamily, str]:
    """Loopback where that was said in so many words. A mere name may stand for it on this host alone."""
    spelled = meeting.host == "localhost" or meeting.host == endpoint.address
    if place.num_nodes == 1 and spelled and ipaddress.ip_address(endpoint.address).is_loopback:
        return endpoint.family, endpoint.address
    return (socket.AF_INET6, "") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")


def _taken(meeting: Meeting, error: OSError) -> "PortTakenError":
    pid = holder_of(meeting.port)
    by = f" by process {pid} of this host" if pid else ""
    return PortTakenError(
        f"rank 0 cannot listen on port {meeting.port} ({meeting.text}): {error.strerror}{by}. Another job may run "
        "here: choose another port."
    )


def _first_reachable(meeting: Meeting, endpoints: list[Endpoint], place: Place, deadline: float) -> Endpoint:
    """The address that answers. Refused: rank 0 may not listen yet. Otherwise: nobody is there, say so at once."""
    while True:
        problems = {}
        for endpoint in endpoints:
            with socket.socket(endpoint.family, socket.SOCK_STREAM) as probe:
                probe.settimeout(min(CONNECT_S, max(0.1, deadline - time.monotonic())))
                try:
                    probe.connect((endpoint.address, meeting.port))
                    return endpoint
                except OSError as error:
                    problems[endpoint.address] = error
        why = "; ".join(f"{address}: {error.strerror or error}" for address, error in problems.items())
        if not any(isinstance(error, ConnectionRefusedError) for error in problems.values()):
            raise WorldError(
                f"cannot reach {meeting.host}:{meeting.port} from this host ({why}). It comes from {meeting.text}: "
                "is that the host of rank 0, and may this one talk to it?"
            )
        if time.monotonic() > deadline:
            raise WorldError(
                f"rank {place.rank} of {place.size} found nobody listening at {meeting.host}:{meeting.port} ({why}). "
                f"It comes from {meeting.text}: rank 0 listens there, once it was started.{_loopback(place, problems)}"
            )
        time.sleep(0.05)


def _loopback(place: Place, addresses: dict[str, OSError]) -> str:
    if place.num_nodes == 1 or not all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses):
        return ""
    return " That address means this host itself, and there are several: take one that the other nodes can reach."


def _tcp_store(
    meeting: Meeting, address: str, deadline: float, *, host: bool = False, listener: int | None = None
) -> "Store":
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported from C++

    def make() -> "Store":
        return TCPStore(
            address,
            meeting.port,
            None,
            host,
            timeout=_rest(deadline),
            wait_for_workers=False,
            multi_tenant=host,
            master_listen_fd=listener,
        )

    late = (
        f"what listens at {address}:{meeting.port} ({meeting.text}) does not answer like rank 0. Another program may "
        "hold the port: choose another one."
    )
    try:
        return within(deadline, make, late)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, WorldError):
            raise
        raise WorldError(f"cannot meet the others at {meeting.text}: {first_line(error)}.") from None


def _rest(deadline: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()))
