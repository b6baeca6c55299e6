"""How `shoal doctor` measures: each measurement finds what is really there, and what is really wrong."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from doctor_samples import GIB, GPUS, facts, host, link
from torch import nn

from shoal.cluster import ClusterError, read_cluster, write_cluster
from shoal.errors import ShoalError
from shoal.job import Job, Sum, mean_loss
from shoal.launch.hosts import parse
from shoal.layout import Layout
from shoal.verbs.doctor import host as measures
from shoal.verbs.doctor import storage
from shoal.verbs.doctor.command import _ranks_per_host, command
from shoal.verbs.doctor.examine import offset, rounds
from shoal.verbs.doctor.facts import Asked, HostFacts
from shoal.verbs.doctor.network import SIZES, Listener, largest_packet, reach
from shoal.verbs.doctor.picture import heat_map, svg
from shoal.verbs.doctor.planning import cluster_of
from shoal.verbs.doctor.sizes import checkpoint_bytes, loader_bytes

KEY = b"of this run"
SHORT_S = 20.0


@pytest.fixture
def listener():
    made = Listener(0, KEY)
    yield made
    made.close()


class Relay:
    """A way to a port on which bytes may be changed, or stay behind; `alter(data, seen)` returns what goes on."""

    def __init__(self, port, *, there=lambda data, seen: data, back=lambda data, seen: data):
        self._server, self._target = socket.create_server(("127.0.0.1", 0)), port
        self.port = self._server.getsockname()[1]
        self._ways = (there, back)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        own, _ = self._server.accept()
        other = socket.create_connection(("127.0.0.1", self._target))
        for source, target, alter in ((own, other, self._ways[0]), (other, own, self._ways[1])):
            threading.Thread(target=self._carry, args=(source, target, alter), daemon=True).start()

    def _carry(self, source, target, alter):
        seen = 0
        with source, contextlib.suppress(OSError):  # whoever asked has hung up
            while data := source.recv(1 << 16):
                seen += len(data)
                target.sendall(alter(data, seen))
        target.close()
        self._server.close()


def test_a_good_way_carries_8_mib_both_ways_and_is_timed(listener):
    found = reach(addresses=["127.0.0.1"], port=listener.port, key=KEY)
    assert "error" not in found
    assert "lost" not in found
    assert found["address"] == "127.0.0.1"
    assert found["large_bytes"] == 8 * 2**20
    assert {size for size, _ in found["there"]} == set(SIZES)
    assert 0 < found["latency_s"] < 0.1
    assert all(0 < seconds < SHORT_S for _, seconds in [*found["there"], *found["back"]])


def test_an_address_that_does_not_answer_gives_way_to_one_that_does(listener):
    with socket.socket() as held:
        held.bind(("127.0.0.2", 0))  # bound, and nobody listens
        found = reach(addresses=["no.such.host.invalid", "127.0.0.2", "127.0.0.1"], port=listener.port, key=KEY)
    assert found["address"] == "127.0.0.1" or socket.has_dualstack_ipv6()
    nobody = reach(addresses=["127.0.0.1"], port=_free_port(), key=KEY)
    assert "Connection refused" in nobody["error"]


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_stranger_is_not_answered(listener):
    found = reach(addresses=["127.0.0.1"], port=listener.port, key=b"of another run")
    assert "no answer; is it another program?" in found["error"]


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_way_on_which_large_messages_stay_behind_is_a_lost_one(listener, monkeypatch, way):
    monkeypatch.setattr("shoal.verbs.doctor.network.SILENT_S", 0.5)
    relay = Relay(listener.port, **{way: lambda data, seen: b"" if seen > 300_000 else data})
    found = reach(addresses=["127.0.0.1"], port=relay.port, key=KEY)
    assert found["lost"] == (2**20, way)
    assert found["large_bytes"] == 2**16


def test_a_changed_byte_is_seen(listener):
    def change(data, seen):
        return bytes([data[0] ^ 1]) + data[1:] if 2**19 < seen < 2**20 else data

    found = reach(addresses=["127.0.0.1"], port=Relay(listener.port, back=change).port, key=KEY)
    assert found["damaged"] == 2**20
    assert found["large_bytes"] == 2**16


def test_the_largest_packet_of_a_wide_way_is_the_largest_that_is_tried(listener):
    assert largest_packet("127.0.0.1", listener.port, KEY) == 9216
    assert largest_packet("127.0.0.1", listener.port, b"of another run") is None


@pytest.mark.parametrize("num", range(1, 9))
def test_every_pair_has_one_round_and_no_host_is_in_two_pairs_of_it(num):
    made = list(rounds(num))
    assert sorted(itertools.chain(*made)) == list(itertools.combinations(range(num), 2))
    assert all(len(set(itertools.chain(*pairs))) == 2 * len(pairs) for pairs in made)


def test_an_offset_is_that_of_the_shortest_trip_within_its_uncertainty():
    true_offset = -3.0
    trips = [(100.0, 100.0 + true_offset + 0.9, 1.0), (200.0, 200.0 + true_offset + 0.006, 0.01)]
    found, uncertainty = offset(trips)
    assert uncertainty == 0.005
    assert abs(found - true_offset) <= uncertainty


def test_a_host_measures_itself_and_its_facts_come_back_from_json(tmp_path):
    file = tmp_path / "job.py"
    file.write_text("x = 1\n")
    told = measures.measure(name="here", others=["localhost", "no.such.host.invalid"], port=_free_port(), job=str(file))
    found = HostFacts.of(told)
    assert found.hostname == socket.gethostname()
    assert "127.0.0.1" in found.interfaces["lo"].addresses
    assert found.resolved["no.such.host.invalid"] == []
    assert found.route == ""
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert 0 < found.memory_free_bytes <= found.memory_bytes
    assert found.versions["torch"] == torch.__version__
    assert found.job_hash
    assert found.port_holder == ""
    assert found.clock_steps_back == 0
    assert 0.9 < found.clock_rate < 3


def test_who_holds_a_port_is_named():
    with socket.create_server(("", 0)) as server:
        held = measures.port_holder(server.getsockname()[1])
    assert f"pid {os.getpid()}" in held


def test_a_process_of_shoal_without_a_parent_is_left_over_and_one_with_a_parent_is_not(tmp_path):
    program = tmp_path / "shoal"
    program.write_text("#!/bin/sh\nwhile :; do sleep 1; done\n")
    program.chmod(0o755)
    call = ["sh", "-c", f"{program} >/dev/null 2>&1 & echo $!"]
    orphan = int(subprocess.run(call, capture_output=True, text=True, timeout=SHORT_S, check=True).stdout)
    with subprocess.Popen([program]) as child:
        try:
            until = time.monotonic() + SHORT_S
            while not any(f"pid {orphan} " in line for line in measures.leftovers()) and time.monotonic() < until:
                time.sleep(0.05)  # it is not the program yet
            left = " ".join(measures.leftovers())
        finally:
            os.kill(orphan, signal.SIGKILL)
            child.kill()
    assert f"pid {orphan} (sh " in left
    assert f"pid {child.pid} " not in left


def test_what_is_shoals_is_told_from_the_words_of_a_process():
    assert measures.is_shoals(["/usr/bin/python3", "-m", "shoal.launch.child", "{}"])
    assert measures.is_shoals(["python", "/venv/bin/shoal", "train", "digits"])
    assert measures.is_shoals(["python", "-m", "shoal", "train", "digits"])
    assert not measures.is_shoals(["python", "-m", "shoal.verbs.doctor.agent"])
    assert not measures.is_shoals(["python", "-m", "shoal", "doctor", "digits"])
    assert not measures.is_shoals(["python", "-m", "shoaling"])
    assert not measures.is_shoals(["python", "/venv/bin/shoal", "doctor"])
    assert not measures.is_shoals(["vim", "notes", "shoal"])
    assert not measures.is_shoals([])


def test_an_ended_process_of_python_that_nobody_asks_for_is_a_zombie():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        until = time.monotonic() + SHORT_S
        while not any(f"pid {child.pid} " in line for line in measures.zombies()) and time.monotonic() < until:
            time.sleep(0.02)
        assert f"pid {child.pid} (of {os.getpid()})" in measures.zombies()
    assert f"pid {child.pid} (of {os.getpid()})" not in measures.zombies()


def test_the_words_of_nvidia_smi_are_read():
    text = "NVIDIA H200, 570.86.15, 143771, 0\nNVIDIA H200, 570.86.15, 143771, 2\nTesla T4, 550.1, 15360, [N/A]\n"
    first, second, third = measures.gpus_of(text)
    assert (first.name, first.driver, first.memory_bytes, first.ecc_errors) == (
        "NVIDIA H200",
        "570.86.15",
        143771 * 2**20,
        0,
    )
    assert (second.ecc_errors, third.ecc_errors) == (2, None)
    assert measures.pids_of("77\n77\n 9\n[Not Found]\n") == [9, 77]
    with pytest.raises(ValueError, match="unpack"):
        measures.gpus_of("NVIDIA-SMI has failed\n")


def test_a_driver_that_fails_is_told_in_its_own_words(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "NVIDIA-SMI has failed" in measures.gpus().error


def test_a_token_is_found_in_the_same_folder_and_missed_in_another(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_SEEN_S", 0.3)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    assert storage.leave(folder=str(here / "runs"), token="abc") == {"torn": 0}
    assert storage.find(folder=str(here), token="abc") == {"unseen": ""}
    assert storage.find(folder=str(there), token="abc") == {"unseen": "No such file or directory"}
    speed = storage.speed(folder=str(here), token="abc")
    assert 0 < speed["fsync_s"] < SHORT_S
    assert speed["free_bytes"] > 0
    assert speed["bytes_per_s"] > 0
    storage.clean(folder=str(here), token="abc")
    assert list(here.iterdir()) == []


def test_a_rename_that_is_not_whole_is_seen(tmp_path, monkeypatch):
    def copied(source: Path, target: Path) -> None:  # as a file system without atomic renames would do it
        text = source.read_text()
        with target.open("w") as file:
            file.write(text[:100])
            file.flush()
            time.sleep(0.001)
            file.write(text[100:])

    (tmp_path / "own").mkdir()
    monkeypatch.setattr(Path, "replace", copied)
    assert storage._torn(tmp_path / "own") > 0


def test_a_cluster_file_holds_the_slowest_link_and_reads_back(tmp_path):
    cluster = cluster_of(facts(link("h1", "h2", gbit=4), host("h1", gpus=GPUS), host("h2", gpus=GPUS)))
    assert (cluster.nodes, cluster.devices_per_node, cluster.device) == (2, 2, "NVIDIA H100 80GB HBM3")
    assert cluster.inter_node_gb_per_s == pytest.approx(0.5, rel=0.01)
    assert cluster.inter_node_latency_us == pytest.approx(50, rel=0.05)
    assert cluster.intra_node_gb_per_s is None
    write_cluster(tmp_path / "c.toml", cluster)
    assert read_cluster(tmp_path / "c.toml") == cluster
    alone = facts(asked=Asked(is_local=True, ranks_per_host=4))
    assert cluster_of(alone).intra_node_gb_per_s == pytest.approx(1.25, rel=0.01)
    assert cluster_of(facts()).memory_gb == pytest.approx(64 * GIB / 2 / 1e9, rel=0.001)


@pytest.mark.parametrize(
    "sick",
    [facts(link("h1", "h2", latency_s=None, there=(), large_bytes=0)), facts(host("h1", gpus=GPUS))],
    ids=["a link that was not measured", "unlike hosts"],
)
def test_no_cluster_file_is_made_of_half_the_facts(sick):
    with pytest.raises(ClusterError, match="no cluster file"):
        cluster_of(sick)


SPEEDS = {
    ("a", "b"): 1.25e9,
    ("b", "a"): 1.25e9,
    ("a", "c"): 1.25e8,
    ("c", "a"): None,
    ("b", "c"): 1e9,
    ("c", "b"): 1e9,
}


def test_a_picture_of_links_is_dark_where_they_are_slow():
    assert heat_map(["a", "b", "c"], SPEEDS).splitlines() == [
        "Gbit/s, from (row) to (column); dark is slow",
        "          a       b       c",
        "a         -     10·      1█",
        "b       10·       -      8·",
        "c         X      8·       -",
    ]
    many = [f"host{k}" for k in range(20)]
    drawn = heat_map(many, dict.fromkeys(itertools.permutations(many, 2), 1e9))
    assert max(map(len, drawn.splitlines())) <= 60


def test_the_drawn_picture_has_one_square_per_link_with_its_figure():
    drawn = svg(["a", "b", "<c>"], {**SPEEDS, ("a", "<c>"): 1.25e8})
    assert drawn.count("<g>") == 6
    assert "a to &lt;c&gt;: 1 Gbit/s" in drawn
    assert drawn.count('fill="#d55e00"') == 1


@dataclass(frozen=True, kw_only=True)
class Half(Job):
    """A frozen half: it takes no optimizer state."""

    batch_size: int = 1
    steps: int = 1

    def model(self):
        model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
        model[0].weight.requires_grad_(False)
        return model

    def data(self):
        return torch.utils.data.TensorDataset(torch.ones(8, 10), torch.ones(8, dtype=torch.int64))

    def loss(self, output, batch) -> Sum:
        return mean_loss(output)

    def optimizer(self, params):
        return torch.optim.AdamW([param for param in params if param.requires_grad])


def test_a_checkpoint_is_as_large_as_the_state_that_a_step_makes():
    weights, norm = 4 * 110, 4 * 20
    running = 4 * 20 + 8
    adam = 2 * (4 * 10 + norm) + 3 * 4  # two moments, and the step of each of three parameters
    assert checkpoint_bytes(Half()) == weights + norm + running + adam


def test_loader_workers_hold_batches_in_shared_memory_where_there_are_any():
    sample = 10 * 4 + 8
    job = Half(batch_size=6)
    assert loader_bytes(job, Layout.parse("dp2"), 2) == 0
    assert loader_bytes(job, Layout.parse("dp2:workers=4"), 2) == sample * 3 * 3 * 4 * 2


def test_the_most_ranks_of_one_host_are_as_the_hosts_say_or_an_equal_share():
    for hosts, layout, most in ((None, "dp4", 4), ("a,b", "dp4", 2), ("a,b", "dp2.tp3", 3), ("a:1,b:3", "dp4", 3)):
        assert _ranks_per_host(Layout.parse(layout), parse(hosts) if hosts else ()) == most


def test_what_makes_no_sense_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "c.toml").write_text("")
    for words, said in (
        ({"hosts": "a,a"}, "names a twice"),
        ({"layout": "dp0"}, "dp0"),
        ({"job": "digit"}, "digits"),
        ({"cluster": tmp_path / "c.toml"}, "exists"),
        ({"picture": tmp_path / "none" / "x.svg"}, "there is no folder"),
    ):
        with pytest.raises(ShoalError, match=said):
            command(**words)
