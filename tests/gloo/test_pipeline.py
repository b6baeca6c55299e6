"""The law over pipeline stages: any schedule, alone and with every other axis, is the training of one process."""

import itertools
import os
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from ranks import run_processes
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from trainings import Record, assert_same_training, record, walk
from zoo import ZOO, Convolutions, Images, Text, TiedGPT

from shoal.errors import JobError, LayoutError
from shoal.job import Sum, mean_loss, token_loss
from shoal.layout import Layout
from shoal.parallel.parts import parts_of
from shoal.parallel.place import placement_of
from shoal.run import assemble
from shoal.world import Place, World

SCHEDULES = [
    "schedule=gpipe",
    "schedule=1f1b",
    "schedule=interleaved",
    "schedule=interleaved,virtual=2",
    "schedule=looped-bfs,virtual=2",
    "schedule=zb,virtual=2",
    "schedule=zbv",
    "schedule=dualpipev",
]
LAYOUTS = [
    f"pp{pp}.dp{dp}.fsdp{fsdp}.tp{tp}"
    for pp in (2, 4)
    for dp in (1, 2)
    for fsdp in (1, 2)
    for tp in (1, 2)
    if pp * dp * fsdp * tp <= 8
]
LARGE = ("pp2.dp1.fsdp2.tp2",)  # of those in eight processes


@pytest.fixture(scope="module")
def lone():
    return record(Deep)[0]


@dataclass(frozen=True, kw_only=True)
class Deep(TiedGPT):
    """As many blocks as the deepest pipeline has stages, and a weight that the first and the last share."""

    width: int = 16
    heads: int = 2
    depth: int = 4
    batch_size: int = 15  # ragged over ranks and micro-batches


def fits(layout: str) -> bool:
    try:
        Layout.parse(layout)
    except LayoutError:
        return False
    return True


def in_layouts(make_job, layouts, on_step=None) -> list[list[Record]]:
    """One training per layout, all on the same processes; by rank, then by layout."""

    def rank(rank: int, size: int, rendezvous: str) -> list[Record]:
        found = []
        for number, layout in enumerate(layouts):
            place = Place(
                rank=rank,
                size=size,
                local_rank=rank,
                local_size=size,
                rendezvous=f"{rendezvous}_{number}",
                source="shoal",
            )
            with World.open(layout, place=place) as world:
                found.append(walk(assemble(make_job(), world, quiet=True), on_step))
        return found

    return run_processes(rank, Layout.parse(layouts[0]).num_ranks, time_limit_s=280)


# `make proof` takes every schedule in all of them.
PROOF = "SHOAL_PROOF" in os.environ
TRIED = [name for name in LAYOUTS if PROOF or Layout.parse(name).num_ranks < 8 or name in LARGE]


@pytest.mark.parametrize("layout", TRIED)
def test_every_schedule_in_every_product_of_axes_is_the_same_training(layout, lone):
    micro = 8 if layout.startswith("pp4") else 4
    at, count = LAYOUTS.index(layout), {2: len(SCHEDULES)}.get(Layout.parse(layout).num_ranks, 1)
    few = SCHEDULES if PROOF else [SCHEDULES[(at + 3 * turn) % len(SCHEDULES)] for turn in range(count)]
    layouts = [f"{layout}:micro={micro},{schedule}" for schedule in few if fits(f"{layout}:micro={micro},{schedule}")]
    assert len(layouts) == len(few)
    for rank in in_layouts(Deep, layouts):
        for seen in rank:
            assert_same_training([seen], lone)


@pytest.mark.parametrize("layout", ["pp2", "pp2:micro=2,recompute=block", "pp2:micro=2,split=1", "pp3:micro=3"])
def test_other_options_are_the_same_training(layout, lone):
    assert_same_training(record(Deep, layout), lone)


@pytest.mark.parametrize(("value", "rel"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3)])
def test_other_precisions_are_the_same_training_to_their_rounding(value, rel):
    def job():
        return Deep(precision=value)

    (reference,) = record(job)
    (seen, *_) = record(job, "pp2:micro=2")
    assert seen.losses == pytest.approx(reference.losses, rel=rel)


def test_adam_state_of_what_is_in_other_stages_takes_no_memory_and_each_rank_holds_its_stages():
    seen = {}

    def look(run):
        parts = parts_of(run.model)
        held = [name for name, param in run.model.named_parameters() if param.numel()]
        seen["held"], seen["boxed"] = held, [name for name in parts if parts[name].boxes]
        seen["state"] = sum(v.numel() for s in run.optimizer.state.values() for v in s.values() if v.dim())
        seen["numel"] = sum(p.numel() for p in run.model.parameters())

    def rank(rank, size, rendezvous):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("pp2:micro=2", place=place) as world:
            walk(assemble(Deep(), world, quiet=True), look)
        return seen

    first, last = run_processes(rank, 2)
    assert set(first["held"]) & set(last["held"]) == {"token.weight"}  # tied to the head
    assert all(set(each["held"]) <= set(each["boxed"]) for each in (first, last))
    assert all(each["state"] == 2 * each["numel"] for each in (first, last))


def live_micro_batches(schedule: str, micro: int) -> list[int]:
    def rank(rank, size, rendezvous):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open(f"pp2:micro={micro},schedule={schedule}", place=place) as world:
            run = assemble(Deep(batch_size=16, steps=1), world, quiet=True)
            alive, most = set(), 0
            block = run.model.blocks[0 if rank == 0 else 3]

            def begin(module, args, output):
                nonlocal most
                token = object()
                alive.add(token)
                most = max(most, len(alive))
                output.register_hook(lambda grad: alive.discard(token))

            block.register_forward_hook(begin)
            for step in run.steps():
                step()
            return most

    return run_processes(rank, 2)


def test_1f1b_keeps_the_activations_of_as_many_micro_batches_as_there_are_stages_and_gpipe_of_all():
    assert live_micro_batches("1f1b", 6) == [2, 1]
    assert live_micro_batches("gpipe", 6) == [6, 6]


# -- any module ---------------------------------------------------------------------------------------------


class Crossing(nn.Module):
    """Tuples, dicts, keyword arguments, None, numbers and masks between blocks, and a skip over all of them."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear, self.gate = nn.Linear(width, width), nn.Linear(width, 1)

        def forward(self, pair, *, mask, scale, extra=None):
            x, gates = pair["x"], pair["gates"]
            x = x + scale * torch.tanh(self.linear(x)) * mask
            return {"x": x, "gates": (*gates, self.gate(x)), "count": len(gates) + 1}, None

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(self.Block(width) for _ in range(depth))
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 32)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, tokens):
        mask = (tokens > 3).unsqueeze(-1).to(self.token.weight.dtype)
        first = x = self.token(tokens) + self.shift.expand(len(tokens), -1, -1)
        pair = {"x": x, "gates": (), "count": 0}
        for number, block in enumerate(self.blocks):
            pair, nothing = block(pair, mask=mask, scale=0.1 * (number + 1))
            assert nothing is None
            assert pair["count"] == number + 1
        gates = torch.cat(pair["gates"], -1).sigmoid().mean(-1, keepdim=True)
        x = self.join(torch.cat([pair["x"] * gates, first * self.scale], -1))
        return {"logits": self.head(x), "size": x.shape[1]}


@dataclass(frozen=True, kw_only=True)
class Skips(Text):
    def model(self):
        return Crossing()

    def loss_of(self, logits, batch):
        return token_loss(logits, batch[1])

    def loss(self, output, batch):
        assert output["size"] == batch[1].shape[1]
        return token_loss(output["logits"], batch[1])


@pytest.mark.parametrize("layout", ["pp2:micro=3", "pp4:micro=4", "pp2.dp2:micro=2,schedule=zb,virtual=2"])
def test_anything_crosses_the_cut(layout):
    (reference,) = record(Skips)
    assert_same_training(record(Skips, layout), reference)


class Lines(Dataset):
    """Lines of words of every length."""

    def __len__(self):
        return 17

    def __getitem__(self, index):
        return torch.randint(0, 32, (3 + index % 5,), generator=torch.Generator().manual_seed(index))


@dataclass(frozen=True, kw_only=True)
class Padded(Skips):
    """Every batch, and so every micro-batch, has another shape."""

    def data(self):
        return Lines()

    def evaluation(self):
        return Lines()

    def collate(self, samples):
        rows = pad_sequence([torch.cat([row, row[:1]]) for row in samples], batch_first=True, padding_value=0)
        return rows[:, :-1], rows[:, 1:].where(rows[:, 1:] > 0, -100)


def test_micro_batches_of_any_shape():
    (reference,) = record(Padded)
    assert_same_training(record(Padded, "pp2:micro=3"), reference)


def test_micro_batches_of_one_sample():
    def job():
        return Skips(batch_size=2)

    (reference,) = record(job)
    assert_same_training(record(job, "pp2:micro=2"), reference)


@dataclass(frozen=True, kw_only=True)
class Partly(Skips):
    """A stage that is frozen, and a head that nothing uses."""

    def model(self):
        model = super().model()
        model.blocks[0].requires_grad_(False)
        model.token.requires_grad_(False)
        model.unused = nn.Linear(3, 3)
        return model


@pytest.mark.parametrize("layout", ["pp2:micro=2", "pp4:micro=4", "pp2.fsdp2:micro=2"])
def test_what_is_frozen_or_unused_stays_as_it_is(layout):
    (reference,) = record(Partly)
    assert_same_training(record(Partly, layout), reference)


@dataclass(frozen=True, kw_only=True)
class Stated(Skips):
    """A job that says its stages."""

    def stages(self, model):
        return [["token", "blocks.0"], ["blocks.1", "blocks.2", "blocks.3", "join", "head"]]


def test_a_job_may_state_its_stages():
    seen = {}

    def look(run):
        seen["owner"] = dict(placement_of(run.model).pipeline.owner)

    (reference,) = record(Skips)
    found = in_layouts(Stated, ["pp2:micro=2"], look)
    assert_same_training([rank[0] for rank in found], reference)
    with pytest.raises(LayoutError, match=r"has 4 stages, and stages\(\) names 2"):
        record(Stated, "pp4:micro=4")


# -- what is refused ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shared(Text):
    """One block, run again and again (ALBERT)."""

    def model(self):
        class Again(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8))
                self.inner = nn.Linear(8, 8)

            def forward(self, tokens):
                x = self.block[0](tokens)
                for _ in range(3):
                    x = self.inner(self.block[1](x))
                return F.pad(x, (0, 24))

        return Again()


@dataclass(frozen=True, kw_only=True)
class Deciding(Skips):
    """The model's own forward decides by numbers that parameters have made."""

    def model(self):
        class Early(Crossing):
            def forward(self, tokens):
                x = self.token(tokens)
                if x.sum() > 1e9:
                    return {"logits": self.head(x), "size": x.shape[1]}
                return super().forward(tokens)

        return Early()


@dataclass(frozen=True, kw_only=True)
class InPlace(Skips):
    """A block that changes what it is given."""

    def model(self):
        class Adds(Crossing):
            class Block(Crossing.Block):
                def forward(self, pair, **options):
                    if pair["gates"]:
                        pair["gates"][-1].mul_(1.5)
                    return super().forward(pair, **options)

        return Adds()


class Chain(nn.Module):
    """Blocks and a head, and what a forward does between them as `between` says."""

    def __init__(self, block, between, width: int = 8) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        self.blocks = nn.ModuleList(block(width) for _ in range(4))
        self.between = between

    def forward(self, tokens):
        return self.head(self.between(self, self.token(tokens)))


class Residual(nn.Linear):
    def forward(self, x):
        return x + torch.tanh(super().forward(x))


class Counting(Residual):
    """Gives a number that only those with its numbers know."""

    def forward(self, x):
        out = super().forward(x)
        return out, out.detach().abs().max().item()


class Keeping(Residual):
    """Keeps a loss of its own, as experts do."""

    def forward(self, x):
        self.own = self.weight.square().mean()
        return super().forward(x)


class Moving(Residual):
    """Moves a state of its own, as spectral norm does: with micro-batches once for each."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x) / self.calls


def in_order(model, x):
    for block in model.blocks:
        x = block(x)
    return x


def by_numbers(model, x):
    for block in model.blocks:
        x, largest = block(x)
        x = x * largest
    return x


def by_attributes(model, x):
    for block in model.blocks:
        x = block(x)
    return x + sum(block.own for block in model.blocks)


def by_checkpoints(model, x):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def with_hooks(model, x):
    for block in model.blocks:
        x = block(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
    if torch.is_grad_enabled():
        x.register_hook(lambda grad: grad * 3)
    return x


class Positions(nn.Module):
    """Gives the parameter itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(0, 1, width))

    def forward(self):
        return self.table


class Positioned(Residual):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.positions = Positions(width)


def with_a_parameter_of_a_module(model, x):
    for block in model.blocks:
        x = block(x) + block.positions()
    return x


def writing(model, x):
    for block in model.blocks:
        y = block(x)
        y += x
        y[..., 0] = 0.5
        shared = y[..., 3:5]
        y.mul_(0.75)
        x = F.relu_(y + shared.mean(-1, keepdim=True))
    return x


def writing_a_residual(model, x):
    for block in model.blocks:
        x += block(x.detach())
    return x


def writing_what_was_read(model, x):
    first = model.blocks[0](x)
    shared = first[..., 1:3]
    for block in model.blocks[1:]:
        x = block(first)
    shared.mul_(0.75)
    return first + x


class Shifting(nn.Linear):
    """Its backward needs no input."""

    def forward(self, x):
        return x + self.bias + self.weight.sum()


class Clipped(Residual):
    """Has a module that writes into its input."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.clip = nn.Hardtanh(inplace=True)


def clipped(model, x):
    for block in model.blocks:
        x = block(x) * 1.5
        block.clip(x)
    return x


class Writing(Residual):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


def writing_in_a_mask(model, x):
    for block in model.blocks:
        x = x + block(torch.ones(x.shape, dtype=torch.float64))
    return x


def writing_slices(model, x):
    for block in model.blocks:
        x = block(x)
        x[..., 2:4] *= 0.5
        x[..., 0] += 1.0
        x = torch.tanh(x)
    return x


class Collecting(Residual):
    """Adds to a list that goes through all blocks, as balance losses of experts do."""

    def forward(self, x, found=None):
        out = super().forward(x)
        if found is not None:
            found.append(out.square().mean())
        return out


def through_a_list(model, x):
    found = []
    for block in model.blocks:
        x = block(x, found)
    return x + sum(found)


class Peeking(Residual):
    """Reads what the block before it has kept."""

    before = None

    def forward(self, x):
        self.kept = x
        return super().forward(x) + (0.0 if self.before is None else self.before[0].kept)


def peeking(model, x):
    for first, second in itertools.pairwise(model.blocks):
        second.before = [first]
    return in_order(model, x)


class DataWriting(Residual):
    def forward(self, x):
        x.data.add_(0.1)
        return super().forward(x)


def data_writing(model, x):
    table = torch.ones(x.shape, dtype=torch.float64)
    for block in model.blocks:
        x = x + block(table)
    return x


def counted(model, x):
    """A Python number that a forward moves; trials before the first step leave it alone."""
    model.calls = getattr(model, "calls", 0) + 1
    return in_order(model, x) * (1 + model.calls / 8)


def chained(kind, between):
    @dataclass(frozen=True, kw_only=True)
    class Chained(Text):
        def model(self):
            return Chain(kind, between)

    return Chained


@dataclass(frozen=True, kw_only=True)
class InputWritten(Text):
    def model(self):
        class Shifted(Chain):
            def forward(self, tokens):
                tokens.add_(1).remainder_(32)
                return super().forward(tokens)

        return Shifted(residual(), in_order)


def residual(kind=Residual):
    return lambda width: kind(width, width)


@pytest.mark.parametrize(
    ("kind", "between"),
    [
        (residual(), with_hooks),
        (Positioned, with_a_parameter_of_a_module),
        (residual(), writing),
        (Clipped, clipped),
        (residual(), writing_slices),
    ],
    ids=["hooks", "a parameter", "writes", "writing modules", "slices"],
)
@pytest.mark.parametrize("layout", ["pp2:micro=2", pytest.param("pp4:micro=4", marks=pytest.mark.drill)])
def test_between_blocks_a_forward_may_do_what_it_does_alone(kind, between, layout):
    job = chained(kind, between)
    assert_same_training(record(job, layout), record(job)[0])


@pytest.mark.parametrize(
    ("job", "layout", "error", "reason"),
    [
        (chained(residual(Counting), by_numbers), "pp2:micro=2", JobError, "gives a number of its own"),
        (chained(residual(Keeping), by_attributes), "pp2:micro=2", LayoutError, "keeps a tensor that it has made"),
        (chained(residual(), by_checkpoints), "pp2:micro=2", LayoutError, "recompute=block"),
        (chained(residual(Moving), in_order), "pp2:micro=2", JobError, "changes the buffer blocks.*calls, once for"),
        (Shared, "pp3:micro=3", LayoutError, "3 stages need 3 parts that run one after the other"),
        (Deciding, "pp2:micro=2", LayoutError, "decides between its modules by numbers"),
        (InPlace, "pp2:micro=2,split=1", LayoutError, "blocks.1 .in stage 1. writes in place into a value"),
        (chained(residual(), writing_a_residual), "pp3:micro=3", LayoutError, "has 2 .* before it is written in"),
        (
            chained(residual(Shifting), writing_what_was_read),
            "pp4:micro=4",
            LayoutError,
            "has 3 .* is written in place",
        ),
        (chained(residual(), writing_a_residual), "pp2:micro=2,split=2", LayoutError, "stage 0 has too, and"),
        (chained(residual(Shifting), writing_what_was_read), "pp2:micro=2,split=1", LayoutError, "stage 1 has too"),
        (chained(residual(Writing), writing_in_a_mask), "pp2:micro=2", LayoutError, "blocks.0 changes what it is"),
        (
            chained(residual(Collecting), through_a_list),
            "pp2:micro=2",
            LayoutError,
            "puts something into a list or dict",
        ),
        (chained(residual(Peeking), peeking), "pp2:micro=2", LayoutError, "reads a tensor that it is not given"),
        (
            chained(residual(DataWriting), data_writing),
            "pp2:micro=2",
            LayoutError,
            "changes what it is given, in place",
        ),
        (InputWritten, "pp2:micro=2", LayoutError, "writes in place into what it is called with"),
        (Convolutions, "pp2:micro=2", LayoutError, "would split the batch of the BatchNorm"),
        (Deep, "pp2:micro=2,split=9", LayoutError, "split names block 9, and the model has 4 blocks"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_cut_is_refused_with_the_reason(job, layout, error, reason):
    started = []
    with pytest.raises(error, match=reason):
        record(job, layout, on_step=lambda run: started.append(run))
    assert not started


@pytest.mark.parametrize("layout", ["pp2:micro=1", "tp2"])
def test_python_numbers_of_a_model_are_moved_by_steps_alone(layout):
    job = chained(residual(), counted)
    assert_same_training(record(job, layout), record(job)[0])


def test_a_forward_that_takes_another_path_than_before_is_said():
    class Drops(Crossing):
        def forward(self, tokens):
            x = self.token(tokens)
            for block in self.blocks if int(tokens.sum()) % 2 else self.blocks[:3]:
                x = block({"x": x, "gates": ()}, mask=1.0, scale=1.0)[0]["x"]
            return {"logits": self.head(x), "size": x.shape[1]}

    @dataclass(frozen=True, kw_only=True)
    class Dropping(Skips):
        def model(self):
            return Drops()

    with pytest.raises(JobError, match="In a pipeline all stages must take the same path"):
        record(Dropping, "pp2:micro=2")


def test_statistics_of_each_micro_batch_where_the_job_wants_them():
    """Not the training of one process, and that is what was asked for; it runs, and ranks agree."""

    def job():
        return Convolutions(batch_norm="local")

    found = record(job, "pp2:micro=2")
    assert found[0].losses == found[1].losses
    assert all(torch.isfinite(torch.tensor(seen.losses)).all() for seen in found)


def test_the_model_itself_may_be_called_by_all_without_gradient_and_not_with():
    def rank(rank, size, rendezvous):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("pp2:micro=2", place=place) as world:
            run = assemble(Deep(), world, quiet=True)
            tokens = torch.arange(10).view(1, 10)
            run.model.eval()
            with torch.no_grad():
                output = run.model(tokens)
            with pytest.raises(JobError, match=r"run\.steps"):
                run.model(tokens)
            return output

    model = None
    from shoal.step import seed_everything

    seed_everything(0)
    torch.manual_seed(0)
    model = Deep().model().double().eval()
    for output in run_processes(rank, 2):
        assert torch.allclose(output, model(torch.arange(10).view(1, 10)), rtol=1e-12, atol=1e-13)


def test_dropout_differs_between_stages_and_micro_batches_and_repeats_itself():
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Masked() for _ in range(2))

        def forward(self, x):
            x = x.flatten(1)[:, :64]
            for block in self.blocks:
                x = block(x)
            return x

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            mask = F.dropout(torch.ones_like(x), 0.5, self.training)
            seen.append(mask[0])
            return self.linear(x) * mask

    @dataclass(frozen=True, kw_only=True)
    class Dropped(Images):
        steps: int = 1

        def model(self):
            return Masks()

        def loss_of(self, logits, batch):
            return mean_loss(logits.square())

        def evaluation(self):
            return None

    seen = []

    def rank(rank, size, rendezvous):
        seen.clear()
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("pp2:micro=2", place=place) as world:
            run = assemble(Dropped(), world, quiet=True)
            seen.clear()
            for step in run.steps():
                step()
        return torch.stack([mask.bool() for mask in seen if not hasattr(mask, "fake_mode")])  # shapes have no numbers

    def masks():
        return torch.cat(run_processes(rank, 2))

    once, again = masks(), masks()
    assert torch.equal(once, again)
    assert len(once) == 4
    assert len({tuple(mask.tolist()) for mask in once}) == 4


def test_models_of_every_kind_are_in_the_matrix():
    assert len(ZOO) >= 13  # test_generality.py cuts each of them


def test_a_loss_is_counted_once_whatever_stage_has_it(lone):
    def job():
        class Counted(Deep):
            def loss(self, output: Tensor, batch) -> Sum:
                return token_loss(output, batch[1])

        return Counted()

    (seen, *_) = record(job, "pp2.dp2:micro=2")
    assert seen.losses == pytest.approx(lone.losses, rel=1e-12)
