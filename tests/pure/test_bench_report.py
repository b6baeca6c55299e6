"""What is made of measurements: speed-up, efficiency, utilisation, the same loss, and a sentence that fits."""

import csv
import io
import json
import re
import threading

import pytest

from shoal.metrics.shares import Spent
from shoal.verbs.bench.answer import _split
from shoal.verbs.bench.command import BenchError, command
from shoal.verbs.bench.diagnose import diagnose
from shoal.verbs.bench.files import keep
from shoal.verbs.bench.measured import Measured, RankMeasured
from shoal.verbs.bench.megatron import recompute_megatron
from shoal.verbs.bench.report import Report
from shoal.verbs.bench.turns import Turns


def rank(*, compute=0.9, data=0.0, waits=(), bubble=0.0, wall=1.0, sent=(), update=0.0):
    spent = Spent(
        wall_s=wall,
        data_s=data,
        phases_s={
            "compute": compute + sum(s for (at, _), s in dict(waits).items() if at == "compute"),
            "update": update,
        },
        waits_s=dict(waits),
        bubble_s=bubble,
        work_s=[compute + data + update] * 4,
    )
    return RankMeasured(
        spent=spent, peak_bytes={"parameters": 10}, peak_gib=0.5, sent_bytes=dict(sent), formula_bytes={}, cpu_s=0.9
    )


def measured(layout, devices, times, **changes):
    values = {
        "batch_size": 32,
        "tokens_per_sample": 100,
        "precision": "fp32",
        "losses": [3.0, 2.0, 1.0],
        "model_flops": 8e9,
        "hardware_flops": 10e9,
        "peak_flops": 10e9,
        "ranks": [rank()] * devices,
    }
    return Measured(layout=layout, num_devices=devices, times_s=times, **(values | changes))


def report(*rows, mode="strong"):
    return Report(job="gpt", mode=mode, rows=list(rows), cores=2, seconds=1.0)


def test_speed_up_and_efficiency_are_those_of_the_same_round():
    """The machine is half as fast in the second round, for both."""
    base, row = report(measured("lone", 1, [2.0, 4.0, 2.0]), measured("dp2", 2, [1.25, 2.5, 1.25])).table()
    assert (base.speed_up, base.efficiency) == (1.0, 1.0)
    assert (row.speed_up, row.efficiency) == (1.6, 0.8)
    assert row.rate == pytest.approx(32 * 100 / 1.25)
    assert row.rate_per_device == row.rate / 2
    assert (row.mfu, row.hfu) == (pytest.approx(8e9 / (1.25 * 2 * 10e9)), pytest.approx(10e9 / (1.25 * 2 * 10e9)))


def test_weak_efficiency_is_throughput_over_that_of_as_many_bases():
    rows = report(measured("lone", 1, [2.0]), measured("dp4", 4, [2.5], batch_size=128, losses=[9.0]), mode="weak")
    row = rows.table()[1]
    assert row.efficiency == pytest.approx(0.8)
    assert row.speed_up is None
    assert row.loss_differs is None  # another batch: another training
    assert rows.exit_code == 0


def test_another_loss_is_said_and_is_no_success():
    found = report(measured("lone", 1, [1.0]), measured("dp2", 2, [1.0], losses=[3.0, 2.01, 1.0]))
    assert not found.table()[1].is_same
    assert found.exit_code == 1
    assert "DIFFERS by 5e-03" in str(found)
    later = [3.0] * 5 + [2.0]
    drifts = report(measured("lone", 1, [1.0], losses=later), measured("dp2", 2, [1.0], losses=[*later[:5], 2.1]))
    assert drifts.exit_code == 0  # rounding grows, in one process as in many


def test_a_layout_that_is_refused_has_its_reason_and_the_others_their_figures():
    refused = Measured(layout="tp2", num_devices=2, batch_size=32, error="no plan")
    found = report(measured("lone", 1, [1.0]), refused)
    assert "tp2 is refused: no plan" in str(found)
    assert [row.layout for row in found.table()] == ["lone"]
    assert found.exit_code == 1
    assert report(refused).exit_code == 1
    assert "refused" in str(report(refused))


def test_the_first_layout_is_the_base_where_lone_is_not_compared():
    row = report(measured("dp2", 2, [1.0]), measured("dp4", 4, [0.6])).table()[1]
    assert row.efficiency == pytest.approx(1 / 0.6 / 2)


def test_a_comparison_comes_back_from_its_files(tmp_path):
    waits = {("compute", "dp"): 0.1}
    found = report(measured("lone", 1, [1.0]), measured("dp2", 2, [0.6], ranks=[rank(waits=waits, sent={"dp": 7})] * 2))
    folder = keep(found, tmp_path / "new" / "bench")
    told = json.loads((folder / "bench.json").read_text())
    assert [Measured.of(row) for row in told["measured"]] == found.rows
    rows = list(csv.DictReader(io.StringIO((folder / "bench.csv").read_text())))
    assert float(rows[1]["speed_up"]) == pytest.approx(1 / 0.6)
    assert float(rows[1]["share comm dp"]) == pytest.approx(0.1)
    assert rows[1]["sent_bytes dp"] == "7"
    assert rows[0]["sent_bytes dp"] == ""


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([rank(compute=0.5, data=0.4)] * 2, "40% of the step is waiting for data .*dp2:workers=2"),
        (
            [rank(compute=0.5, waits={("compute", "dp"): 0.41}, sent={"dp": 13e6})] * 2,
            r"41% of the step is exposed communication on dp: 12.4 MiB sent per rank and step, 410 ms not .*0.032 GB/s",
        ),
        ([rank(compute=0.5, waits={("compute", "all"): 0.3})] * 2, r"waiting for the rank that comes last .300 ms.\.$"),
        (
            [rank(compute=0.5, waits={("compute", "all"): 0.3}), rank(compute=0.6, waits={("compute", "all"): 0.3})],
            "comes last .* do not have equal work",
        ),
        ([rank(compute=0.5, waits={("compute", "pp"): 0.4}, bubble=0.3)] * 2, "the pipeline's bubble"),
        ([rank(compute=0.5, update=0.3)] * 2, "30% of the step is the update"),
        ([rank(compute=0.97)] * 2, "97% of the step is computing"),
        ([rank(compute=0.5), rank(compute=0.9)], r"rank 1 is slow: in each step it works 400 ms longer .*\(40% of"),
    ],
)
def test_the_largest_loss_is_named_with_its_evidence(ranks, said):
    row = measured("dp2", 2, [1.0], ranks=ranks)
    assert re.search(said, diagnose(row, None)), diagnose(row, None)


def test_what_the_base_spends_too_is_no_reason():
    """Both wait for data; only dp2 communicates."""
    base = measured("lone", 1, [1.0], ranks=[rank(compute=0.6, data=0.4)])
    row = measured("dp2", 2, [1.0], ranks=[rank(compute=0.4, data=0.4, waits={("compute", "dp"): 0.2})] * 2)
    assert "20% of the step is exposed communication on dp" in diagnose(row, base)
    assert "40% of the step is waiting for data" in diagnose(base, base)


def test_replicas_in_turns_are_named_as_the_reason():
    row = measured("threads2", 2, [1.0], note="its replicas run one after the other")
    assert diagnose(row, None) == "threads2: its replicas run one after the other."


def test_losses_of_a_forward_that_draws_are_not_compared():
    found = report(
        measured("lone", 1, [1.0], draws=True), measured("dp2", 2, [1.0, 2.0], losses=[3.5, 2.5], draws=True)
    )
    assert found.exit_code == 0
    assert "draws differ" in str(found)
    assert any("shoal verify" in sentence for sentence in found.sentences())
    assert any("Rounds differ by up to 2.0 times" in sentence for sentence in found.sentences())


def test_every_world_gets_each_of_its_turns_and_another_one_is_first_in_each_round():
    turns, order = Turns(3, 4), []

    def arm(number):
        for turn, share in turns.taken(number):
            assert 0 <= share < 1
            order.append((turn, number))

    arms = [threading.Thread(target=arm, args=(number,)) for number in range(3)]
    for thread in arms:
        thread.start()
    for thread in arms:
        thread.join(10)
    turns.close()
    assert order == [(turn, (place + turn) % 3) for turn in range(4) for place in range(3)]


def test_a_world_that_never_comes_leaves_the_others_waiting_and_one_that_passes_does_not():
    turns = Turns(2, 2)
    passing = threading.Thread(target=lambda: [None for _ in turns.taken(1)])
    passing.start()
    assert [turn for turn, _ in turns.taken(0)] == [0, 1]
    passing.join(10)
    turns.close()


def test_a_comma_also_parts_the_options_of_a_layout():
    assert _split("lone,pp2:micro=4,schedule=gpipe,dp2,dp2:micro=2") == [
        "lone",
        "pp2:micro=4,schedule=gpipe",
        "dp2",
        "dp2:micro=2",
    ]


def test_megatrons_figures_come_out_as_published():
    found = recompute_megatron()
    assert (round(found.utilisation_of_one, 2), round(found.efficiency, 2), found.exit_code) == (0.30, 0.76, 0)
    assert "15.1 PFLOP/s / (512 x 39 TFLOP/s) = 76%" in str(found)


def test_what_makes_no_comparison_is_refused():
    with pytest.raises(BenchError, match="say what to compare"):
        command("digits", ["lone"], scale=[1, 2])
    with pytest.raises(BenchError, match="dp2 is named twice"):
        command("digits", ["dp2", "lone", "dp2"])
