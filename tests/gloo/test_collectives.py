"""shoal bench collectives in real processes: everything is measured, checked, and adds up; no time is asserted."""

import json

import pytest
import torch.distributed as dist

from shoal.cluster import read_cluster
from shoal.metrics.links import OPERATIONS
from shoal.verbs.bench.collectives import command


@pytest.mark.parametrize(
    ("num_ranks", "layout", "ranks_by_axis"),
    [(2, None, {"dp": 2}), (4, "dp2.tp2", {"world": 4, "dp": 2, "tp": 2}), (3, "pp3", {"pp": 3})],
)
def test_every_operation_is_measured_over_every_axis(num_ranks, layout, ranks_by_axis):
    report = command(num_ranks, layout=layout, max_bytes=4096, rounds=2, quiet=True)
    told = json.loads(json.dumps(report.as_dict()))

    assert report.exit_code == told["exit_code"] == 0
    assert {row["axis"]: row["ranks"] for row in told["rows"]} == ranks_by_axis
    found = {(row["axis"], row["op"], row["bytes"]) for row in told["rows"]}
    sizes = {axis: [size // 4 // n * n * 4 for size in (1024, 4096)] for axis, n in ranks_by_axis.items()}
    assert found == {(axis, op, size) for axis in ranks_by_axis for op in OPERATIONS for size in sizes[axis]}
    assert len(found) == len(told["rows"])
    assert {(fit["axis"], fit["op"]) for fit in told["fits"]} == {(axis, op) for axis, op, _ in found}
    for row in told["rows"]:
        seconds = row["seconds"]
        assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
        assert row["rounds"] == 2
        assert row["algbw_gb_per_s"] == pytest.approx(row["bytes"] / seconds["median"] / 1e9)
        assert (row["ring_bound_s"] is not None) == (row["op"] == "all_reduce")
    text = str(report)
    assert all(op in text for op in OPERATIONS)
    assert all(f"over {axis}: " in text for axis in ranks_by_axis)
    assert told["machine"]["backend"] == "gloo"


def test_the_link_that_was_found_is_written_as_a_cluster(tmp_path):
    path = tmp_path / "here.toml"
    report = command(2, ops=["send_recv"], max_bytes=2**24, rounds=2, write=path, quiet=True)
    cluster, fit = read_cluster(path), report.fits["dp", "send_recv"]
    assert (report.written, cluster.nodes, cluster.devices_per_node) == (str(path), 1, 2)
    assert cluster.intra_node_gb_per_s == pytest.approx(fit.bytes_per_s / 1e9, rel=1e-3)
    assert cluster.intra_node_latency_us == pytest.approx(fit.latency_s * 1e6, rel=1e-3)


@pytest.mark.parametrize("name", ["all_to_all_single", "all_reduce", "broadcast"])
def test_an_operation_that_does_nothing_is_no_fast_one(monkeypatch, capfd, name):
    monkeypatch.setattr(dist, name, lambda *args, **kwargs: None)
    report = command(2, max_bytes=1024, rounds=1, quiet=True)
    assert report.exit_code != 0
    assert report.rows == []
    assert f"{name.removesuffix('_single')} over dp gives wrong values" in capfd.readouterr().err


def test_a_rank_that_dies_is_told_and_is_no_success(monkeypatch, capfd):
    def fail(*args, **kwargs):
        raise OSError("the cable is out")

    monkeypatch.setattr(dist, "all_reduce", fail)
    report = command(2, ops=["all_reduce"], max_bytes=1024, quiet=True)
    assert report.exit_code == 1
    assert report.notes == ["the benchmark failed: OSError: the cable is out"]
    assert "OSError: the cable is out" in capfd.readouterr().err
