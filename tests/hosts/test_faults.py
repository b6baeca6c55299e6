"""Hosts, links and clocks that fail under a run: it goes on, or ends with the reason, and is never wrong."""

import os
import sys
import time
from pathlib import Path

import pytest
from cluster import PORT, Cluster, noted

from shoal.verbs.drill.command import undisturbed

ELASTIC = ("--layout", "dp3", "--elastic", "2:3", "--max-restarts", "3", "--save-every", "20")
SUMS = 1e-9  # float64, added in another order: fewer replicas, or another number of them
slow = pytest.mark.skipif(not os.environ.get("SHOAL_DRILL"), reason="minutes; make drill runs it")

# In the folder of a host's PYTHONPATH: its clock is off.
CLOCK = """
import time
now = time.time
time.time = lambda: now() + float({seconds})
"""
# Says what no parent says, to every port of a host that anybody can reach.
NOISE = """
import contextlib, os, pickle, socket, subprocess, sys
class Evil:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)
texts = [os.urandom(4096), pickle.dumps(Evil()), bytes(64), b"{" * 5000 + b"\\n", b'{"hello": 1}\\n', b"\\n", b""]
for port in map(int, sys.argv[3:]):
    for text in texts:
        with contextlib.suppress(OSError), socket.create_connection((sys.argv[1], port), timeout=1) as connection:
            connection.settimeout(0.2)
            connection.sendall(text)
            connection.recv(64)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("reference"))


@pytest.fixture
def running(hosts, tmp_path):
    """`running(3, *words)`: a run on so many hosts, that has done 25 steps."""

    def start(num_hosts: int, *words: str) -> Cluster:
        cluster = Cluster(hosts(num_hosts), tmp_path / "run", *words)
        cluster.until(lambda: cluster.step >= 25, "at step 25")
        return cluster

    return start


@pytest.mark.parametrize("lost", [pytest.param(2, marks=pytest.mark.drill), pytest.param(0, id="0, where all met")])
def test_a_host_that_is_lost_does_not_lose_the_run(running, reference, lost):
    with noted("a host is lost" + ("" if lost else ", the one where all met")) as found:
        cluster = running(3, *ELASTIC)
        began, gone = time.monotonic(), cluster.net[lost]
        cluster.net.end(gone)
        cluster.goes_on(found, began, 15)
        cluster.ends_well(reference, *(host for host in cluster.net if host is not gone), relative=SUMS)
        assert gone.name in str(cluster.incidents("restart"))


@slow
def test_a_host_whose_cable_is_pulled_writes_nothing_more_and_ends(running, reference):
    with noted("a cable is pulled, for ever") as found:
        cluster = running(3, *ELASTIC)
        began = time.monotonic()
        cluster.net.cut(cluster.net[1])
        cluster.goes_on(found, began, 30)  # 10 s of silence come first
        cluster.ends_well(reference, cluster.net[0], cluster.net[2], relative=SUMS)
        assert cluster.end(cluster.net[1]) != [0]


@slow
def test_a_host_that_comes_back_is_taken_in_again(running, reference):
    with noted("a host is lost, and comes back") as found:
        cluster = running(3, *ELASTIC, "--set", "pace_ms=250")  # it takes seconds to come back
        gone, began = cluster.net[2], time.monotonic()
        cluster.kill(gone)
        cluster.goes_on(found, began, 15)
        cluster.start(gone)
        cluster.until(lambda: bool(cluster.incidents("grows")), "grown again")
        cluster.ends_well(reference, relative=SUMS)


@slow
def test_a_link_that_is_down_for_a_moment_costs_time_alone(running, reference):
    with noted("a link is down for 3 s"):
        cluster = running(3, *ELASTIC)
        cluster.net.cut(cluster.net[1])
        time.sleep(3)
        cluster.net.mend(cluster.net[1])
        cluster.ends_well(reference, cluster.net[0], cluster.net[2], relative=SUMS)


@slow
def test_a_host_whose_link_comes_back_too_late_disturbs_nobody(running, reference):
    with noted("a link is down for 20 s") as found:
        cluster = running(3, *ELASTIC, "--set", "pace_ms=250")  # 25 s from step 20 on
        began, away = time.monotonic(), cluster.net[1]
        cluster.net.cut(away)
        cluster.goes_on(found, began, 30)
        time.sleep(max(0.0, began + 20 - time.monotonic()))
        assert not cluster.is_over()
        cluster.net.mend(away)
        cluster.ends_well(reference, cluster.net[0], cluster.net[2], relative=SUMS)
        assert cluster.end(away) == [1]


@slow
@pytest.mark.parametrize("words", ["netem loss 1%", "netem loss 5%", "netem delay 20ms"])
def test_a_bad_link_costs_time_alone(running, reference, words):
    cluster = running(2, "--layout", "dp2")
    cluster.net[1].tc(f"qdisc replace dev eth0 root {words}")
    with noted(words):
        cluster.ends_well(reference, limit_s=300)


@slow
def test_a_slow_link_costs_time_alone(running, reference):
    with noted("a link of 10 Mbit/s"):
        cluster = running(2, "--layout", "dp2")
        cluster.net.limit(cluster.net[1], "10mbit")
        cluster.ends_well(reference, limit_s=300)


@slow
@pytest.mark.parametrize("seconds", [-20, 20, -3600])
def test_clocks_need_not_agree(hosts, tmp_path, reference, seconds):
    (tmp_path / "sitecustomize.py").write_text(CLOCK.format(seconds=seconds))
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with noted(f"a clock that is off by {seconds} s"):
        cluster = Cluster(hosts(2), tmp_path / "run", "--layout", "dp2", env={"h2": {"PYTHONPATH": path}})
        cluster.ends_well(reference)


@slow
def test_strangers_at_the_port_of_the_run_are_sent_away(running, reference, tmp_path):
    with noted("random bytes and pickles at the port of the run"):
        cluster = running(2, "--layout", "dp2")
        first, second = cluster.net
        second.run(sys.executable, "-c", NOISE, first.address, str(tmp_path / "evil"), PORT, check=True)
        cluster.ends_well(reference)
        assert not (tmp_path / "evil").exists()
