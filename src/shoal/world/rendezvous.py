"""How the processes of a world find each other: reachable, all there, each rank once, or a clear reason."""

import contextlib
import datetime
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

from shoal.errors import WorldError
from shoal.world.place import Place

ROLL_CALL_S = 60.0  # how long the processes of a world may take to find each other


def fake_store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()  # type: ignore[no-untyped-call]  # untyped in torch


@contextlib.contextmanager
def loopback(place: Place, backend: str) -> Iterator[None]:
    """On one host gloo listens on loopback only; a name that resolves oddly cannot hurt, nor can a stranger."""
    name = "GLOO_SOCKET_IFNAME"
    if backend != "gloo" or place.num_nodes > 1 or name in os.environ:
        yield
        return
    os.environ[name] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ[name]


def roll_call(place: Place) -> Any:
    """The store of the rendezvous, once every rank has said that it is there, each once."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported from C++
    from torch.distributed.rendezvous import rendezvous

    deadline = time.monotonic() + ROLL_CALL_S
    _check_reachable(place, deadline)
    wait = datetime.timedelta(seconds=ROLL_CALL_S)
    try:
        store, _, _ = next(rendezvous(place.rendezvous, rank=place.rank, world_size=place.size, timeout=wait))
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise WorldError(
            f"rank {place.rank} of {place.size} cannot meet the others at {_meeting(place)}: {first}"
        ) from error
    # A restart by an elastic agent keeps its store: each try calls its own roll.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"shoal/{attempt}", store)
    me = f"{socket.gethostname()}:{os.getpid()}"
    if store.add(f"count/{place.rank}", 1) > 1:
        other = store.get(f"who/{place.rank}").decode()
        raise WorldError(
            f"rank {place.rank} is there twice: {other} and {me}. Either two processes were started with the same "
            f"rank, or {_meeting(place)} is left over from another run: choose another port or file."
        )
    store.set(f"who/{place.rank}", me)
    _wait_for_all(store, place, deadline)
    return store


def _wait_for_all(store: Any, place: Place, deadline: float) -> None:
    missing = list(range(place.size))
    while missing:
        missing = [rank for rank in missing if not store.check([f"who/{rank}"])]
        if missing and time.monotonic() > deadline:
            here = [r for r in range(place.size) if r not in missing]
            raise WorldError(
                f"{len(missing)} of {place.size} ranks did not come to {_meeting(place)} within {ROLL_CALL_S:.0f} s. "
                f"Missing: {span(missing)}. Present: {span(here)}. Start as many processes as the world says."
            )
        if missing:
            time.sleep(0.005)


def _meeting(place: Place) -> str:
    if place.rendezvous != "env://":
        return place.rendezvous
    return f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"


def _check_reachable(place: Place, deadline: float) -> None:
    """Name an address that cannot work within seconds; torch would print a C++ stack after minutes."""
    if place.rendezvous.startswith("file://"):
        return
    if place.rendezvous == "env://":
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    else:
        url = urlparse(place.rendezvous)
        host, port = url.hostname, str(url.port or "")
    if not host or not port:
        raise WorldError(f"no address to meet at: {_meeting(place)}. Set MASTER_ADDR and MASTER_PORT.")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise WorldError(f"cannot resolve {host!r} ({_meeting(place)}): {error}.") from None
    if place.rank == 0:
        return
    why: Exception | None = None
    while time.monotonic() < deadline:
        for family, kind, proto, _, address in addresses:
            with socket.socket(family, kind, proto) as probe:
                probe.settimeout(5)
                try:
                    probe.connect(address)
                    return
                except ConnectionRefusedError as error:
                    why = error  # rank 0 may not listen yet
                except OSError as error:
                    raise WorldError(
                        f"cannot reach {host}:{port} from this host ({_meeting(place)}): {error}."
                    ) from None
        time.sleep(0.05)
    raise WorldError(f"nobody listens at {host}:{port} after {ROLL_CALL_S:.0f} s ({_meeting(place)}): {why}.")


def span(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
