"""Two trainings that were made already: recordings of a loop of one's own, and run folders."""

import json

import pytest
import torch
from torch import nn

import shoal.cli
from shoal.errors import LayoutError, ShoalError
from shoal.run import assemble
from shoal.verbs.verify import Recording, compare_runs
from shoal.verbs.verify.answer import answer
from shoal.verbs.verify.command import VerifyError
from shoal.verbs.verify.compare import Row
from shoal.verbs.verify.probes import Pixels
from shoal.verbs.verify.report import Finding, Numerics, Report, noise_ratio, summarise
from shoal.world import World


def own_loop(folder, *, factor=1.0, dtype=torch.float64, steps=3):
    """A loop with nothing of shoal in it but the recording."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    recording = Recording(folder, model, optimizer)
    for step in range(steps):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        (loss * factor).backward()
        optimizer.step()
        recording.step(loss)
    recording.close()
    return folder


def test_two_recordings_of_one_training_are_the_same(tmp_path):
    report = compare_runs(own_loop(tmp_path / "a"), own_loop(tmp_path / "b"))
    assert (report.verdict, report.exit_code) == ("same", 0)
    assert {"initial weights", "loss", "gradients", "optimizer state", "weights"} <= set(report.worst)
    assert "same up to step 3" in report.sentence


def test_a_gradient_that_is_twice_as_long_is_found_though_adam_divides_it_out(tmp_path):
    report = compare_runs(own_loop(tmp_path / "a"), own_loop(tmp_path / "b", factor=2.0))
    assert (report.verdict, report.exit_code) == ("wrong", 1)
    assert report.sentence == "in step 1: the gradient of 2.bias is twice the reference."
    assert (report.ratio, report.cosine) == (pytest.approx(2.0), pytest.approx(1.0))


@pytest.mark.parametrize(("error", "verdict"), [(1e-6, "same"), (1e-2, "wrong")])
def test_the_gate_is_that_of_the_precision(tmp_path, error, verdict):
    a, b = (own_loop(tmp_path / n, factor=f, dtype=torch.float32) for n, f in (("a", 1.0), ("b", 1.0 + error)))
    assert compare_runs(a, b).verdict == verdict


def run_folder(folder, *, steps=4, **fields):
    with World.open("lone") as world:
        run = assemble(Pixels(steps=steps, precision="fp64", **fields), world, folder=folder, save_every=2, quiet=True)
        for step in run.steps():
            run.log(step())
            run.save_if_due()
        run.close()
    return folder


def test_two_run_folders_are_compared_by_metrics_and_checkpoints(tmp_path):
    a, b = (run_folder(tmp_path / name) for name in "ab")
    report = compare_runs(a, b)
    assert report.verdict == "same"
    assert report.worst["loss"]["number"] == 4
    assert report.worst["weights"]["number"] == 2 * 8  # two checkpoints
    assert report.worst["optimizer state"]["number"] == 2 * 5


def test_the_first_step_that_differs_is_named(tmp_path):
    a, b = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] >= 3 and "train/loss" in line:
            line["train/loss"] *= 1 + 1e-8
    (b / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report = compare_runs(a, b)
    assert report.verdict == "wrong"
    assert report.sentence.startswith("in step 3: loss, train/loss: ")


def test_another_seed_is_another_training(tmp_path):
    report = compare_runs(run_folder(tmp_path / "a"), run_folder(tmp_path / "b", seed=1))
    assert report.sentence.startswith("in step 1: loss, train/loss: ")


def test_what_cannot_be_compared_is_refused_with_the_reason(tmp_path):
    recording, run = own_loop(tmp_path / "a"), run_folder(tmp_path / "b")
    with pytest.raises(VerifyError, match="compare two of one kind"):
        compare_runs(recording, run)
    with pytest.raises(VerifyError, match="neither a run folder of shoal train"):
        compare_runs(tmp_path, recording)
    with pytest.raises(VerifyError, match="no step in common"):
        compare_runs(own_loop(tmp_path / "c", steps=0), recording)


@pytest.mark.parametrize(
    ("words", "error", "lesson"),
    [
        ((None, None), VerifyError, "one of JOB, --runs A B and --self-test, and got none"),
        (("gpt", None), LayoutError, "shoal verify gpt --layout dp2"),
        (("gpt", "dp"), LayoutError, "has no degree"),
        (("gpt", "cp2"), LayoutError, "not available yet"),
        (("nothing.py", "dp2"), ShoalError, "nothing.py"),
    ],
)
def test_mistakes_on_the_command_line_are_lessons(words, error, lesson):
    with pytest.raises(error, match=lesson):
        answer(*words)


def test_two_ways_to_verify_at_once_are_refused(tmp_path):
    with pytest.raises(VerifyError, match="got JOB and --runs"):
        answer("gpt", "dp2", runs=(tmp_path, tmp_path))


def test_a_job_that_asks_for_local_statistics_is_another_training_in_every_layout():
    with pytest.raises(ShoalError, match="batch_norm=global"):
        answer("digits", "dp2", ["batch_norm=local"])


def test_exit_code_and_json_say_the_verdict(monkeypatch, capsys, tmp_path):
    a, b = own_loop(tmp_path / "a"), own_loop(tmp_path / "b", factor=2.0)
    monkeypatch.setattr("sys.argv", ["shoal", "verify", "--runs", str(a), str(b), "--json"])
    with pytest.raises(SystemExit) as end:
        shoal.cli.main()
    told = json.loads(capsys.readouterr().out)
    assert (end.value.code, told["exit_code"], told["verdict"]) == (1, 1, "wrong")
    assert told["findings"][0]["kind"] == "gradients"


def row(error, *, kind="weights", name="w", step=1):
    return Row(step=step, kind=kind, name=name, error=error)


def test_the_summary_counts_by_kind_and_keeps_the_largest_error():
    rows = [
        ("sgd", row(1e-16)),
        ("sgd", row(1e-3, name="v")),
        ("sgd", row(None)),
        ("sgd", row(1e-300, kind="sample ids")),
    ]
    findings, worst = summarise(rows)
    assert [finding.row.name for finding in findings] == ["v", "w"]  # what must be equal has no gate
    assert worst["weights"] == {"number": 2, "wrong": 1, "error": 1e-3, "name": "v, step 1"}
    assert list(worst) == ["sample ids", "weights"]


def test_errors_are_held_against_the_noise_of_their_tensor_or_of_their_kind():
    noise = [
        [row(1e-6), row(1e-7, name="v"), row(3e-7, name="u")],
        [row(2e-6), row(1e-7, name="v"), row(2e-7, name="u")],
    ]
    ratio, what = noise_ratio([row(4e-6), row(9e-7, name="v")], noise, 1e-7)
    assert (ratio, what) == (pytest.approx(3.0), "weights, v, step 1")
    assert not Numerics(precision="fp32", ratio=ratio, what=what).differ
    assert Numerics(precision="fp32", ratio=11.0, what=what).differ
    assert Numerics(precision="fp32", ratio=float("nan"), what=what).differ


def test_a_report_shows_its_verdict_and_what_it_did_not_cover():
    report = Report(title="verify", verdict="wrong", sentence="the loss is twice.", ratio=2.0, cosine=1.0)
    report.findings = [Finding(training="with SGD", row=row(0.5, name=f"w{i}")) for i in range(9)]
    report.uncovered = ["evaluation mode"]
    text = str(report)
    assert "WRONG  the loss is twice." in text
    assert "ratio 2, cosine 1.000000000" in text
    assert "... and 4 more" in text
    assert "not covered: evaluation mode" in text
    assert report.exit_code == 1
    assert Report(title="", verdict="refused").exit_code == 2
    assert Report(title="", verdict="failed").exit_code == 1
