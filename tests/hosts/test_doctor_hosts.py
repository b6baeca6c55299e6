"""shoal doctor on hosts of their own, whose network is broken in one way after another."""

import json
import sys

import pytest
from daemons import start_sshd

from shoal.cluster import read_cluster

LIMIT_S = 110


def doctor(net, *words):
    """The checks by name, all facts, and the exit code."""
    names = ",".join(host.name for host in net)
    call = (sys.executable, "-m", "shoal", "doctor", "--hosts", names, "--json", *words)
    started = net.console(*call, cwd=net.shared, env={"OMP_NUM_THREADS": "1"})
    out, err = started.communicate(timeout=LIMIT_S)
    assert out, err
    told = json.loads(out)
    return {check["name"]: check for check in told["checks"]}, told, started.returncode


@pytest.mark.drill
def test_hosts_that_are_well_are_told_so_over_real_ssh_and_described_for_a_plan(hosts):
    net = hosts(2)
    start_sshd(net)
    words = ("--hosts", "h1:1,h2:2", "--cluster", "c.toml", "--picture", "links.svg")
    call = (sys.executable, "-m", "shoal", "doctor", "--json", *words)
    done = net[0].run(*call, cwd=net.shared, env={"OMP_NUM_THREADS": "1"}, timeout=LIMIT_S)
    assert done.stdout, done.stderr
    told, code = json.loads(done.stdout), done.returncode
    found = {check["name"]: check for check in told["checks"]}
    noisy = ("bandwidth", "cpu speed", "memory", "fsync", "writing")  # they share a machine with other tests
    assert [name for name, check in found.items() if check["level"] != "ok" and name not in noisy] == []
    assert code == told["exit_code"] < 2
    assert found["own name"]["found"] == "h1: 10.77.0.1; h2: 10.77.0.2"
    assert "h1: eth0 (10.77.0.1); h2: eth0 (10.77.0.2)" in found["interface"]["found"]
    assert "all_reduce over 2 ranks is exact" in found["collective"]["found"]
    assert found["cores"]["found"].endswith("for 2 ranks x 1 threads")
    assert read_cluster(net.shared / "c.toml").inter_node_gb_per_s > 0
    assert "h1 to h2: " in (net.shared / "links.svg").read_text()


def test_a_black_hole_is_found_with_the_mtu_that_passes(hosts):
    net = hosts(2)
    net.swallow_large(net[1], 1200)
    found, _, code = doctor(net)
    assert code == 2
    assert found["ports"]["level"] == "ok"
    assert found["mtu"]["level"] == "fail"
    assert "64.0 KiB are lost, and smaller messages pass: packets above 1200 bytes vanish" in found["mtu"]["found"]
    assert "mtu 1200" in found["mtu"]["fix"]
    assert found["collective"]["found"].startswith("not run: large messages from h")


@pytest.mark.drill
def test_a_slow_link_a_shut_port_a_hidden_name_and_a_private_folder_are_each_named(hosts):
    net = hosts(2)
    net.limit(net[1], "10mbit")
    net.block(net[0], 29500)
    net.write_names("h2", {"h1": "10.77.0.1", "h2": "127.0.1.1"})
    found, told, code = doctor(net, "--run", str(net.own / "runs"))
    assert code == 2
    speeds = [
        link["large_bytes"] / min(s for n, s in link["there"] if n == link["large_bytes"]) for link in _links(told)
    ]
    assert all(0.8e6 < speed < 1.6e6 for speed in speeds)
    assert found["bandwidth"]["level"] == "warn"
    assert "h2 -> h1: 10.77.0.1:29500: no answer" in found["ports"]["found"]
    assert found["own name"]["found"] == "h2: h2 is 127.0.1.1"
    assert "is not one folder (h2: No such file or directory)" in found["folder"]["found"]
    # shoal chooses the interface itself, so its own ranks meet all the same.
    assert "all_reduce over 2 ranks is exact" in found["collective"]["found"]


def _links(told):
    return told["facts"]["links"]


@pytest.mark.drill
def test_a_host_whose_cable_is_pulled_is_unreachable_for_all_others(hosts):
    net = hosts(2)
    net.cut(net[1])
    found, _, code = doctor(net)
    assert code == 2
    assert found["ports"]["level"] == found["collective"]["level"] == "fail"
    assert "h1 -> h2: " in found["ports"]["found"]
    assert found["collective"]["found"].startswith("not run: h")
