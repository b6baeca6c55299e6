"""Hosts of a test's own on one machine: each with a network, a name, processes and folders that are its alone.

    switch (a namespace)  br0 ─┬─ p1 ══ eth0 10.77.0.1  h1     own host name, /etc/hosts, pids, /dev/shm,
                               ├─ p2 ══ eth0 10.77.0.2  h2     and a tmpfs at `net.own`
                               └─ p3 ══ eth0 10.77.0.3  h3     all else of the disk is one for all: `net.shared`

The fixture makes as many as a test asks for, and takes all away again, however the test ends:

    def test_two_hosts_talk(hosts):
        net = hosts(2)
        a, b = net
        server = b.start(sys.executable, "-m", "http.server", "8000")
        assert a.run("curl", "http://h2:8000").returncode == 0

Nothing is named outside of these namespaces, so tests may run side by side. A host is a shell that reads a pipe from
here: when it ends, or this process does, all of the host's processes are killed and its links are gone.

`net.ssh` is a folder for PATH with a stand-in for ssh that knows these hosts; run it outside of them (a console).
Needs root, Linux, and `ip`, `unshare`, `nsenter`; elsewhere the test is skipped, with the reason.
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60.0
_NAMESPACES = ("--net", "--uts", "--mount", "--pid")

_BECOME_A_HOST = """set -e
echo {name} > /proc/sys/kernel/hostname
mount --bind {folder}/{name}.hosts /etc/hosts
mount -t tmpfs -o size=2g own {folder}/own
mount -t tmpfs -o size=1g shm /dev/shm
ip link set lo up
echo ready
cat > /dev/null
exit 0
"""

# Options of ssh, then the host, then one line for its shell, which knows nothing of the caller's environment.
_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=${{1#*@}}; shift
pid=$(cat {folder}/$host.pid 2>/dev/null) || exit 255
[ -d /proc/$pid ] || exit 255
exec nsenter --target $pid --net --uts --mount --pid env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/ sh -c "$*"
"""


@functools.cache
def why_not() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(missing)}"
    words = ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "ip", "link", "add", "br0", "type", "bridge"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True)
class Host:
    """One of them, as seen from outside.

    Attributes:
        pid: of its first process, in the numbers of the test's own process.
    """

    name: str
    address: str
    pid: int
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def words(self, command: Sequence[str], cwd: Path | None, env: Mapping[str, str] | None) -> list[str]:
        """What runs a command there, started here."""
        enter = ["nsenter", "--target", str(self.pid), *_NAMESPACES]
        settings = [f"{name}={value}" for name, value in (env or {}).items()]
        return [*enter, "env", "-C", str(cwd or Path.cwd()), *settings, *command]

    def run(
        self,
        *command: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = LIMIT_S,
        check: bool = False,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command there and wait for its end; the caller's environment and `env` hold."""
        words = self.words(command, cwd, env)
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
        assert not check or done.returncode == 0, f"{self.name}: {' '.join(command)}\n{done.stdout}{done.stderr}"
        return done

    def start(
        self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a command there. Its process here is nsenter's; the one there ends with the host, if not before."""
        self.started.append(_start(self.words(command, cwd, env)))
        return self.started[-1]

    def ip(self, words: str) -> None:
        """Run `ip` there: `host.ip("link set eth0 mtu 1400")`."""
        self.run("ip", *words.split(), check=True)

    def tc(self, words: str) -> None:
        """Run `tc` there, or skip the test where this kernel has no such discipline."""
        done = self.run("tc", *words.split())
        if "unknown" in done.stderr or "not found" in done.stderr:
            pytest.skip(f"this kernel cannot do: tc {words} ({done.stderr.strip()})")
        assert done.returncode == 0, f"{self.name}: tc {words}: {done.stderr}"


class Net:
    """Hosts at one switch, and what a test does to their links."""

    def __init__(self, num_hosts: int, folder: Path) -> None:
        self.folder = folder
        self.own, self.shared, self.ssh = folder / "own", folder / "shared", folder / "ssh"
        for path in (self.own, self.shared, self.ssh):
            path.mkdir(parents=True)
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._consoles: list[subprocess.Popen[str]] = []
        self.hosts: list[Host] = []
        try:
            self._make(num_hosts)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def _make(self, num_hosts: int) -> None:
        self._switch = self._hold("switch", ["--net"], "echo ready\ncat > /dev/null\nexit 0\n")
        self._on_switch("link add br0 type bridge")
        self._on_switch("link set br0 up")
        addresses = {f"h{k}": f"10.77.0.{k}" for k in range(1, num_hosts + 1)}
        for k, (name, address) in enumerate(addresses.items(), 1):
            self.write_names(name, addresses)
            script = _BECOME_A_HOST.format(name=name, folder=self.folder)
            pid = self._hold(name, [*_NAMESPACES, "--mount-proc"], script)
            (self.folder / f"{name}.pid").write_text(str(pid))
            host = Host(name, address, pid)
            self._on_switch(f"link add p{k} type veth peer name eth0 netns {pid}")
            self._on_switch(f"link set p{k} master br0 up")
            host.ip(f"addr add {host.address}/24 dev eth0")
            host.ip("link set eth0 up")
            self.hosts.append(host)
        ssh = self.ssh / "ssh"
        ssh.write_text(_SSH.format(folder=self.folder))
        ssh.chmod(0o755)

    def write_names(self, host: str, names: Mapping[str, str]) -> None:
        """What /etc/hosts says on one host: addresses by name."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (self.folder / f"{host}.hosts").write_text("\n".join(lines) + "\n")

    def _hold(self, name: str, namespaces: Sequence[str], script: str) -> int:
        """Start the shell that keeps namespaces, and wait until it has made them; the pid of the shell."""
        words = ["unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", script]
        pipe, merged = subprocess.PIPE, subprocess.STDOUT
        holder = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=merged, text=True, start_new_session=True)
        self._holders[name] = holder
        assert holder.stdout is not None
        said = holder.stdout.readline()
        assert said == "ready\n", f"{name} was not made: {said}{holder.stdout.read()}"
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        return int(children[0])

    def _on_switch(self, words: str) -> None:
        self._switch_run("ip", *words.split())

    def _switch_run(self, *words: str) -> None:
        done = subprocess.run(
            ["nsenter", "--target", str(self._switch), "--net", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"

    def console(self, *command: str, cwd: Path, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        """Start a command outside of all hosts, where `ssh` reaches each of them."""
        settings = os.environ | {"PATH": f"{self.ssh}:{os.environ['PATH']}"} | dict(env or {})
        self._consoles.append(_start(command, cwd=cwd, env=settings))
        return self._consoles[-1]

    def limit(self, host: Host, rate: str) -> None:
        """What a host sends and gets goes at this rate: `10mbit`."""
        shape = f"root tbf rate {rate} burst 32kb latency 400ms"
        host.tc(f"qdisc replace dev eth0 {shape}")
        self._switch_run("tc", "qdisc", "replace", "dev", f"p{self.hosts.index(host) + 1}", *shape.split())

    def swallow_large(self, host: Host, mtu: int) -> None:
        """A black hole: on the way to and from a host, packets above `mtu` vanish, and nobody is told.

        Linux forwards what is still to be cut in segments whatever its size, so hosts cut it themselves.
        """
        for each in self.hosts:
            each.ip("link set eth0 gso_max_segs 1")
        for k, each in enumerate(self.hosts, 1):
            if each is host:
                self._on_switch(f"link set p{k} mtu {mtu}")

    def cut(self, host: Host) -> None:
        """Pull its cable."""
        self._on_switch(f"link set p{self.hosts.index(host) + 1} down")

    def mend(self, host: Host) -> None:
        """Plug it in again."""
        self._on_switch(f"link set p{self.hosts.index(host) + 1} up")

    def block(self, host: Host, port: int) -> None:
        """A firewall that drops: connections to this port of a host get no answer."""
        host.ip(f"rule add ipproto tcp sport {port} blackhole")

    def end(self, host: Host) -> None:
        """Pull its plug: every process of it is killed, and its link is gone."""
        self._end(host.name)

    def _end(self, name: str) -> None:
        holder = self._holders.pop(name)
        (self.folder / f"{name}.pid").unlink(missing_ok=True)
        holder.kill()  # its child, the first process of the host, dies with it (--kill-child), and all others with that
        holder.communicate(timeout=LIMIT_S)

    def close(self) -> None:
        """Take all away."""
        for name in reversed(list(self._holders)):
            self._end(name)
        for process in (*self._consoles, *(process for host in self.hosts for process in host.started)):
            process.kill()  # one that has been waited for is left alone
            process.communicate(timeout=LIMIT_S)


def _start(words: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Any:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        list(words), cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Net]]:
    """`hosts(3)`: three hosts h1, h2, h3 at one switch; gone when the test is over."""
    if reason := why_not():
        pytest.skip(reason)
    made: list[Net] = []

    def make(num_hosts: int) -> Net:
        made.append(Net(num_hosts, tmp_path / f"net{len(made)}"))
        return made[-1]

    try:
        yield make
    finally:
        for net in made:
            net.close()
