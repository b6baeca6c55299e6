"""A model that no rank builds whole: each parameter from (seed, name), the same in every layout, one at a time."""

import functools
import multiprocessing
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import _warm_up
from torch import nn
from torch.utils.data import TensorDataset
from trainings import assert_same_training, record
from zoo import ZOO

from shoal.errors import LayoutError
from shoal.job import Job, Params, Sum, mean_loss
from shoal.parallel.recipe import Recipes

KINDS = ("gpt, tied weights", "CNN with BatchNorm", "encoder-decoder (nn.Transformer)")


@pytest.mark.parametrize("kind", KINDS)
def test_by_name_is_one_training_in_every_layout(kind):
    def job():
        return ZOO[kind](init="by-name")

    job().model()  # what it imports is imported once, before the ranks are forked
    (reference,) = record(job)
    for layout in ("dp2", "fsdp2", "dp2.fsdp2"):
        assert_same_training(record(job, layout), reference)


@pytest.mark.parametrize("kind", ZOO)
def test_every_kind_of_constructor_can_be_written_down_and_done_later(kind):
    torch.manual_seed(0)
    expected = ZOO[kind]().model()
    recipes = Recipes()
    with recipes.writing():
        model = ZOO[kind]().model()
    recipes.know(model)
    for name, param in model.named_parameters():
        assert param.is_meta
        value, whole = recipes.value(name, seed_of), expected.get_parameter(name).detach()
        assert value.shape == whole.shape
        assert value.dtype == whole.dtype
        if whole.unique().numel() <= 2:  # ones, zeros
            assert torch.equal(value, whole)
        elif whole.numel() >= 256:  # drawn: from the same distribution
            assert float(value.double().std() / whole.double().std()) == pytest.approx(1, abs=0.25)


def seed_of(name: str) -> None:
    torch.manual_seed(sum(name.encode()))


class Odd(nn.Module):
    """What constructors do besides plain draws: a parameter from another, a row of zeros, a rejection loop."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16, padding_idx=3)
        self.first = nn.Linear(16, 16)
        nn.init.trunc_normal_(self.first.weight, std=0.02)
        self.second = nn.Linear(16, 16)
        self.second.weight.data.copy_(2 * self.first.weight.data)
        self.third = nn.Linear(16, 16)
        nn.init.orthogonal_(self.third.weight)
        self.scale = nn.Parameter(torch.full((16,), 0.5))


def test_constructors_that_do_more_than_draw_are_followed():
    recipes = Recipes()
    with recipes.writing():
        model = Odd()
    recipes.know(model)
    value = {name: recipes.value(name, seed_of) for name, _ in model.named_parameters()}
    assert not value["table.weight"][3].any()
    assert value["table.weight"][4].all()
    assert float(value["first.weight"].std()) == pytest.approx(0.02, rel=0.2)
    assert float(value["second.weight"].std()) == pytest.approx(0.04, rel=0.2)
    third = value["third.weight"]
    assert torch.allclose(third @ third.T, torch.eye(16), atol=1e-5)
    assert value["scale"].eq(0.5).all()
    assert torch.equal(value["first.weight"], recipes.value("first.weight", seed_of))


WIDTH, DEPTH = 1024, 16  # 4 MiB each, 64 MiB in all
INITS = ("whole", "by-name")


@dataclass(frozen=True, kw_only=True)
class Large(Job):
    batch_size: int = 4
    steps: int = 1
    folder: str = ""

    def model(self) -> nn.Module:
        Path(self.folder, f"start_{id(self)}").touch()
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

    def data(self) -> TensorDataset:
        return TensorDataset(torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))

    def loss(self, output: torch.Tensor, batch: list[torch.Tensor]) -> Sum:
        return mean_loss((output - batch[1]).square().mean(dim=1))

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        self.measured(params)
        return torch.optim.SGD(params, lr=0.1)

    def measured(self, params: Params) -> None:
        """Called when the model is placed and filled: the most memory so far, beyond that of the fork."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        Path(self.folder, f"peak_{torch.distributed.get_rank()}").write_text(str(peak_kib))


def test_no_rank_holds_more_than_its_shard_and_one_block(tmp_path):
    """In ranks that come from a young process: an old one has freed memory, which would hide what is taken."""
    here = Path(__file__)
    path = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, here, tmp_path], check=True, timeout=100, env=os.environ | {"PYTHONPATH": path})
    whole, by_name = (
        max(float(path.read_text()) for path in (tmp_path / init).glob("peak_*")) / 1024 for init in INITS
    )
    # Whole: 64 MiB, and the shards beside it. By name: a shard of 32 MiB and one block of 4 MiB.
    assert whole - by_name > 0.6 * WIDTH * WIDTH * DEPTH * 4 / 2**20


def test_tensor_parallelism_without_weights_is_refused():
    with pytest.raises(LayoutError, match="init=by-name no weights are there yet"):
        record(lambda: ZOO["MLP"](init="by-name"), "tp2")


def measure(folder: Path, init: str) -> None:
    folder.mkdir()
    record(functools.partial(Large, folder=str(folder), init=init), "fsdp2")  # type: ignore[arg-type]


if __name__ == "__main__":
    _warm_up()
    for init in INITS:  # each in a process of its own, since what one records would be inherited by the next
        process = multiprocessing.get_context("fork").Process(target=measure, args=(Path(sys.argv[1], init), init))
        process.start()
        process.join()
        assert process.exitcode == 0
