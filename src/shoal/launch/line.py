"""A connection between two parents: lines of JSON, each with a keyed hash of the run's secret; nothing is unpickled."""

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from shoal.errors import LaunchError

_MAX_LINE = 1 << 20


class Line:
    """A connection that speaks lines of JSON, each signed."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection, self._key = connection, key
        self._heard = b""
        self._writing = threading.Lock()
        self._left: list[dict[str, Any]] = []
        self.heard_at = time.monotonic()
        self.where: tuple[str, int] = ("", 0)
        with contextlib.suppress(OSError):  # it has gone already
            self.where = connection.getpeername()[:2]

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
        if self._left:
            left, self._left = self._left, []
            return left
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

    def first_words(self) -> dict[str, Any]:
        """The next message, for which the connection's time limit holds.

        Raises:
            LaunchError: nothing was said, or a stranger's words.
        """
        while True:
            try:
                messages = self.listen()
            except TimeoutError:
                messages = None
            if messages is None:
                raise LaunchError("nothing was said")
            if messages:
                first, *self._left = messages
                return first

    def _read(self, line: bytes) -> dict[str, Any]:
        signature, _, text = line.partition(b" ")
        if not hmac.compare_digest(signature, _sign(self._key, text)):
            raise LaunchError("who speaks there is of another run, or has another secret (--rdzv-id, SHOAL_SECRET)")
        told = json.loads(text)
        if not isinstance(told, dict):
            raise LaunchError("a message that is none")
        return told

    def has_left(self) -> bool:
        """Whether messages were read that nobody has taken."""
        return bool(self._left)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()


def _sign(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()
