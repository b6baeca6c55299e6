import pytest

from shoal.metrics import definitions as d

DAY_S = 86_400


def test_megatron_2019_reached_30_percent_of_one_v100():
    assert d.mfu(39e12, 1.0, 1, 130e12) == pytest.approx(0.30)


def test_megatron_2019_scaled_to_512_devices_with_76_percent():
    speed_up = d.speed_up(seconds_on_one=15.1e15 / 39e12, seconds_on_many=1.0)
    assert round(d.efficiency(speed_up, 512), 2) == 0.76
    assert round(d.weak_efficiency(39e12, 15.1e15, 512), 2) == 0.76


def test_palm_540b_reached_46_percent_mfu():
    flops_per_token = d.dense_flops_per_token(540.35e9, depth=118, width=48 * 256, context=2048)
    tokens_per_s = 238.3e3
    assert round(d.mfu(tokens_per_s * flops_per_token, 1.0, 6144, 275e12), 3) == 0.462


@pytest.mark.parametrize(
    ("tokens", "depth", "width", "devices", "flops_per_device", "days"),
    [(300e9, 96, 12288, 1024, 140e12, 34), (450e9, 128, 25600, 3072, 163e12, 84)],
)
def test_sc21_training_times_come_out_of_the_step_formula(tokens, depth, width, devices, flops_per_device, days):
    per_step = d.gpt_step_flops(1, 2048, depth=depth, width=width, vocabulary=51200, recompute=True)
    total = per_step * tokens / 2048
    assert total / (devices * flops_per_device) / DAY_S == pytest.approx(days, rel=0.025)


def test_sc21_formula_without_recomputation_is_6n_plus_attention():
    depth, width, context, vocabulary = 24, 2304, 2048, 51200
    num_parameters = 12 * depth * width**2 + vocabulary * width
    per_token = d.dense_flops_per_token(num_parameters, depth, width, context)
    step = d.gpt_step_flops(512, context, depth=depth, width=width, vocabulary=vocabulary)
    assert step == pytest.approx(512 * context * per_token, rel=1e-12)


def test_recomputation_adds_one_forward_of_the_layers_and_none_of_the_output():
    shape = {"depth": 3, "width": 64, "vocabulary": 1000}
    model = d.gpt_step_flops(2, 32, **shape)
    output = 6 * 2 * 32 * 64 * 1000
    assert d.gpt_step_flops(2, 32, **shape, recompute=True) == pytest.approx(model + (model - output) / 3)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_accumulation_does_not_change_mfu(micro_batches):
    flops_of_batch, seconds_of_batch = 8e12, 4.0
    step_flops = sum(flops_of_batch / micro_batches for _ in range(micro_batches))
    step_s = sum(seconds_of_batch / micro_batches for _ in range(micro_batches))
    assert d.mfu(step_flops, step_s, 1, 10e12) == pytest.approx(0.2)


def test_mfu_of_four_ranks_with_equal_work_is_that_of_one():
    assert d.mfu(4 * 3e12, 1.0, 4, 10e12) == d.mfu(3e12, 1.0, 1, 10e12) == 0.3


def test_unknown_peak_gives_no_mfu():
    assert d.mfu(1e12, 1.0, 1, None) is None
    assert d.hfu(1e12, 1.0, 1, None) is None


def test_efficiency_counts_in_multiples_of_its_base():
    assert d.efficiency(speed_up=3.0, num_devices=32, num_devices_of_base=8) == 0.75
    assert d.per_device(d.throughput(800, 2.0), 4) == 100
    assert d.goodput(45, 60) == 0.75
