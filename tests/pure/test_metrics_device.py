import subprocess
import sys
import time

import pytest
import torch

from shoal.metrics.memory import GIB, high_water_bytes, peak_memory_gib, rusage_unit_bytes
from shoal.metrics.peak import best_product, device_peak
from shoal.metrics.utilisation import CpuMeter, GpuMeter, family_cpu_s, open_meter

CPU = torch.device("cpu")


def slow_machine(flops):
    """A clock, and products that take their time on it at a given FLOP/s."""
    clock = [0.0]

    def prepare(size):
        def multiply():
            clock[0] += 2 * size**3 / flops

        return multiply

    return prepare, lambda: clock[0]


@pytest.mark.parametrize("flops", [1e9, 50e9, 5e12])
def test_probe_finds_the_rate_of_the_machine_within_its_budget(flops):
    prepare, now = slow_machine(flops)
    rate, size = best_product(prepare, budget_s=0.25, now=now)
    assert rate == pytest.approx(flops)
    assert size >= 128
    assert now() < 0.3


def test_larger_products_are_tried_only_where_they_are_quick():
    sizes = []

    def recording(flops):
        prepare, now = slow_machine(flops)
        sizes.clear()
        best_product(lambda size: sizes.append(size) or prepare(size), now=now)
        return list(sizes)

    assert recording(1e9) == [128, 256]
    assert recording(5e12) == [128, 256, 512, 1024, 2048]


def test_cpu_peak_is_measured_and_moves_no_random_stream():
    stream = torch.get_rng_state()
    peak = device_peak(CPU, "fp32")
    assert peak.flops > 1e8
    assert peak.dtype == "fp32"
    assert "measured" in peak.source
    assert torch.equal(torch.get_rng_state(), stream)


def test_gpu_peak_is_the_dense_figure_of_exactly_this_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    peak = device_peak(torch.device("cuda", 0), "bf16")
    assert peak.flops == pytest.approx(989e12, rel=1e-3)
    assert "dense" in peak.source


def test_tf32_is_measured_against_the_tf32_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    reduced = device_peak(cuda, "fp32")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    full = device_peak(cuda, "fp32")
    assert (reduced.dtype, full.dtype) == ("tf32", "fp32")
    assert reduced.flops > 5 * full.flops


def test_unknown_device_has_no_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Imaginary 9000")
    assert device_peak(torch.device("cuda", 0), "bf16") is None
    assert device_peak(torch.device("meta"), "fp32") is None


def test_peak_memory_remembers_what_was_freed():
    before = peak_memory_gib(CPU)
    size = int((before + 0.1) * GIB)
    held = torch.ones(size, dtype=torch.uint8)
    del held
    assert before + 0.1 <= peak_memory_gib(CPU) < 2 * before + 0.2


def test_units_of_peak_memory():
    assert high_water_bytes("VmPeak:\t  99 kB\nVmHWM:\t  2048 kB\n") == 2 * 2**20
    assert high_water_bytes("Name:\tpython\n") is None
    assert (rusage_unit_bytes("darwin"), rusage_unit_bytes("linux")) == (1, 1024)


def test_cpu_share_is_cpu_time_over_wall_time_and_threads_since_the_last_read():
    wall, cpu = iter([0.0, 2.0, 4.0]), iter([10.0, 13.0, 13.0])
    meter = CpuMeter(2, now=lambda: next(wall), cpu_s=lambda: next(cpu))
    assert meter.read() == 0.75
    assert meter.read() == 0.0


def test_cpu_seconds_grow_with_work():
    before = family_cpu_s()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert 0.03 < family_cpu_s() - before < 5.0


def test_gpu_without_a_driver_says_nothing_about_utilisation():
    meter = open_meter(torch.device("cuda", 0), num_threads=1)
    assert isinstance(meter, GpuMeter)
    assert isinstance(open_meter(CPU, num_threads=1), CpuMeter)
    if not torch.cuda.is_available():
        assert meter.read() is None


def test_the_room_imports_no_torch_and_counting_no_compiler():
    program = """
import sys
from shoal.metrics import clock, curve, definitions, events, memory, peak, progress, reduce, utilisation
assert not {"torch", "rich", "pydantic", "psutil"} & set(sys.modules)
import torch
from shoal.metrics.flops import count_flops
layer = torch.nn.Linear(2, 2)
with count_flops() as count:
    layer(torch.ones(1, 2)).sum().backward()
assert count.model == 16
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
