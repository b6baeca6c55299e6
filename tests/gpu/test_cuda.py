"""On a CUDA device: the same training as on the CPU to rounding, and NCCL ranks where there are two devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

JOB = """
from dataclasses import dataclass
import torch, torch.nn.functional as F
from torch import nn
from shoal.job import Job, mean_loss

@dataclass(frozen=True, kw_only=True)
class Points(Job):
    batch_size: int = 7
    steps: int = 5
    precision: str = "fp64"

    def model(self):
        return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def data(self):
        draw = torch.Generator().manual_seed(1)
        return torch.utils.data.TensorDataset(
            torch.randn(24, 4, generator=draw), torch.randint(0, 3, (24,), generator=draw))

    def loss(self, output, batch):
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-2)
"""


def losses(folder: Path, layout: str, device: str, *flags: str) -> list[float]:
    (folder / "points.py").write_text(JOB)
    run = folder / f"{layout}-{device}"
    command = [
        sys.executable,
        "-m",
        "shoal",
        "train",
        "points.py",
        "--layout",
        layout,
        "--device",
        device,
        "--run",
        run,
    ]
    subprocess.run([*command, *flags], check=True, cwd=folder, timeout=100)
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event["train/loss"] for event in events if "train/loss" in event]


def test_cuda_is_the_same_training_as_cpu(tmp_path):
    assert losses(tmp_path, "lone", "cuda") == pytest.approx(losses(tmp_path, "lone", "cpu"), rel=1e-10)


def test_nccl_ranks_are_the_same_training_as_lone(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs one device per rank, and there is one")
    assert losses(tmp_path, "dp2", "cuda") == pytest.approx(losses(tmp_path, "lone", "cpu"), rel=1e-10)
