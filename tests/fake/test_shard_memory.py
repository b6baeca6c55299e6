"""What a rank holds of a sharded training, in bytes, is what the theory says; any rank of any world, in one process.

Of a parameter of R rows, a rank of fsdpN keeps ceil(R / N) rows in memory, the last ranks with some to spare; of its
gradient as many, and of each of the two moments of AdamW the rows that are really there. What has no rows is whole.
"""

import gc
import math

import pytest
import torch
from torch import nn

import shoal
from shoal.models.gpt import Decoder
from shoal.parallel.parts import local_of
from shoal.parallel.zero import OwnedStates
from shoal.world import Place, World

FLOAT = 4  # bytes
LAYERS = 3


class Scaled(nn.Module):
    """A decoder of uneven sizes with a scalar beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(width=24, depth=LAYERS, heads=2, context=6, tied=True, dropout=0.0)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens):
        return self.decoder(tokens) * self.scale


SHAPES = {name: param.shape for name, param in Scaled().named_parameters()}


def chunk_bytes(shape, size):
    """Of the rows that a rank makes room for; of a scalar, all."""
    return FLOAT * (math.ceil(shape[0] / size) * math.prod(shape[1:]) if shape else 1)


def own_bytes(shape, size, rank):
    """Of the rows that a rank really has."""
    if not shape:
        return FLOAT
    chunk = math.ceil(shape[0] / size)
    rows = min(shape[0], (rank + 1) * chunk) - min(shape[0], rank * chunk)
    return FLOAT * rows * math.prod(shape[1:])


def storage_bytes(tensors):
    """Each piece of memory once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def live_bytes():
    gc.collect()
    tensors = [tensor for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, nn.Parameter)]
    return storage_bytes(
        [tensor for tensor in tensors if tensor.layout == torch.strided]
    )  # others' tests leave sparse ones


def at(rank, size):
    nodes = -(-size // 8)
    return Place(rank=rank, size=size, local_rank=rank % 8, local_size=size // nodes, num_nodes=nodes, source="flags")


def train(world, *, micro=1):
    """One step; the model, its optimizer, and the bytes of parameters, gradients and states after it."""
    model = shoal.place(Scaled(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.zeros(2, 6, dtype=torch.int64)).sum().backward()
    gradients = storage_bytes([local_of(param.grad) for param in model.parameters()])
    optimizer.step()
    states = [local_of(value) for state in optimizer.state.values() for value in state.values() if value.dim()]
    states += [optimizer.state[model.scale][key] for key in ("exp_avg", "exp_avg_sq")]
    return model, optimizer, storage_bytes(map(local_of, model.parameters())), gradients, storage_bytes(states)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("option", ["", ":reshard=false"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_parameters_gradients_and_states_are_a_shard(size, option, where):
    rank = {"first": 0, "middle": size // 2, "last": size - 1}[where]
    with World.open(f"fsdp{size}{option if size > 1 else ''}", kind="fake", place=at(rank, size)) as world:
        _, _, parameters, gradients, states = train(world)
    assert parameters == sum(chunk_bytes(shape, size) for shape in SHAPES.values())
    assert gradients == sum(chunk_bytes(shape, size) for shape in SHAPES.values())
    assert states == 2 * sum(own_bytes(shape, size, rank) for shape in SHAPES.values())


@pytest.mark.parametrize(("layout", "size"), [("dp4.fsdp2", 2), ("dp2.fsdp8", 8)])
def test_replicas_of_shards_hold_the_same_as_shards_alone(layout, size):
    with World.open(layout, kind="fake") as world:
        _, _, parameters, gradients, states = train(world)
    assert parameters == gradients == sum(chunk_bytes(shape, size) for shape in SHAPES.values())
    assert states == 2 * sum(own_bytes(shape, size, 0) for shape in SHAPES.values())


@pytest.mark.parametrize("layout", ["fsdp8", "fsdp8:reshard=false"])
def test_nothing_else_is_kept_between_steps(layout):
    """All tensors of the process, not only those that the model shows."""
    with World.open(layout, kind="fake", place=at(0, 8)) as world:
        train(world)  # what torch makes once
        before = live_bytes()
        kept = train(world)
        grown = live_bytes() - before
    small = FLOAT * 64  # the step counts of AdamW, the count of unused parameters
    assert 0 <= grown - sum(kept[2:]) <= small + FLOAT * len(SHAPES)


def whole_bytes(*parts):
    return FLOAT * sum(math.prod(shape) for name, shape in SHAPES.items() if any(part in name for part in parts))


@pytest.mark.parametrize(("layout", "num_whole"), [("fsdp8", 1), ("fsdp8:reshard=false", LAYERS)])
def test_while_the_last_block_runs_the_blocks_before_it_are_dropped_or_stay(layout, num_whole):
    seen = []
    with World.open(layout, kind="fake", place=at(0, 8)) as world:
        model = shoal.place(Scaled(), world)
        last = model.decoder.blocks[-1]
        last.mlp.register_forward_hook(lambda *_: seen.append(live_bytes()))
        with torch.no_grad():
            for _ in range(2):
                before = live_bytes()
                model(torch.zeros(2, 6, dtype=torch.int64))
    root = whole_bytes("token", "position", "decoder.norm")
    block = whole_bytes("blocks.0.")
    whole = seen[1] - before
    buffer = block  # torch holds what it gathered last until it gathers again
    assert 0 <= whole - (root + num_whole * block + buffer) < block / 2  # the rest are activations


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_zero_1_keeps_all_but_the_states_whole(size):
    whole = sum(FLOAT * math.prod(shape) for shape in SHAPES.values())
    largest = max(FLOAT * math.prod(shape) for shape in SHAPES.values())
    held = []
    for rank in range(size):
        with World.open(f"dp{size}", kind="fake", place=at(rank, size)) as world:
            model = shoal.place(Scaled(), world)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            states = OwnedStates(optimizer, world)
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            optimizer.step()
            assert storage_bytes(model.parameters()) == whole
            moments = [optimizer.state[p][key] for p in optimizer.state for key in ("exp_avg", "exp_avg_sq")]
            assert storage_bytes(moments) == 2 * sum(p.nbytes for p in model.parameters() if states.owns(p))
            held.append(storage_bytes(moments))
    assert sum(held) == 2 * whole
    assert max(held) <= 2 * (whole / size + largest)
