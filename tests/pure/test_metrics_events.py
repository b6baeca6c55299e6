import errno
import json
import math
import sys
import types

import pytest

from shoal.metrics import events
from shoal.metrics.events import EventWriter, MetricsError, read_events, set_aside


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def write_steps(path, steps, resume_step=None, loss=1.0):
    writer = EventWriter(path, resume_step=resume_step, clock=lambda: 7.0)
    for step in steps:
        writer.write(step, {"train/loss": loss})
    writer.close()


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_is_one_json_object_with_step_and_time(path):
    write_steps(path, [1])
    assert json.loads(path.read_text()) == {"step": 1, "time": 7.0, "train/loss": 1.0}


def test_a_line_can_be_read_while_the_run_goes_on(path):
    writer = EventWriter(path)
    writer.write(1, {"train/loss": 2.0})
    assert read_events(path)[0]["train/loss"] == 2.0
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_figures_that_are_not_finite_are_valid_json_and_come_back(path, value):
    writer = EventWriter(path)
    writer.write(1, {"train/loss": value})
    writer.close()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (event,) = read_events(path)
    assert str(event["train/loss"]) == str(value)


@pytest.mark.parametrize("resume_step", [0, 3, 4, 9])
def test_no_step_is_in_the_file_twice_after_a_resume(path, resume_step):
    write_steps(path, [2, 4, 6, 8])
    write_steps(path, range(resume_step + 1, 11), resume_step=resume_step, loss=5.0)
    assert steps_in(path) == [s for s in (2, 4, 6, 8) if s <= resume_step] + list(range(resume_step + 1, 11))
    assert {e["train/loss"] for e in read_events(path) if e["step"] > resume_step} == {5.0}


def test_a_fresh_run_starts_an_empty_file(path):
    write_steps(path, [1, 2])
    write_steps(path, [1])
    assert steps_in(path) == [1]


@pytest.mark.parametrize("torn", [b'{"step": 3, "tra', b"\x00\x00\x00\n", b'{"step"\n'])
def test_a_half_written_last_line_is_left_out_and_gone_after_a_resume(path, torn):
    write_steps(path, [1, 2])
    with path.open("ab") as file:
        file.write(torn)
    assert [event["step"] for event in read_events(path)] == [1, 2]
    write_steps(path, [3], resume_step=2)
    assert steps_in(path) == [1, 2, 3]


def test_damage_before_the_last_line_is_named(path):
    write_steps(path, [1, 2, 3])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "garbage", lines[2], ""]))
    with pytest.raises(MetricsError, match="line 2 is no event, as it is no JSON: b'garbage'"):
        read_events(path)


def test_lines_of_one_step_are_read_as_one_event(path):
    writer = EventWriter(path)
    writer.write(5, {"train/loss": 1.0})
    writer.write(5, {"eval/loss": 2.0})
    writer.close()
    (event,) = read_events(path)
    assert (event["train/loss"], event["eval/loss"]) == (1.0, 2.0)


def test_a_finished_run_that_is_resumed_evaluates_again_without_a_second_line(path):
    write_steps(path, [5])
    writer = EventWriter(path, resume_step=5)
    writer.write(5, {"train/loss": 1.0})
    writer.write(5, {"eval/loss": 2.0})
    writer.close()
    assert [set(json.loads(line)) - {"step", "time"} for line in path.read_text().splitlines()] == [
        {"train/loss"},
        {"eval/loss"},
    ]


def test_logging_a_result_twice_is_refused(path):
    writer = EventWriter(path)
    writer.write(5, {"train/loss": 1.0})
    with pytest.raises(MetricsError, match="train/loss of step 5 was logged twice"):
        writer.write(5, {"train/loss": 1.0})
    with pytest.raises(MetricsError, match="step 4 was logged after step 5"):
        writer.write(4, {"train/loss": 1.0})
    writer.close()


def test_a_full_disk_costs_one_line_and_a_warning(path, monkeypatch):
    writer = EventWriter(path)

    def half(file, data):
        file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(events, "_write_all", half)
        with pytest.warns(RuntimeWarning, match="step 1 were not written: .*No space left"):
            writer.write(1, {"train/loss": 1.0})
    writer.write(2, {"train/loss": 1.0})
    writer.close()
    assert steps_in(path) == [2]


def test_missing_file_is_explained(path):
    with pytest.raises(MetricsError, match="there is no"):
        read_events(path)


def test_missing_tensorboard_names_the_line_to_install_it(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MetricsError, match=r"pip install 'shoal\[tensorboard\]'"):
        EventWriter(path, tensorboard=True)
    assert not path.exists()


def test_tensorboard_gets_the_same_figures_and_drops_the_steps_after_a_resume(path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, *scalar):
            calls.append(scalar)

        def close(self):
            calls.append("closed")

    fake = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    writer = EventWriter(path, resume_step=3, tensorboard=True)
    writer.write(4, {"train/loss": 1.0, "perf/mfu": None})
    writer.close()
    assert calls == [(str(path.parent / "tensorboard"), 4), ("train/loss", 1.0, 4), "closed"]


def test_events_of_an_earlier_run_make_place_and_none_is_lost(path):
    assert set_aside(path) is None
    for count in (1, 2):
        write_steps(path, range(1, count + 1))
        place = set_aside(path)
        assert place == path.with_name(f"metrics-{count}.jsonl")
        assert len(steps_in(place)) == count
    assert not path.exists()
