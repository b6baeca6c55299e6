"""The parents of one run, one on each machine, meet before any rank starts: the world that was asked for, or none.

node 1  hello: 4 ranks, shoal 0.1, torch 2.13, train.py 3fa1.. ──►  node 0: all there? all alike?
node 0  "you are ranks 4 to 7 of 8; the store is at a:41723"   ──►  each starts its ranks
"""

import contextlib
import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.again import Terms
from shoal.launch.crew import Crew
from shoal.launch.guests import LEADER, member_of
from shoal.launch.line import Line
from shoal.launch.nodes import Nodes, listening, secret
from shoal.launch.posts import Claim, Member, OpenStore


@contextlib.contextmanager
def meet(
    nodes: Nodes,
    num_ranks: int,
    facts: Mapping[str, Any],
    open_store: OpenStore,
    *,
    terms: Terms | None = None,
    claim: Claim | None = None,
    folder: str = "",
) -> Iterator[Crew]:
    """All machines of the run, or none: within 30 s (`nodes.meet_s`) each has come, with the same code and versions.

    Where the run is elastic and goes on already, this machine waits until the others let it in.

    Args:
        num_ranks: that this machine will start.
        facts: what must be the same on each machine, by name.
        open_store: called on the machine that leads, with its address, once for each generation.
        terms: when ranks are started again, and with how few.
        claim: takes a number in the run's folder.
        folder: of the run; that of node 0 holds.

    Raises:
        LaunchError: who is missing, who is there twice, what differs and where.
    """
    key = hashlib.sha256(f"{nodes.run_id}\0{secret()}".encode()).digest()
    hello = {"node": nodes.rank, "num": nodes.num, "ranks": num_ranks, "host": socket.gethostname(), "facts": facts}
    options = {"terms": terms or Terms(), "claim": claim, "facts": facts, "open_store": open_store}
    crew = None
    if terms is not None and terms.is_elastic and folder:
        crew = _come_back(nodes, hello, key, Path(folder) / LEADER, options)
    if crew is None:
        begin = _host if nodes.rank == 0 else _join
        crew = begin(nodes, hello, key, {**options, "folder": folder})
    for line in crew.lines.values():
        line.connection.setblocking(False)
    try:
        yield crew
    finally:
        crew.close()


def _host(nodes: Nodes, own: dict[str, Any], key: bytes, options: dict[str, Any]) -> Crew:
    deadline = time.monotonic() + nodes.meet_s
    lines: dict[int, Line] = {}
    hellos = {0: own}
    listener = _listener(nodes, deadline)
    try:
        while len(hellos) < nodes.num:
            node, line, hello = _welcome(listener, nodes, key, hellos, deadline)
            lines[node], hellos[node] = line, hello
        check_alike(hellos)
    except LaunchError as error:
        for line in lines.values():
            line.tell({"refused": str(error)})
            line.close()
        listener.close()
        raise
    members = {node: member_of(hellos[node], line) for node, line in lines.items()}
    members[0] = Member(host=own["host"], address=nodes.address, port=nodes.port, slots=own["ranks"])
    crew = Crew(nodes=nodes, key=key, listener=listener, members=members, lines=lines, **options)
    crew.begin(sum(member.slots for member in members.values()))
    return crew


def _listener(nodes: Nodes, deadline: float) -> socket.socket:
    while time.monotonic() < deadline:  # the name of a pod is known once the pod is ready: later than it looks here
        with contextlib.suppress(socket.gaierror):
            socket.getaddrinfo(nodes.address, nodes.port)
            break
        time.sleep(0.2)
    try:
        return socket.create_server((listening(nodes.address), nodes.port), backlog=nodes.num)
    except OSError as error:
        raise LaunchError(
            f"node 0 cannot listen at {nodes.address}:{nodes.port} ({error.strerror}). --master-addr must be an "
            "address of this machine, and the port free: another run may have it."
        ) from None


def _welcome(
    listener: socket.socket, nodes: Nodes, key: bytes, hellos: Mapping[int, dict[str, Any]], deadline: float
) -> tuple[int, Line, dict[str, Any]]:
    """The next machine of this run; strangers are sent away and do not count."""
    while True:
        absent = sorted(set(range(nodes.num)) - set(hellos))
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise LaunchError(
                f"{len(hellos)} of {nodes.num} nodes came to {nodes.address}:{nodes.port} in {nodes.meet_s:.0f} s. "
                f"Missing: node {', '.join(map(str, absent))}. Start shoal there too, with the same --nnodes and "
                "address."
            ) from None
        connection.settimeout(5.0)
        line = Line(connection, key)
        try:
            hello = line.first_words()
        except (LaunchError, ValueError, KeyError):
            line.tell({"refused": "this run has another id or secret (--rdzv-id, SHOAL_SECRET)"})
            line.close()
            continue
        if hello["num"] != nodes.num or hello["node"] not in absent:
            line.tell({"refused": _why_not(hello, nodes, hellos)})
            line.close()
            raise LaunchError(_why_not(hello, nodes, hellos))
        return int(hello["node"]), line, hello


def _why_not(hello: Mapping[str, Any], nodes: Nodes, hellos: Mapping[int, dict[str, Any]]) -> str:
    if hello["num"] != nodes.num:
        return f"{hello['host']} says --nnodes {hello['num']}, and node 0 says {nodes.num}."
    other = hellos.get(hello["node"], {}).get("host", "nobody")
    return (
        f"node {hello['node']} is there twice: on {other} and on {hello['host']}. Each machine needs a --node-rank of "
        "its own."
    )


def check_alike(hellos: Mapping[int, dict[str, Any]]) -> None:
    """Refuse machines that would run something else than node 0.

    Raises:
        LaunchError: naming the fact, both hosts, and what each has.
    """
    first = hellos[0]
    for node in sorted(hellos):
        for name in dict.fromkeys((*first["facts"], *hellos[node]["facts"])):
            ours, theirs = (hello["facts"].get(name, "nothing") for hello in (first, hellos[node]))
            if ours != theirs:
                raise LaunchError(
                    f"{name} differs: {ours} on node 0 ({first['host']}), {theirs} on node {node} "
                    f"({hellos[node]['host']}). All machines must run the same."
                )


def _join(nodes: Nodes, own: dict[str, Any], key: bytes, options: dict[str, Any]) -> Crew:
    deadline = time.monotonic() + nodes.meet_s
    line = Line(_reach(nodes, deadline), key)
    return _enter(nodes, own, key, line, options)


def _come_back(nodes: Nodes, own: dict[str, Any], key: bytes, path: Path, options: dict[str, Any]) -> Crew | None:
    """To a run that goes on without this machine; None where none does."""
    try:
        place = json.loads(path.read_text())
        connection = socket.create_connection((str(place["address"]), int(place["port"])), timeout=2.0)
    except (OSError, ValueError, KeyError):
        return None
    return _enter(nodes, own, key, Line(connection, key), options)


def _enter(nodes: Nodes, own: dict[str, Any], key: bytes, line: Line, options: dict[str, Any]) -> Crew:
    """Say hello, and wait until the leader says where this machine stands."""
    listener = socket.create_server((line.connection.getsockname()[0], 0), backlog=nodes.num)
    line.connection.settimeout(nodes.meet_s + 5.0)
    line.tell({**own, "port": listener.getsockname()[1]})
    why, told = "", {}
    try:
        while "next" not in told and not why:
            told = line.first_words()
            why = str(told.get("refused", ""))
            if told.get("final") and told.get("next") is None:
                why = "the run has ended"
    except (LaunchError, ValueError) as error:
        why = str(error) if str(error) != "nothing was said" else "it says nothing"
    if why:
        line.close()
        listener.close()
        host, port = line.where
        raise LaunchError(f"the machine that leads, at {host}:{port}, refuses this one: {why}")
    members = {int(node): Member(**row) for node, row in told["roster"].items()}
    leader = int(told["leader"])
    crew = Crew(nodes=nodes, key=key, listener=listener, members=members, lines={leader: line}, **options)
    crew.joined(told)
    return crew


def _reach(nodes: Nodes, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((nodes.address, nodes.port), timeout=2.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"node 0 cannot be reached at {nodes.address}:{nodes.port} within {nodes.meet_s:.0f} s "
                    f"({error.strerror or error}). Is it started, is the address right from here, does a firewall let "
                    "the port through?"
                ) from None
            time.sleep(0.2)


def same_everywhere(files: Mapping[str, str]) -> dict[str, Any]:
    """Versions, and hashes of files by the name that people know them by."""
    found: dict[str, Any] = {"python": ".".join(platform.python_version_tuple()[:2])}
    found |= {package: _version(package) for package in ("shoal", "torch")}
    for name, path in files.items():
        if os.path.isfile(path):
            with open(path, "rb") as file:
                found[name] = hashlib.sha256(file.read()).hexdigest()[:16]
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
