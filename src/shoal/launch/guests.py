"""Who may come to a parent while its run goes on: a machine that was away, one that has lost its leader, or the one
whose copies it keeps."""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import LaunchError
from shoal.launch.again import Terms
from shoal.launch.line import Line
from shoal.launch.nodes import Nodes
from shoal.launch.posts import Member, Post

LEADER = "leader.json"  # in the run's folder: where a machine that comes back finds the others


class Knows(Protocol):
    """What the parent knows when somebody comes."""

    nodes: Nodes
    post: Post
    leader: int
    terms: Terms
    members: dict[int, Member]
    lines: dict[int, Line]
    facts: Mapping[str, Any]


def why_not(known: Knows, hello: Mapping[str, Any]) -> str:
    """Why it is sent away; empty where it may stay."""
    node = hello["node"]
    if "heir" in hello or "carries" in hello:
        is_of_us = hello.get("heir", hello.get("carries")) == known.post.generation and node in known.members
        return "" if is_of_us else "it is of another generation"
    if not known.terms.is_elastic:
        return "the run has begun; with --elastic MIN:MAX a machine may come back"
    if known.leader != known.nodes.rank:
        return f"node {known.leader} leads this run"
    if node in known.lines or node == known.nodes.rank:
        return f"node {node} is there already"
    for name, own in known.facts.items():
        if hello["facts"].get(name) != own:
            return f"{name} differs: {own} here, {hello['facts'].get(name)} on {hello['host']}"
    return ""


def receive(connection: socket.socket, key: bytes, known: Knows) -> tuple[Line, dict[str, Any], int] | None:
    """The line to somebody who has come, the first words, and the node; None for one who was told why not."""
    connection.settimeout(2.0)
    line = Line(connection, key)
    try:
        hello = line.first_words()
        node = int(hello["node"])
        why = why_not(known, hello)
    except (LaunchError, ValueError, KeyError):
        why = "this run has another id or secret (--rdzv-id, SHOAL_SECRET)"
    if why:
        line.tell({"refused": why})
        line.close()
        return None
    connection.setblocking(False)
    return line, hello, node


def member_of(hello: Mapping[str, Any], line: Line) -> Member:
    """Who has said hello: it can be reached where its words came from."""
    return Member(host=str(hello["host"]), address=line.where[0], port=int(hello["port"]), slots=int(hello["ranks"]))


def reach(heir: Member, key: bytes, hello: Mapping[str, Any], *, within_s: float) -> Line | None:
    """A line to the machine that leads next, with the first words said; None where it cannot be reached."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            line = Line(socket.create_connection((heir.address, heir.port), timeout=2.0), key)
            line.tell(hello)
            line.connection.setblocking(False)
            return line
        time.sleep(0.1)
    return None


def say_where(folder: Path, address: str, port: int) -> None:
    """Write down where the leader of a run listens."""
    with contextlib.suppress(OSError):  # then a machine that comes back looks at the address of node 0 alone
        (folder / LEADER).write_text(json.dumps({"address": address, "port": port}))
