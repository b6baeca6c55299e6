"""The law for shards: a training in fsdpN is the training in one process, whatever the model does with its parameters.

Each model here has one trait that sharded frameworks find hard. The generality matrix has whole models.
"""

import contextlib
import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_processes
from test_own_loop import in_world
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from trainings import assert_same_training, distance, record

import shoal
from shoal.errors import JobError, LayoutError, WorldError
from shoal.job import mean_loss
from shoal.parallel.direct import DirectGather, DirectReduce
from shoal.parallel.parts import local_of
from shoal.parallel.place import placement_of
from shoal.parallel.shard import Shards
from shoal.world import Place, World


def same_as_lone(job, *layouts, on_step=None):
    (reference,) = record(job, on_step=on_step)
    for layout in layouts:
        assert_same_training(record(job, layout, on_step=on_step), reference)
    return reference


# -- whole trainings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    ["fsdp2", "fsdp3", "dp2.fsdp2", "fsdp2:reshard=false", "fsdp2:zero=2", "fsdp2:zero=3", "fsdp2:offload=cpu"],
)
@pytest.mark.parametrize("job", [jobs.Adamant, jobs.Tokens], ids=lambda job: job.__name__)
def test_shards_are_the_same_training_as_lone(job, layout):
    """Tokens has a tied table, a frozen one, a buffer, and a layer that is called twice."""
    same_as_lone(job, layout)


@pytest.mark.parametrize(
    "layout", ["fsdp2:micro=2", "fsdp3:micro=3", "dp2.fsdp2:micro=2", "fsdp2:micro=3,reshard=false"]
)
@pytest.mark.parametrize("job", [jobs.Adamant, jobs.Tokens], ids=lambda job: job.__name__)
def test_accumulation_is_the_same_training(job, layout):
    same_as_lone(job, layout)


@pytest.mark.parametrize(
    ("precision", "layout", "tolerance"),
    [("fp32", "fsdp2", 1e-5), ("fp32", "dp2.fsdp2", 1e-5), ("bf16", "fsdp2", 1e-2), ("fp16", "fsdp2", 1e-3)],
)
def test_lower_precision_stays_close_to_lone(precision, layout, tolerance):
    """With plain SGD, which shows a gradient of another size; a scalar among the parameters meets the loss scale."""

    class Floats(jobs.Points):
        def model(self):
            return Scaled()

        def data(self):
            inputs, targets = super().data().tensors
            return torch.utils.data.TensorDataset(inputs.float(), targets)

        evaluation = data

    (reference,) = record(lambda: Floats(precision=precision, steps=3))
    for seen in record(lambda: Floats(precision=precision, steps=3), layout):
        assert seen.losses == pytest.approx(reference.losses, rel=tolerance)
        assert all(tensor.dtype == torch.float32 for tensor in seen.state.values())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) * self.scale


def test_ranks_without_samples_take_part_with_weight_zero():
    same_as_lone(lambda: jobs.Normed(batch_size=2, num_samples=6), "fsdp4")


# -- which rank runs what ------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Four blocks; a sample goes through those of its features that are large, so ranks run different blocks."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.calls = calls
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for index, block in enumerate(self.blocks):
            for _ in range(self.calls):
                chosen = (x[:, index] > 0.9).nonzero()[:, 0]
                if len(chosen):
                    hidden = hidden.index_add(0, chosen, block(hidden[chosen]))
        return self.last(hidden)


@dataclass(frozen=True, kw_only=True)
class Gates(jobs.Points):
    """Momentum and decay show a zero where there should be None."""

    batch_size: int = 4
    calls: int = 1

    def model(self) -> nn.Module:
        return Gated(self.calls)


@pytest.mark.parametrize(
    ("calls", "layout"),
    [
        *(
            (1, layout)
            for layout in ("fsdp2", "fsdp4", "dp2.fsdp2", "fsdp2:micro=2", "fsdp2:reshard=false", "fsdp2:zero=2")
        ),
        *((2, layout) for layout in ("fsdp2", "fsdp2:micro=2", "fsdp2:reshard=false", "fsdp2:zero=2")),
        *(pytest.param(2, layout, marks=pytest.mark.drill) for layout in ("fsdp4", "dp2.fsdp2", "fsdp4:reshard=false")),
    ],
)
def test_ranks_may_run_different_blocks_and_some_not_at_all(calls, layout):
    """torch's fully_shard hangs here, or adds the gradient of one block to another."""
    reference = same_as_lone(lambda: Gates(calls=calls), layout)
    used = [{name for name, grad in grads.items() if grad is not None} for grads in reference.grads]
    assert len(set(map(frozenset, used))) > 1


@pytest.mark.parametrize("layout", ["fsdp2:micro=2", "fsdp4", "dp2.fsdp2", "fsdp2:reshard=false"])
def test_a_parameter_that_nobody_uses_keeps_none_and_one_that_some_use_gets_their_sum(layout):
    same_as_lone(jobs.Branching, layout)


class Siamese(nn.Module):
    """The blocks in another order than they are registered; one runs between and after the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        for index in (2, 0, 1, 0, 2):
            x = self.layers[index](x) + x
        return self.head(x) * self.scale


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2:micro=2", "fsdp2:reshard=false"])
def test_blocks_run_in_any_order_and_several_times(layout):
    class Job(jobs.Points):
        def model(self):
            return Siamese()

    same_as_lone(Job, layout)


# -- what the parameters are ---------------------------------------------------------------------------------


class Odd(nn.Module):
    """Scalars, complex numbers, no rows, fewer rows than ranks, rows that do not divide, strided, one tied matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.idle = nn.Parameter(torch.tensor(1.0))
        self.turn = nn.Parameter(torch.polar(torch.ones(4), torch.arange(4.0)))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.ones(1, 4))
        self.five = nn.Linear(4, 5)
        self.strided = nn.Parameter(torch.arange(20.0).view(4, 5).t() / 20)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layers[1].weight
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        x = self.tied(x * self.turn.real + self.one + self.shift)
        x = torch.cat([x, self.none.sum(0).expand_as(x)], 1)[:, :4]
        return (self.five(x) + F.linear(x, self.strided))[:, :3]


class Odds(jobs.Points):
    def model(self):
        return Odd()

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.01)


@pytest.mark.parametrize("layout", ["fsdp2:micro=2", "fsdp3", "dp2.fsdp2", "fsdp3:reshard=false"])
def test_parameters_of_any_shape(layout):
    reference = same_as_lone(Odds, layout)
    assert reference.grads[0]["idle"] is None
    assert reference.grads[0]["turn"].abs().sum() > 0


class Thawing(jobs.Points):
    """At first half of a block and all before it are frozen; later they are trained, and another block is not."""

    def model(self):
        model = Siamese()
        model.layers[0][0].weight.requires_grad_(False)
        model.layers[2].requires_grad_(False)
        return model


def thaw(run):
    layers = run.model.layers
    layers[0].requires_grad_(run.step >= 2)
    layers[2].requires_grad_(run.step >= 2)
    layers[1].requires_grad_(run.step != 3)
    run.model.scale.requires_grad_(run.step in (0, 3))


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2:micro=2,reshard=false", "dp2.fsdp2"])
def test_parameters_are_frozen_and_thawed(layout):
    reference = same_as_lone(Thawing, layout, on_step=thaw)
    assert [grads["layers.1.0.weight"] is None for grads in reference.grads] == [False, False, False, True, False]
    assert [grads["layers.2.0.weight"] is None for grads in reference.grads][1:3] == [True, False]
    assert [grads["scale"] is None for grads in reference.grads] == [False, True, True, False, True]


def test_what_is_written_on_a_parameter_stays_on_it():
    def look(world):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        model[1].bias.no_decay = True
        shoal.place(model, world)
        return [hasattr(param, "no_decay") for param in model.parameters()], isinstance(model[1].bias, DTensor)

    assert in_world("fsdp2", look) == [([False, False, False, True, False, False], True)] * 2


# -- how they are read, and what the model hands out ---------------------------------------------------------


class Reading(nn.Module):
    """Weights that other modules read: of an attention's output, of the table as a head. Views, changed in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Mixing() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            x += 1.0
        logits = F.linear(x, self.table.weight)[:, :3]
        packed = {
            "tuple": (None, logits),
            "dict": {"logits": logits, "no": None},
            "list": [logits],
            "data": Out(logits),
        }
        return packed.get(self.kind, logits)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x[:, None], x[:, None], x[:, None])
        return self.norm(mixed + x[:, None])[:, 0]


@dataclass
class Out:
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class Readers(jobs.Points):
    kind: str = "tensor"

    def model(self) -> nn.Module:
        return Reading(self.kind)

    def loss(self, output, batch):
        found = [leaf for leaf in torch.utils._pytree.tree_leaves(_fields(output)) if isinstance(leaf, Tensor)]
        return mean_loss(F.cross_entropy(found[0], batch[1], reduction="none"))

    def metrics(self, output, batch):
        return {}


def _fields(output):
    return vars(output) if dataclasses.is_dataclass(output) else output


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "list", "data"])
def test_weights_are_read_from_elsewhere_and_outputs_are_of_any_kind(kind):
    same_as_lone(lambda: Readers(kind=kind), "fsdp2", "fsdp2:micro=2")


# -- the pieces, in a loop of one's own ----------------------------------------------------------------------


def build(make=Siamese):
    torch.manual_seed(0)
    return make().double()


def batch_of(data_rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(data_rank), dtype=torch.float64)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model):
    return {name: whole(param.grad) for name, param in model.named_parameters()}


def mean_gradients(loss_of, num_data, make=Siamese):
    """In one process: the mean over the data ranks of each rank's gradient."""
    model = build(make)
    for data_rank in range(num_data):
        (loss_of(model, batch_of(data_rank)) / num_data).backward()
    return gradients(model)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor is None) == (expected[name] is None), name
        assert tensor is None or distance(tensor, expected[name]) < 1e-12, name


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2:reshard=false"])
def test_two_forwards_and_one_backward(layout):
    def loss_of(model, x):
        return (model(x) * model(x + 1.0)).sum()

    def train(world):
        model = shoal.place(build(), world)
        loss_of(model, batch_of(world.data_rank)).backward()
        return gradients(model)

    for found in in_world(layout, train):
        assert_same(found, mean_gradients(loss_of, 2))


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2:reshard=false"])
def test_two_backwards_through_one_graph_add_up(layout):
    def train(world):
        model = shoal.place(build(), world)
        loss = model(batch_of(world.data_rank)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    for found in in_world(layout, train):
        assert_same(found, mean_gradients(lambda model, x: 2 * model(x).square().sum(), 2))


class Choosing(Siamese):
    """Without `rest`, one block and the head."""

    def forward(self, x: Tensor, rest: bool = True) -> Tensor:
        x = self.layers[0](x)
        return super().forward(x) if rest else self.head(x)


def test_what_only_the_first_of_two_backwards_uses_keeps_its_gradient():
    def add_up(model, x):
        model(x).square().sum().backward()
        model(x, rest=False).square().sum().backward()

    def train(world):
        model = shoal.place(build(Choosing), world)
        add_up(model, batch_of(world.data_rank))
        return gradients(model)

    expected = mean_gradients(lambda m, x: m(x).square().sum() + m(x, rest=False).square().sum(), 2, Choosing)
    for found in in_world("fsdp2", train):
        assert_same(found, expected)


def test_a_model_may_be_moved_to_another_dtype_after_it_was_placed():
    def train(world):
        model = shoal.place(build().float(), world).double()
        model(batch_of(world.data_rank)).sum().backward()
        return gradients(model)

    for found in in_world("fsdp2", train):
        assert_same(found, mean_gradients(lambda m, x: m(x).sum(), 2, lambda: build().float()))


def test_a_look_without_gradient_between_forward_and_backward():
    def loss_of(model, x):
        return (model(x) * peek(model, x)).sum()

    def peek(model, x):
        with torch.no_grad():
            return model(x + 1.0)

    def train(world):
        model = shoal.place(build(), world)
        loss_of(model, batch_of(world.data_rank)).backward()
        return gradients(model)

    for found in in_world("fsdp2", train):
        assert_same(found, mean_gradients(loss_of, 2))


def test_a_rank_whose_loss_takes_nothing_of_the_model_takes_part_when_it_settles():
    def train(world):
        model = shoal.place(build(), world)
        output = model(batch_of(world.data_rank)).sum()
        if world.rank == 0:
            output.backward()
        placement_of(model).settle()
        return gradients(model)

    for found in in_world("fsdp2", train):
        assert_same(found, {name: grad / 2 for name, grad in mean_gradients(lambda m, x: m(x).sum(), 1).items()})


class Marked(Siamese):
    """Three blocks, one after the other; each tells when its backward begins."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.register_hook(lambda grad: self.mark())
        return self.head(x)


def traffic(world, num_micro):
    """One step of this rank: a letter for each gather (g), reduction (r) and backward of a block (b), as they come."""
    seen = []
    for letter, kind in (("g", DirectGather), ("r", DirectReduce)):
        direct = kind.__call__
        kind.__call__ = lambda *args, letter=letter, direct=direct, **options: (
            seen.append(letter),
            direct(*args, **options),
        )
    model = shoal.place(build(Marked), world)
    model.mark = lambda: seen.append("b")
    for part in range(num_micro):
        with placement_of(model).accumulate() if part < num_micro - 1 else contextlib.nullcontext():
            model(batch_of(world.data_rank)).sum().backward()
    return "".join(seen)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("fsdp2", ["g ggg", "gg b g b b", "ggg", "gg b g b b", "ggg", "gg b rg b r b rr"]),
        ("fsdp2:reshard=false", ["g ggg", "bbb", "bbb", "br br br r"]),
    ],
)
def test_blocks_are_gathered_for_each_pass_or_once_and_reduced_once_in_a_step(layout, expected):
    """Three micro-batches, over which the root stays whole; in backward the next gather runs beside a block."""
    assert in_world(layout, lambda world: traffic(world, 3)) == ["".join(expected).replace(" ", "")] * 2


def test_after_each_step_and_evaluation_the_parameters_are_parts_again():
    def train(world):
        model = shoal.place(build(), world)
        shapes = {name: param.to_local().shape for name, param in model.named_parameters()}
        seen = []
        for _ in range(2):
            model(batch_of(world.data_rank)).sum().backward()
            seen.append({name: param.to_local().shape for name, param in model.named_parameters()})
            with torch.no_grad():
                model(batch_of(0))
            seen.append({name: param.to_local().shape for name, param in model.named_parameters()})
        return seen == [shapes] * 4, shapes["layers.0.0.weight"], shapes["head.bias"], placement_of(model).shards.rows

    first, second = in_world("fsdp2:reshard=false", train)
    assert first[:3] == (True, (2, 4), (2,))
    assert second[:3] == (True, (2, 4), (1,))
    assert (first[3]["head.bias"], second[3]["head.bias"]) == ((0, 2), (2, 3))


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2:reshard=false"])
def test_gradients_of_a_rank_alone_are_told_and_forgotten(layout):
    def loss_of(model, x):
        return model(x).square().sum()

    def train(world):
        model = shoal.place(build(), world)
        shards = placement_of(model).shards
        with shards.accumulate():
            loss_of(model, batch_of(7 + world.data_rank)).backward()
        own = {name: grad.clone() for name, grad in shards.own_gradients().items()}
        shards.forget()
        forgotten = shards.own_gradients()
        loss_of(model, batch_of(world.data_rank)).backward()
        return own, forgotten, gradients(model)

    for rank, (own, forgotten, reduced) in enumerate(in_world(layout, train)):
        model = build()
        loss_of(model, batch_of(7 + rank)).backward()
        assert_same(own, gradients(model))
        assert forgotten == {}
        assert_same(reduced, mean_gradients(loss_of, 2))


@pytest.mark.parametrize("layout", ["fsdp2", "dp2.fsdp2:reshard=false"])
def test_with_all_parameters_whole_a_rank_may_call_the_model_alone(layout):
    def look(world):
        model = shoal.place(build(), world)
        with placement_of(model).shards.whole():
            alone = model.layers[1](model(batch_of(5))[:, [0, 1, 2, 0]]) if world.rank == 1 else None
        model(batch_of(world.data_rank)).sum().backward()
        return alone, gradients(model)

    found = in_world(layout, look)
    model = build()
    assert distance(found[1][0], model.layers[1](model(batch_of(5))[:, [0, 1, 2, 0]]).detach()) < 1e-12
    assert_same(found[0][1], mean_gradients(lambda model, x: model(x).sum(), len(found)))


# -- refusals ------------------------------------------------------------------------------------------------


def test_a_sparse_table_is_refused():
    with pytest.raises(JobError, match=r"0 has sparse gradients .* Take dpN"):
        record(jobs.SparseRows, "fsdp2")


def test_zero_1_is_refused_where_parameters_are_cut():
    with pytest.raises(LayoutError, match=r"fsdp2:zero=1.*Write dp2:zero=1"):
        in_world("fsdp2:zero=1", lambda world: Shards(build(), world))


def test_a_copy_is_refused():
    with pytest.raises(JobError, match="a model in shards cannot be copied"):
        in_world("fsdp2", lambda world: copy.deepcopy(shoal.place(build(), world)))


def test_a_block_by_itself_is_refused():
    with pytest.raises(JobError, match=r"layers.0 is called by itself, outside of the model's own forward"):
        in_world("fsdp2", lambda world: shoal.place(build(), world).layers[0](batch_of(0)))


class Reaching(nn.Module):
    """Something outside of the blocks reads a parameter of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.read(x))

    def read(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Product(Reaching):
    def read(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layers[1][0].weight)


class View(Reaching):
    def read(self, x: Tensor) -> Tensor:
        matrix = self.layers[1][0].weight
        return x @ matrix.T.detach()


class Penalty(Reaching):
    def read(self, x: Tensor) -> Tensor:
        return (
            x
            + self.layers[1][0].weight.square().sum()
        )  # fmt: skip


class Layer(Reaching):
    def read(self, x: Tensor) -> Tensor:
        return self.layers[1][0](x)


class Output(Reaching):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), self.layers[1][0].weight.square().sum()


@pytest.mark.parametrize("make", [Product, View, Penalty, Layer, Output])
@pytest.mark.parametrize("layout", ["fsdp2", "dp2.fsdp2", "fsdp2:recompute=block"])
def test_a_parameter_that_is_read_outside_of_its_block_is_named(make, layout):
    """torch says "got mixed torch.Tensor and DTensor"."""
    lesson = r"layers.1.0.weight is read outside of the forward of layers.1: .*Let the module that reads it hold it"
    with pytest.raises(JobError, match=lesson):
        in_world(layout, lambda world: shoal.place(build(make), world)(batch_of(0)))


def test_another_error_of_the_model_comes_as_it_is():
    class Failing(Reaching):
        def read(self, x: Tensor) -> Tensor:
            raise RuntimeError("of my own")

    with pytest.raises(RuntimeError, match="of my own"):
        in_world("fsdp2", lambda world: shoal.place(build(Failing), world)(batch_of(0)))


class Held(Product):
    """As the error advises: the reader holds it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = self.layers[1][0].weight


@pytest.mark.parametrize(("make", "layout"), [(Held, "fsdp2"), (Held, "dp2.fsdp2"), (Product, "fsdp2:reshard=false")])
def test_a_parameter_that_its_reader_holds_or_that_stays_whole_may_be_read(make, layout):
    class Job(jobs.Points):
        def model(self):
            return make()

    same_as_lone(Job, layout)


class Moving(Siamese):
    order = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return self.head(x)


def test_a_block_that_moves_is_refused_where_blocks_are_dropped_and_runs_where_they_stay():
    def loss_of(model, x):
        model.order = (2, 0, 1)
        return model(x).sum()

    def train(world):
        model = shoal.place(build(Moving), world)
        model(batch_of(world.data_rank))
        placement_of(model).shards.forget()
        loss_of(model, batch_of(world.data_rank)).backward()
        return gradients(model)

    with pytest.raises(JobError, match=r"layers.0 runs out of the order .*\(layers.0, layers.1, layers.2\)"):
        in_world("fsdp2", train)
    for found in in_world("fsdp2:reshard=false", train):
        assert_same(found, mean_gradients(loss_of, 2, Moving))


def test_after_its_world_a_sharded_model_says_so():
    def outlive(rank, size, rendezvous):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("fsdp2", place=place) as world:
            model = shoal.place(build(), world)
            model(batch_of(0)).sum().backward()
        assert not dist.is_initialized()
        model(batch_of(0))

    with pytest.raises(WorldError, match="in shards over the ranks of a world that is closed"):
        run_processes(outlive, 2)


@pytest.mark.parametrize("layout", ["fsdp2", "dp2.fsdp2", "tp2"])
def test_a_step_that_is_left_out_leaves_no_gradient_behind(layout):
    def spoil(run):
        if run.step == 1:
            with torch.no_grad():
                kept["weight"] = [local_of(p.detach()).clone() for p in run.model.parameters()]
                for param in run.model.parameters():
                    local_of(param.detach()).fill_(float("nan"))
        elif run.step == 2:
            with torch.no_grad():
                for param, value in zip(run.model.parameters(), kept["weight"], strict=True):
                    local_of(param.detach()).copy_(value)

    kept = {}
    (reference,) = record(lambda: jobs.Points(nonfinite="skip"), on_step=spoil)
    for seen in record(lambda: jobs.Points(nonfinite="skip"), layout, on_step=spoil):
        for name, tensor in seen.state.items():
            torch.testing.assert_close(tensor, reference.state[name], rtol=1e-10, atol=1e-12)
