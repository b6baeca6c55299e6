"""Which machines take part in a start, and where they meet: torchrun's words."""

import ipaddress
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from shoal.errors import LaunchError

DEFAULT_PORT = 29500
MEET_S = 30.0  # in which all must have come, unless --rdzv-conf join_timeout says more
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a run, and which of them this is; the first one is where all meet.

    Attributes:
        run_id: of this run; machines of another run at the same place are refused.
        meet_s: seconds in which all must have come.
    """

    num: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    run_id: str = "none"
    meet_s: float = MEET_S

    @staticmethod
    def of(
        *,
        nnodes: str | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        rdzv_endpoint: str | None = None,
        rdzv_id: str | None = None,
        rdzv_conf: str | None = None,
        standalone: bool = False,
    ) -> "Nodes | None":
        """From the flags; None for this machine alone.

        Raises:
            LaunchError: flags that contradict each other, or leave open where to meet.
        """
        num = _number(nnodes or "1")
        if standalone and num > 1:
            raise LaunchError(f"--standalone means this machine alone, and --nnodes says {num}. Leave one of them out.")
        if standalone or num == 1:
            if node_rank:
                raise LaunchError(f"--node-rank {node_rank} of one node: say how many there are with --nnodes.")
            return None
        if node_rank is None:
            raise LaunchError(
                f"--nnodes {num} needs --node-rank on each machine: 0 on the one that all can reach, the others 1 to "
                f"{num - 1}."
            )
        if not 0 <= node_rank < num:
            raise LaunchError(f"--node-rank {node_rank} of --nnodes {num}: nodes count from 0 to {num - 1}.")
        address, port = _endpoint(rdzv_endpoint, master_addr, master_port)
        meet_s = _join_timeout(rdzv_conf)
        return Nodes(num=num, rank=node_rank, address=address, port=port, run_id=rdzv_id or "none", meet_s=meet_s)


def check_words(*, rdzv_backend: str | None, use_env: bool) -> list[str]:
    """What there is to say about words of torchrun's that mean nothing more here.

    Raises:
        LaunchError: one that asks for what is not done.
    """
    if rdzv_backend not in (None, "static", "c10d"):
        raise LaunchError(f"--rdzv-backend {rdzv_backend}: machines meet at --master-addr alone; leave it out.")
    return ["--use-env is how it always is now: read LOCAL_RANK from the environment."] if use_env else []


def secret() -> str:
    """What machines of one run share and strangers do not: SHOAL_SECRET; empty where nobody has set it."""
    return os.environ.get("SHOAL_SECRET", "")


def listening(address: str) -> str:
    """Where node 0 listens: at its address; everywhere, where only this host takes the name for loopback.

    Debian writes the host's own name into /etc/hosts as 127.0.1.1, which no other machine can reach.
    """
    if address in _LOCAL_NAMES:
        return address
    try:
        found = {str(row[4][0]) for row in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except socket.gaierror:
        return address  # whoever binds to it says so
    is_name = address not in found
    return "" if is_name and all(ipaddress.ip_address(each).is_loopback for each in found) else address


def _number(nnodes: str) -> int:
    if ":" in nnodes:
        raise LaunchError(f"--nnodes {nnodes}: a run has exactly the machines that it is told; say one number.")
    if not nnodes.isdecimal() or not int(nnodes):
        raise LaunchError(f"--nnodes is {nnodes!r}; it must be a whole number from 1 on.")
    return int(nnodes)


def _join_timeout(conf: str | None) -> float:
    """torchrun's `join_timeout=600`, seconds; it has more of such, which mean nothing here."""
    if conf is None:
        return MEET_S
    name, _, text = conf.partition("=")
    if name.strip() != "join_timeout" or not text.strip().isdecimal() or not int(text):
        raise LaunchError(
            f"--rdzv-conf {conf}: join_timeout=SECONDS is all that can be said here: how long machines wait for each "
            f"other before the run, {MEET_S:.0f} s otherwise."
        )
    return float(text)


def _endpoint(endpoint: str | None, address: str | None, port: int | None) -> tuple[str, int]:
    if endpoint is not None and address is not None:
        raise LaunchError("--rdzv-endpoint and --master-addr both say where to meet. Leave one of them out.")
    if endpoint is not None:
        parts = urlsplit(f"//{endpoint}")
        try:
            address, port = parts.hostname, parts.port or port
        except ValueError:
            raise LaunchError(f"--rdzv-endpoint is {endpoint!r}; it must be HOST:PORT.") from None
    if not address:
        raise LaunchError(
            "several nodes need a place to meet: --master-addr HOST --master-port PORT of node 0, the same on each."
        )
    if address in _LOCAL_NAMES and port is None:
        port = DEFAULT_PORT
    return address, port or DEFAULT_PORT
