"""A fake world: any rank of any size in one process; collectives return at once and compute nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.errors import LayoutError, WorldError
from shoal.parallel.place import place
from shoal.world import Place, World


def at(rank: int, size: int) -> Place:
    return Place(rank=rank, size=size, local_rank=rank % 8, local_size=8, num_nodes=size // 8, source="flags")


def test_a_world_of_64_opens_in_one_process():
    with World.open("dp64", kind="fake") as world:
        assert (world.kind, world.rank, world.size, world.num_data, world.data_rank) == ("fake", 0, 64, 64, 0)
        assert (world.backend, dist.get_world_size(), world.device) == ("fake", 64, torch.device("cpu"))
    assert not dist.is_initialized()


@pytest.mark.timeout(30)  # a group for each rank would take minutes
@pytest.mark.parametrize("rank", [0, 5, 4095])
def test_any_rank_of_thousands_opens_at_once(rank):
    with World.open("dp4096", kind="fake", place=at(rank, 4096)) as world:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.barrier()
        assert (world.rank, world.data_rank, dist.get_rank()) == (rank, rank, rank)


def test_a_fake_run_reads_nothing_and_agrees_with_itself():
    with World.open("dp64", kind="fake", place=at(5, 64)) as world:
        assert world.read(torch.ones(2)) is None
        assert world.gather_text("a") == ["a"] * 64
        assert world.gather_floats([1.5]) == [[1.5]] * 64
        world.agree({"a": 1})
        world.barrier()


def test_the_size_of_a_place_must_be_that_of_the_layout():
    with (
        pytest.raises(LayoutError, match="dp64 needs 64 processes, but this world has 32"),
        World.open("dp64", kind="fake", place=at(5, 32)),
    ):
        pass


def test_a_group_that_is_open_already_is_not_touched():
    with World.open("dp2", kind="fake"):
        with pytest.raises(WorldError, match="open in this process already"), World.open("dp2", kind="fake"):
            pass
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_a_fake_world_closes_when_its_body_fails():
    with pytest.raises(KeyError), World.open("dp2", kind="fake"):
        raise KeyError
    assert not dist.is_initialized()


def test_a_model_is_placed_and_steps_twice_in_a_world_of_64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with World.open("dp64", kind="fake", place=at(5, 64)) as world:
        place(model, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            assert not torch.equal(model[0].weight, before)
