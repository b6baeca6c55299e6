"""`python -m shoal.verbs.doctor.agent`: on each host, it does what it is asked, until its stdin ends.

Lines of JSON: {"do": "reach", ...} comes in, MARK and {"done": ...} or {"failed": "why"} goes out. What else a login
prints on stdout has no mark.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal import __version__
from shoal.errors import ShoalError
from shoal.launch.machine import num_cores
from shoal.verbs.doctor import host, network, storage

MARK = "shoal-doctor "


class Agent:
    """What it keeps between two requests: the run's key, and its listeners."""

    def __init__(self) -> None:
        self._key = b""
        self._listeners: list[network.Listener] = []
        self._left: list[dict[str, str]] = []
        self._does: dict[str, Callable[..., dict[str, Any]]] = {
            "begin": self.begin,
            "measure": host.measure,
            "time": self.time,
            "listen": self.listen,
            "hush": self.hush,
            "reach": self.reach,
            "knock": self.knock,
            "leave": self.leave,
            "find": storage.find,
            "speed": storage.speed,
            "clean": storage.clean,
            "free_port": self.free_port,
            "collect": self.collect,
        }

    def answer(self, line: str) -> dict[str, Any]:
        """Do what a line asks for."""
        told = json.loads(line)
        try:
            return {"done": self._does[told.pop("do")](**told)}
        except (OSError, ShoalError) as error:
            return {"failed": str(error)}

    def begin(self, *, secret: str) -> dict[str, Any]:
        self._key = secret.encode()
        return {"shoal": __version__}

    def time(self) -> dict[str, Any]:
        return {"time": time.time()}

    def listen(self, *, port: int) -> dict[str, Any]:
        self._listeners.append(network.Listener(port, self._key))
        return {"port": self._listeners[-1].port}

    def hush(self) -> dict[str, Any]:
        while self._listeners:
            self._listeners.pop().close()
        return {}

    def reach(self, *, addresses: list[str], port: int) -> dict[str, Any]:
        return network.reach(addresses=addresses, port=port, key=self._key)

    def leave(self, *, folder: str, token: str) -> dict[str, Any]:
        self._left.append({"folder": folder, "token": token})
        return storage.leave(folder=folder, token=token)

    def close(self) -> None:
        """What was left for the others goes, also where nobody could ask for that any more."""
        for left in self._left:
            storage.clean(**left)

    def knock(self, *, addresses: list[str], port: int) -> dict[str, Any]:
        """Only whether a port takes a connection."""
        connection, address, error = network.connect(addresses, port)
        if connection is not None:
            connection.close()
        return {"address": address, "error": error}

    def free_port(self, *, address: str) -> dict[str, Any]:
        with socket.create_server((address, 0)) as server:
            return {"port": server.getsockname()[1]}

    def collect(self, *, place: dict[str, Any], limit_s: float, multiplies: bool) -> dict[str, Any]:
        """A rank, in a process of its own."""
        told = {"place": place, "limit_s": limit_s, "multiplies": multiplies}
        text = json.dumps(told | {"parent": os.getpid(), "cores": num_cores()})
        words = [sys.executable, "-m", "shoal.verbs.doctor.rank", text]
        silent = subprocess.DEVNULL
        try:
            done = subprocess.run(words, capture_output=True, text=True, stdin=silent, timeout=3 * limit_s, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {3 * limit_s:.0f} s"}
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            return {"error": said[-1] if said else f"exit code {done.returncode}"}
        return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Answer until stdin ends; then end at once, in the middle of an answer too."""
    agent = Agent()
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        threading.Thread(target=_read, args=(asked,), daemon=True).start()
        while True:
            sys.stdout.write(MARK + json.dumps(agent.answer(asked.get())) + "\n")
            sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        agent.close()


def _read(asked: "queue.SimpleQueue[str]") -> None:
    """In a thread of its own, so that the end of stdin is seen while an answer is made."""
    for line in sys.stdin:
        asked.put(line)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
