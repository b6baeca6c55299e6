"""The parents of one run, one on each machine, while it runs: alive once a second, and at the end how it ended.

Lines of JSON, each with a keyed hash of the run's secret; nothing is unpickled. Times are each machine's own monotonic
clock, so machines whose clocks differ live as long as all others.
"""

import contextlib
import functools
import hashlib
import hmac
import json
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.afar import Afar
from shoal.launch.again import Ended
from shoal.launch.group import Post
from shoal.launch.nodes import Nodes
from shoal.launch.outcome import FAILED, ON_REQUEST, Failure, Outcome

ALIVE_S = 1.0
LOST_S = 10.0  # without a word
PART_S = 15.0  # at the end, for the others to tell how it went
_MAX_LINE = 1 << 20


class Line:
    """A connection that speaks lines of JSON, each signed."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection, self._key = connection, key
        self._heard = b""
        self._writing = threading.Lock()
        self.heard_at = time.monotonic()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message; one that nobody hears any more is lost."""
        text = json.dumps(message).encode()
        line = _sign(self._key, text) + b" " + text + b"\n"
        with self._writing, contextlib.suppress(OSError):
            self.connection.sendall(line)

    def listen(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None when the other side is gone.

        Raises:
            LaunchError: a stranger's words.
        """
        try:
            data = self.connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data or len(self._heard) > _MAX_LINE:
            return None
        self.heard_at = time.monotonic()
        *lines, self._heard = (self._heard + data).split(b"\n")
        return [self._read(line) for line in lines]

    def _read(self, line: bytes) -> dict[str, Any]:
        signature, _, text = line.partition(b" ")
        if not hmac.compare_digest(signature, _sign(self._key, text)):
            raise LaunchError("who speaks there is of another run, or has another secret (--rdzv-id, SHOAL_SECRET)")
        told = json.loads(text)
        if not isinstance(told, dict):
            raise LaunchError("a message that is none")
        return told

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()


def _sign(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()


@dataclass
class Crew:
    """The other machines, as this one knows them.

    Attributes:
        lines: by node; node 0 has one to each, all others one to node 0.
        endings: by node, how it ended.
        trouble: why this machine must end; empty while all is well.
        pulled: it ended for that, and not because somebody here asked for it.
    """

    nodes: Nodes
    post: Post
    hosts: list[str]
    lines: dict[int, Line]
    endings: dict[int, dict[str, Any]] = field(default_factory=dict)
    trouble: str = ""
    pulled: bool = False
    _final: dict[str, Any] | None = None
    _is_over: bool = False
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.afar = Afar(self.hosts, self._send)

    def _send(self, node: int, told: Mapping[str, Any]) -> None:
        line = self.lines.get(node)
        if line is not None:
            line.tell({"afar": told})

    @property
    def fds(self) -> tuple[int, ...]:
        """What no rank may hold open, or nobody would see that this process is gone."""
        return tuple(line.connection.fileno() for line in self.lines.values())

    def pull(self, asked: list[int]) -> None:
        """End this machine's ranks, unless somebody has asked for it already."""
        if not asked:
            self.pulled = True
            asked.append(signal.SIGINT)

    def watch(self, asked: list[int]) -> None:
        """From now on, listen and be heard; when this machine must end, `asked` says so."""
        on_trouble = functools.partial(self.pull, asked)
        self._thread = threading.Thread(target=self._watch, args=(on_trouble,), daemon=True)
        self._thread.start()

    def _watch(self, on_trouble: Callable[[], None]) -> None:
        spoke = 0.0
        while not self._is_over:
            if time.monotonic() - spoke > ALIVE_S:
                spoke = time.monotonic()
                for line in list(self.lines.values()):
                    line.tell({"alive": True})
            trouble = self._hear()
            if trouble and not self.trouble:
                self.trouble = trouble
                for line in list(self.lines.values()) if self.nodes.rank == 0 else ():
                    line.tell({"end": trouble})
                on_trouble()

    def _hear(self) -> str:
        """What has come in a moment; why to end, if so."""
        known = {line.connection: node for node, line in self.lines.items()}
        if not known:
            time.sleep(ALIVE_S / 4)
            return ""
        with contextlib.suppress(OSError, ValueError):
            ready, _, _ = select.select(list(known), [], [], ALIVE_S / 4)
            for connection in ready:
                trouble = self._take(known[connection])
                if trouble:
                    return trouble
        for node, line in list(self.lines.items()):
            silent_s = time.monotonic() - line.heard_at
            if silent_s > LOST_S and node not in self.endings:
                return f"{self._name(node)} has said nothing for {silent_s:.0f} s"
        return ""

    def _take(self, node: int) -> str:
        try:
            messages = self.lines[node].listen()
        except (LaunchError, ValueError):
            messages = None
        if messages is None:
            self.lines.pop(node).close()
            return "" if node in self.endings or self._final is not None else f"{self._name(node)} is gone"
        for told in messages:
            if "afar" in told:
                self.afar.hear(node, told["afar"])
            if "ended" in told:
                self.endings[node] = told["ended"]
                code = told["ended"]["exit_code"]
                if code:
                    return f"{self._name(node)} {'was asked to end' if code in ON_REQUEST else 'failed'}"
            if "final" in told:
                self._final = told["final"]
            if "end" in told:
                return str(told["end"])
        return ""

    def _name(self, node: int) -> str:
        return f"node {node} ({self.hosts[node]})"

    def conclude(self, ending: dict[str, Any]) -> dict[str, Any]:
        """Tell how this machine's ranks ended, and learn how all did: that of the node that failed first, if any."""
        self.endings[self.nodes.rank] = ending
        deadline = time.monotonic() + PART_S
        if self.nodes.rank != 0:
            for line in self.lines.values():
                line.tell({"ended": ending})
            while self._final is None and 0 in self.lines and (time.monotonic() < deadline or not self.trouble):
                time.sleep(0.02)
            return self._final or ending
        while len(self.endings) < self.nodes.num and (time.monotonic() < deadline or not self.trouble):
            if not self.lines:
                break
            time.sleep(0.02)
        final = first_cause(self.endings)
        for line in self.lines.values():
            line.tell({"final": final})
        return final

    def own(self, asked: list[int]) -> list[int]:
        """What was asked for here, and not by another machine."""
        return [] if self.pulled else asked

    def settle(self, outcome: Outcome, ended: Ended, asked: list[int]) -> tuple[Outcome, Post | None, str]:
        """How all ended; several machines are not started again."""
        outcome = concluded(self, outcome)
        if self.pulled:
            asked.clear()
        return outcome, None, ""

    def close(self) -> None:
        """At the end."""
        self._is_over = True
        if self._thread is not None:
            self._thread.join(timeout=2 * ALIVE_S)
        for line in self.lines.values():
            line.close()


def first_cause(endings: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """The ending that explains the others: a failure that is no echo of another one, of the lowest node."""
    failed = [(bool(told.get("is_echo")), node) for node, told in endings.items() if told["exit_code"]]
    node = min(failed)[1] if failed else min(endings)
    return {**endings[node], "node": node}


def concluded(crew: Crew, outcome: Outcome) -> Outcome:
    """How the whole run ended: this machine's outcome, or that of the one that failed first."""
    first = outcome.failures[0] if outcome.failures else None
    own = {
        "exit_code": outcome.exit_code,
        "is_echo": first is None or first.is_echo,
        "rank": first.rank if first else crew.post.first,
        "type": first.type if first else "",
        "message": first.message if first else crew.trouble or f"exit code {outcome.exit_code}",
        "at": first.user_frame if first else "",
        "at_s": first.at_s if first else 0.0,
        "is_lesson": bool(first and first.is_lesson),
    }
    final = crew.conclude(own)
    if outcome.exit_code in ON_REQUEST and not crew.pulled:
        return outcome  # somebody asked for it here
    if final["exit_code"] and not final["is_echo"] and final.get("node", crew.nodes.rank) != crew.nodes.rank:
        return replace(outcome, exit_code=int(final["exit_code"]), failures=(_far(crew, final),), others=())
    if crew.trouble and (first is None or first.is_echo):
        return _lost(crew, outcome)
    return outcome


def _far(crew: Crew, final: dict[str, Any]) -> Failure:
    """What failed first on another machine."""
    node = int(final["node"])
    return Failure(
        rank=int(final["rank"]),
        exit_code=int(final["exit_code"]),
        type=str(final["type"]),
        message=f"{final['message']}\n  on node {node} ({crew.hosts[node]})",
        user_frame=str(final["at"]),
        at_s=float(final["at_s"]),
        is_lesson=bool(final["is_lesson"]),
    )


def _lost(crew: Crew, outcome: Outcome) -> Outcome:
    failure = Failure(rank=crew.post.first, exit_code=FAILED, type="NodeLost", message=crew.trouble, is_lesson=True)
    return replace(outcome, exit_code=FAILED, failures=(failure,), others=())
