"""The hosts that other tests stand on: each is its own, what is done to a link is felt, and nothing is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from netns import Host, why_not

SERVE = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        size = int.from_bytes(connection.recv(8))
        while size > 0 and (data := connection.recv(1 << 20)):
            size -= len(data)
        connection.sendall(b"all")
"""
SEND = """
import socket, sys, time
host, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
began = time.monotonic()
try:
    with socket.create_connection((host, port), timeout=1.5) as connection:
        connection.sendall(size.to_bytes(8) + bytes(size))
        print(connection.recv(3) == b"all", time.monotonic() - began)
except TimeoutError:
    print("timeout", time.monotonic() - began)
"""


def serve(host: Host, port: int) -> None:
    server = host.start(sys.executable, "-c", SERVE, str(port))
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"


def send(host: Host, to: str, port: int, size: int) -> tuple[str, float]:
    said, seconds = host.run(sys.executable, "-c", SEND, to, str(port), str(size), check=True).stdout.split()
    return said, float(seconds)


def test_each_host_has_its_own_name_address_processes_and_folder(hosts):
    net = hosts(3)
    (net.shared / "seen").write_text("by all")
    for k, host in enumerate(net, 1):
        assert host.run("uname", "-n").stdout == f"h{k}\n"
        host.run("sh", "-c", f"echo {host.name} > {net.own}/mine", check=True)
    for host in net:
        assert host.run("cat", f"{net.own}/mine", f"{net.shared}/seen").stdout == f"{host.name}\nby all"
        resolved = "import socket; print([socket.gethostbyname(f'h{k}') for k in (1, 2, 3)])"
        assert host.run(sys.executable, "-c", resolved).stdout == "['10.77.0.1', '10.77.0.2', '10.77.0.3']\n"
        assert host.run("sh", "-c", "echo $PPID").stdout.strip().isdecimal()
    assert list(net.own.iterdir()) == []


def test_a_link_carries_is_slow_swallows_is_blocked_and_is_cut_as_asked(hosts):
    net = hosts(2)
    a, b = net
    serve(b, 7000)
    serve(b, 7001)
    assert send(a, "h2", 7000, 1 << 20)[0] == "True"
    net.block(b, 7001)
    assert send(a, "h2", 7001, 1)[0] == "timeout"
    net.limit(b, "10mbit")
    said, seconds = send(a, "h2", 7000, 500_000)
    assert (said, seconds > 0.3) == ("True", True)
    net.swallow_large(b, 1200)
    assert send(a, "h2", 7000, 500)[0] == "True"
    assert send(a, "h2", 7000, 100_000)[0] == "timeout"
    net.cut(b)
    assert send(a, "h2", 7000, 1)[0] == "timeout"


def test_ssh_reaches_a_host_until_its_plug_is_pulled_and_nothing_is_left(hosts):
    net = hosts(2)
    call = ("ssh", "-o", "BatchMode=yes", "user@h2", "uname -n; echo $FOREIGN")
    done = net.console(*call, cwd=net.shared, env={"FOREIGN": "x"})
    assert done.communicate(timeout=30)[0] == "h2\n\n"
    sleeper = net[1].start("sleep", "600")
    net.end(net[1])
    sleeper.wait(timeout=30)
    gone = net.console(*call, cwd=net.shared)
    gone.communicate(timeout=30)
    assert gone.returncode == 255


def test_hosts_end_when_whoever_made_them_is_killed(tmp_path, hosts):
    code = (
        "from pathlib import Path; from netns import Net\n"
        f"net = Net(1, Path({str(tmp_path / 'x')!r})); print(net[0].pid, flush=True)\n"
        "net[0].run('sleep', '600', timeout=600)"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    pid = int(maker.stdout.readline())
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=30)
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        raise AssertionError("still there")


def test_a_reason_is_given_where_hosts_cannot_be_made(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not.__wrapped__() == "network namespaces need root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "need ip, unshare, nsenter" in why_not.__wrapped__()
