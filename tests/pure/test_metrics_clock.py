import math

import pytest

from shoal.metrics.clock import StepClock


class FakeTime:
    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s

    def pass_by(self, seconds):
        self.s += seconds


@pytest.fixture
def time():
    return FakeTime()


def run_step(clock, time, wait_s, compute_s, samples=8):
    with clock.waiting():
        time.pass_by(wait_s)
    time.pass_by(compute_s)
    clock.end_step(samples=samples, tokens=samples * 16)


def test_a_slow_loader_shows_as_data_wait_over_all_steps_since_the_last_log(time):
    clock = StepClock(now=time)
    run_step(clock, time, wait_s=0.1, compute_s=0.3)
    run_step(clock, time, wait_s=0.3, compute_s=0.3)
    interval = clock.take()
    assert interval.steps == 2
    assert interval.step_time_s == pytest.approx(0.5)
    assert interval.data_wait_s == pytest.approx(0.4)
    assert interval.data_wait == pytest.approx(0.4)
    assert interval.per_second(interval.samples) == pytest.approx(16)
    assert interval.tokens == 256


def test_each_interval_starts_anew(time):
    clock = StepClock(now=time)
    run_step(clock, time, wait_s=5.0, compute_s=5.0)
    clock.take()
    run_step(clock, time, wait_s=0.0, compute_s=1.0)
    interval = clock.take()
    assert (interval.steps, interval.seconds, interval.data_wait_s, interval.samples) == (1, 1.0, 0.0, 8)


def test_saving_and_evaluating_are_no_step_time(time):
    clock = StepClock(now=time)
    with clock.paused():
        time.pass_by(60)
    run_step(clock, time, wait_s=0.0, compute_s=1.0)
    with clock.paused():
        time.pass_by(60)
    assert clock.take().seconds == pytest.approx(1.0)


def test_a_wait_that_fails_is_still_counted(time):
    clock = StepClock(now=time)

    def fetch():
        with clock.waiting():
            time.pass_by(2)
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fetch()
    clock.end_step()
    assert clock.take().data_wait == 1.0


def test_a_clock_that_stands_still_divides_by_nothing(time):
    clock = StepClock(now=time)
    clock.end_step(samples=8)
    interval = clock.take()
    assert interval.data_wait == 0.0
    assert math.isnan(interval.per_second(interval.samples))
