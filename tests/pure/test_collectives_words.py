"""shoal bench collectives: what is refused before a rank starts, and what its report makes of times."""

import pytest

from shoal.cluster import ClusterError
from shoal.errors import ShoalError
from shoal.layout import Layout
from shoal.mesh import Mesh
from shoal.verbs.bench.collectives import command
from shoal.verbs.bench.collectives_rank import axes_of
from shoal.verbs.bench.collectives_report import CollectivesReport, Row


@pytest.mark.parametrize(
    ("num_ranks", "asked", "lesson"),
    [
        (1, {}, "nothing to send"),
        (4, {"layout": "dp2"}, "dp2 needs 2 ranks, and --nproc-per-node is 4"),
        (6, {"layout": "dp2.tp2"}, "Nearest that fit: dp3.tp2"),
        (2, {"ops": ["all_reduce", "brodcast"]}, "no operation 'brodcast'. Did you mean 'broadcast'?"),
        (2, {"ops": []}, "no operation is left"),
        (2, {"min_bytes": 2}, "they begin at 4 or more"),
        (2, {"min_bytes": 4096, "max_bytes": 1024}, "from 4096 to 1024 bytes"),
        (2, {"min_bytes": 2**60, "max_bytes": 2**60}, "Take a smaller size"),
        (2, {"rounds": 0}, "rounds is 0"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_rank_starts(num_ranks, asked, lesson):
    with pytest.raises(ShoalError) as caught:
        command(num_ranks, **asked)
    assert lesson in str(caught.value)


def test_a_cluster_file_that_could_not_be_written_is_refused_before_a_rank_starts(tmp_path):
    taken = tmp_path / "cluster.toml"
    taken.touch()
    with pytest.raises(ClusterError, match="exists"):
        command(2, write=taken)
    for asked in ({"ops": ["all_reduce"]}, {"max_bytes": 1024}):
        with pytest.raises(ShoalError, match="send_recv at two sizes"):
            command(2, write=tmp_path / "new.toml", **asked)


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("dp4", {"dp": ("dp",)}),  # the axis is the world, and is measured once
        ("dp2.tp2", {"world": ("dp", "tp"), "dp": ("dp",), "tp": ("tp",)}),
        ("pp2.fsdp4.ep2", {"world": ("pp", "fsdp"), "pp": ("pp",), "fsdp": ("fsdp",), "ep": ("ep",)}),
    ],
)
def test_the_world_and_each_axis_of_several_ranks_are_measured(layout, axes):
    assert axes_of(Mesh.of(Layout.parse(layout))) == axes


def row(op, size, seconds):
    return Row(op=op, axis="dp", ranks=4, bytes=size, median_s=seconds, min_s=seconds, max_s=seconds, rounds=3, calls=1)


def test_the_report_holds_a_ring_against_the_best_link_of_its_axis():
    # A link of 2 GB/s at its best: 1.5 x 1 GB over it are 0.75 s.
    report = CollectivesReport(
        layout="dp4",
        num_ranks=4,
        rows=[row("send_recv", 10**6, 1e-3), row("send_recv", 10**9, 0.5), row("all_reduce", 10**9, 1.5)],
    )
    told = report.as_dict()["rows"][-1]
    assert (told["ring_bound_s"], told["times_ring_bound"]) == (0.75, 2.0)
    assert told["algbw_gb_per_s"] == pytest.approx(2 / 3)
    assert told["busbw_gb_per_s"] == pytest.approx(1.0)
    assert report.as_dict()["rows"][0]["ring_bound_s"] is None


def test_the_closing_sentence_does_not_speak_of_sizes_that_were_not_measured():
    rows = [row("all_reduce", 1000, 1e-3), row("all_reduce", 1_000_000, 2e-3)]
    sentence = CollectivesReport(layout="dp4", num_ranks=4, rows=rows).sentence()
    assert sentence.startswith(
        "An all_reduce of 1 MB (the float32 gradients of 250 k parameters) over dp takes about 2 ms"
    )
    assert CollectivesReport(layout="dp4", num_ranks=4, rows=rows[:1]).sentence() == ""
