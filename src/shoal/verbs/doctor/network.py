"""Two hosts talk over sockets of their own: connections, echoes byte for byte, latency, bandwidth, the largest packet.

here                                        there
{"size": n, "times": k}, signed     ──►     reads it; a stranger is not answered
                                    ◄──     {"ready": true}, signed
n bytes                             ──►     k times
                                    ◄──     one byte: all are here
                                    ◄──     the n bytes
"""

import contextlib
import hashlib
import random
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from shoal.errors import LaunchError, WorldError
from shoal.launch.line import Line
from shoal.world.network import resolve

SIZES = (64 * 2**10, 2**20, 8 * 2**20)
SILENT_S = 3.0  # without a byte: what was sent is lost, not late
_PATIENT_S = 12.0  # of the listener, so that whoever asks is the first to know
_CONNECT_S = 3.0
_PINGS, _REPEATS = 50, 3
_BRIEF_S, _LONG_S = 0.3, 2.0  # a message that is expected to take longer is sent once; or not at all
_CHUNK = 64 * 2**10
_PROBE_S, _PROBES = 0.2, 2
_IP_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 3  # linux/in.h: never cut in pieces, whatever the kernel knows of the path
_MARK = 16  # bytes of the key with which a probe begins


class Listener:
    """Answers at a port, of TCP and of UDP, until it is closed."""

    def __init__(self, port: int, key: bytes) -> None:
        self._key = key
        self._tcp = _server(port)
        self.port: int = self._tcp.getsockname()[1]
        self._udp = socket.socket(self._tcp.family, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):  # without it, the largest packet is not known
            self._udp.bind(self._tcp.getsockname())
        for work in (self._accept, self._acknowledge):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        for each in (self._tcp, self._udp):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # or a thread would wait in it for ever
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._tcp.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, LaunchError, ValueError, KeyError):
            _set_up(connection, _PATIENT_S)
            line = Line(connection, self._key)
            while asked := line.listen():
                size, times = int(asked[0]["size"]), int(asked[0]["times"])
                line.tell({"ready": True})
                for _ in range(times):
                    data = _receive(connection, size)
                    connection.sendall(b"!")
                    _send(connection, data)

    def _acknowledge(self) -> None:
        mark = hashlib.sha256(self._key).digest()[:_MARK]
        while True:
            try:
                data, source = self._udp.recvfrom(65535)
            except OSError:
                return
            if data.startswith(mark):
                with contextlib.suppress(OSError):
                    self._udp.sendto(mark + len(data).to_bytes(4), source)


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _set_up(connection: socket.socket, silent_s: float) -> None:
    connection.settimeout(silent_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(connection: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    for at in range(0, len(data), _CHUNK):  # the time limit is then one of progress
        connection.sendall(view[at : at + _CHUNK])


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        read = connection.recv_into(view[at:])
        if read == 0:
            raise ConnectionResetError("the other side hung up")
        at += read
    return bytes(data)


def connect(addresses: Sequence[str], port: int) -> tuple[socket.socket | None, str, str]:
    """The first address that answers: the connection, the address, and else why none did.

    Args:
        addresses: or names, each of which may stand for several.
    """
    why, numeric = [], []
    for name in addresses:
        try:
            numeric += [endpoint.address for endpoint in resolve(name, port, name)]
        except WorldError:
            why.append(f"{name} is unknown")
    for address in dict.fromkeys(numeric):
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_S), address, ""
        except OSError as error:
            told = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            why.append(f"{address}:{port}: {told}")
    return None, "", "; ".join(why) or "no address is known"


def reach(*, addresses: Sequence[str], port: int, key: bytes) -> dict[str, Any]:
    """What there is to know of the way to a listener; fields of a `Link`."""
    connection, address, error = connect(addresses, port)
    if connection is None:
        return {"error": error}
    visit = _Visit(connection, key)
    with connection:
        try:
            visit.run()
        except _LostError as lost:
            visit.found["lost"] = (lost.size, lost.way)
        except (OSError, LaunchError) as failure:
            visit.found["error"] = f"{address}:{port} took the connection, and then: {failure}"
    if "lost" in visit.found:
        visit.found["largest_packet"] = largest_packet(address, port, key)
    return visit.found | {"address": address}


class _LostError(Exception):
    """Nothing came any more of a message of this size, on this way."""

    def __init__(self, size: int, way: str) -> None:
        super().__init__(f"{size} bytes {way}")
        self.size, self.way = size, way


class _Visit:
    """One connection, on which messages grow."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        _set_up(connection, SILENT_S)
        self._connection, self._line = connection, Line(connection, key)
        self.found: dict[str, Any] = {"there": [], "back": []}

    def run(self) -> None:
        trips = self._echo(1, _PINGS)
        self.found["latency_s"] = latency_s = min(there for there, _ in trips) / 2
        s_per_byte = 0.0  # of the size before
        for size in SIZES:
            if size * s_per_byte > _LONG_S:
                return
            trips = self._echo(size, 1 if size * s_per_byte > _BRIEF_S else _REPEATS)
            if "damaged" in self.found:
                return
            self.found["there"] += [(size, max(there - latency_s, 1e-9)) for there, _ in trips]
            self.found["back"] += [(size, max(back, 1e-9)) for _, back in trips]
            self.found["large_bytes"] = size
            s_per_byte = min(there for there, _ in trips) / size

    def _echo(self, size: int, times: int) -> list[tuple[float, float]]:
        """Seconds until all had arrived there, and from then until all was back."""
        data = random.Random(size).randbytes(size)
        self._line.tell({"size": size, "times": times})
        if not self._line.listen():
            raise ConnectionResetError("no answer; is it another program?")
        found, way = [], "there"
        try:
            for _ in range(times):
                way, began = "there", time.perf_counter()
                _send(self._connection, data)
                _receive(self._connection, 1)
                way, middle = "back", time.perf_counter()
                if _receive(self._connection, size) != data:
                    self.found["damaged"] = size
                found.append((middle - began, time.perf_counter() - middle))
        except TimeoutError:
            raise _LostError(size, way) from None
        return found


def largest_packet(address: str, port: int, key: bytes) -> int | None:
    """Bytes of the largest packet that gets there, with its headers; None where no packet of UDP does."""
    is_v6 = ":" in address
    headers = 48 if is_v6 else 28
    with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(_PROBE_S)
        probe.connect((address, port))
        if not is_v6:  # IPv6 cuts nothing on its way
            probe.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
        mark = hashlib.sha256(key).digest()[:_MARK]
        passes, fails = _MARK, 9217 - headers  # above any Ethernet
        if not _arrives(probe, mark, passes):
            return None
        while fails - passes > 1:
            middle = (passes + fails) // 2
            if _arrives(probe, mark, middle):
                passes = middle
            else:
                fails = middle
    return passes + headers


def _arrives(probe: socket.socket, mark: bytes, size: int) -> bool:
    for _ in range(_PROBES):  # a single one may be lost for any reason
        try:
            probe.send(mark.ljust(size, b"."))
            while True:
                if probe.recv(_MARK + 4) == mark + size.to_bytes(4):
                    return True
        except OSError:  # too long for this host's own interface, refused, or no answer
            continue
    return False
