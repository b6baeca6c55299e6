"""BatchNorm under data parallelism is the BatchNorm of one process on the whole batch (law 5)."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import JobError
from shoal.parallel.norm import globalise_batch_norm, has_batch_norm, set_live

STEPS = 3
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@dataclass
class Trace:
    """What training leaves behind, of one process or of one rank."""

    outputs: list[Tensor]
    input_grads: list[Tensor]
    grads: list[list[Tensor | None]]
    buffers: dict[str, Tensor]


def batches(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [3 + 5 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(STEPS)]


def train(model: nn.Module, xs: list[Tensor], weights: list[Tensor]) -> Trace:
    """Forward and backward on every batch; gradients of a weighted sum, so that no term vanishes."""
    trace = Trace([], [], [], {})
    for x, weight in zip(xs, weights, strict=True):
        x = x.detach().requires_grad_()
        model.zero_grad(set_to_none=True)
        y = model(x)
        (y * weight).sum().backward()
        trace.outputs.append(y.detach())
        trace.input_grads.append(x.grad)
        trace.grads.append([p.grad for p in model.parameters()])
    trace.buffers = {name: b.clone() for name, b in model.named_buffers()}
    return trace


def cut(x: Tensor, rows: list[int], rank: int) -> Tensor:
    return x.split(rows)[rank]


def check_same_as_one_process(
    model: nn.Module, shape: tuple[int, ...], rows: list[int], view: Callable[[Tensor], Tensor] = lambda x: x
) -> None:
    """Trains on the whole batch here and on its slices in ranks, and compares everything there is."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(0.5, 1.5 + i, p.numel()).view_as(p))
    xs, weights = batches(shape), [w.cos() for w in batches(shape)]
    lone = train(copy.deepcopy(model), [view(x) for x in xs], [view(w) for w in weights])

    def on_rank(rank: int, size: int) -> Trace:
        mine = copy.deepcopy(model)
        globalise_batch_norm(mine, dist.group.WORLD)
        return train(mine, *([cut(view(t), rows, rank) for t in ts] for ts in (xs, weights)))

    ranks = run_ranks(on_rank, len(rows))
    for step in range(STEPS):
        together = torch.cat([r.outputs[step] for r in ranks])
        torch.testing.assert_close(together, lone.outputs[step], **CLOSE)
        together = torch.cat([r.input_grads[step] for r in ranks])
        torch.testing.assert_close(together, lone.input_grads[step], **CLOSE)
        for i, expected in enumerate(lone.grads[step]):
            summed = torch.stack([r.grads[step][i] for r in ranks]).sum(0)
            torch.testing.assert_close(summed, expected, **CLOSE)
    for rank in ranks:
        torch.testing.assert_close(rank.buffers, lone.buffers, **CLOSE)


BN = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@pytest.mark.parametrize(
    ("dims", "shape"),
    [(1, (9, 3)), (1, (9, 3, 5)), (2, (9, 3, 4, 5)), (3, (9, 3, 2, 3, 4))],
    ids=["rows", "1d", "2d", "3d"],
)
@pytest.mark.parametrize("rows", [[5, 4], [4, 0, 5], [1, 6, 1, 1]], ids=["2", "3-empty", "4-ragged"])
def test_every_shape_and_split(dims, shape, rows):
    check_same_as_one_process(BN[dims](3, dtype=torch.float64), shape, rows)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None, "affine": False, "eps": 0.1},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_every_option(options):
    check_same_as_one_process(nn.BatchNorm1d(3, dtype=torch.float64, **options), (7, 3, 2), [4, 3])


@pytest.mark.parametrize(
    ("dims", "shape", "view"),
    [
        (1, (6, 5, 3), lambda x: x.permute(0, 2, 1)),
        (2, (6, 3, 4, 5), lambda x: x.contiguous(memory_format=torch.channels_last)),
        (2, (6, 3, 4, 5), lambda x: x.transpose(2, 3)[..., ::2]),
        (1, (6, 3, 1), lambda x: x.expand(6, 3, 4)),
    ],
    ids=["permuted", "channels-last", "strided", "expanded"],
)
def test_every_memory_format(dims, shape, view):
    check_same_as_one_process(BN[dims](3, dtype=torch.float64), shape, [4, 2], view)


def test_sync_batch_norm_of_torch_works_on_cpu():
    check_same_as_one_process(nn.SyncBatchNorm(3, dtype=torch.float64), (6, 3, 4), [2, 4])


def test_a_far_mean_does_not_cancel_the_variance():
    """In fp32 the mean of squares minus the square of the mean is off by a quarter here."""
    x = (batches((64, 3))[0] * 0.1 + 1e3).float()

    def on_rank(rank: int, size: int) -> Tensor:
        norm = nn.BatchNorm1d(3, momentum=1.0)
        globalise_batch_norm(norm, dist.group.WORLD)
        norm(cut(x, [40, 24], rank))
        return norm.running_var

    for var in run_ranks(on_rank, 2):
        torch.testing.assert_close(var, x.double().var(0).float(), rtol=1e-3, atol=0)


def test_half_precision_input_keeps_its_dtype_and_fp32_statistics():
    model = nn.BatchNorm1d(3)
    x = batches((16, 3), torch.bfloat16)[0]
    lone = train(copy.deepcopy(model), [x], [x.cos()])

    def on_rank(rank: int, size: int) -> Trace:
        globalise_batch_norm(model, dist.group.WORLD)
        mine = cut(x, [9, 7], rank)
        return train(model, [mine], [mine.cos()])

    ranks = run_ranks(on_rank, 2)
    assert {r.outputs[0].dtype for r in ranks} == {torch.bfloat16}
    assert {r.input_grads[0].dtype for r in ranks} == {torch.bfloat16}
    torch.testing.assert_close(torch.cat([r.outputs[0] for r in ranks]), lone.outputs[0])
    torch.testing.assert_close(ranks[1].buffers, lone.buffers, rtol=1e-6, atol=1e-6)


class Siamese(nn.Module):
    """One norm, called twice in a forward, and once more through a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.linear(self.norm(x) * self.norm(x.flip(1)).sin()))


def test_one_norm_called_several_times_in_a_forward():
    check_same_as_one_process(Siamese(), (7, 3), [5, 2])


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def test_recomputation_is_that_of_one_process():
    check_same_as_one_process(Recomputed(), (7, 3), [5, 2])


def test_weighting_by_true_counts():
    """Means 0 of nine rows and 10 of one: the mean of all is 1, not 5."""
    x = torch.cat([torch.zeros(9, 1), torch.full((1, 1), 10.0)])

    def on_rank(rank: int, size: int) -> Tensor:
        norm = nn.BatchNorm1d(1, momentum=1.0)
        globalise_batch_norm(norm, dist.group.WORLD)
        norm(cut(x, [9, 1], rank))
        return torch.stack([norm.running_mean, norm.running_var])

    assert [r.flatten().tolist() for r in run_ranks(on_rank, 2)] == [[1.0, 10.0]] * 2


def test_statistics_are_bit_equal_on_all_ranks():
    xs = batches((13, 3), torch.float32)

    def on_rank(rank: int, size: int) -> Trace:
        norm = nn.BatchNorm1d(3)
        globalise_batch_norm(norm, dist.group.WORLD)
        mine = [cut(x, [6, 4, 3], rank) for x in xs]
        return train(norm, mine, mine)

    first, *others = run_ranks(on_rank, 3)
    for other in others:
        assert all(torch.equal(first.buffers[name], other.buffers[name]) for name in first.buffers)


def test_a_batch_empty_everywhere_leaves_the_statistics_untouched():
    lone = nn.BatchNorm2d(3)
    lone(torch.empty(0, 3, 2, 2))

    def on_rank(rank: int, size: int) -> dict[str, Tensor]:
        norm = nn.BatchNorm2d(3)
        globalise_batch_norm(norm, dist.group.WORLD)
        x = torch.empty(0, 3, 2, 2, requires_grad=True)
        norm(x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert norm.weight.grad.tolist() == [0.0] * 3
        return norm.state_dict()

    for state in run_ranks(on_rank, 2):
        torch.testing.assert_close(state, lone.state_dict(), rtol=0, atol=0)


def test_a_stand_in_batch_weighs_nothing_whatever_it_holds():
    x = batches((4, 3))[0]
    norm = nn.BatchNorm1d(3, dtype=torch.float64)
    lone = train(copy.deepcopy(norm), [x], [x.cos()])

    def on_rank(rank: int, size: int) -> Trace:
        globalise_batch_norm(norm, dist.group.WORLD)
        set_live(norm, rank == 0)
        mine = x if rank == 0 else torch.full((2, 3), torch.inf, dtype=torch.float64)
        return train(norm, [mine], [x.cos() if rank == 0 else torch.zeros(2, 3)])

    live, stand_in = run_ranks(on_rank, 2)
    torch.testing.assert_close(live.outputs, lone.outputs, **CLOSE)
    torch.testing.assert_close(live.input_grads, lone.input_grads, **CLOSE)
    torch.testing.assert_close(live.grads, lone.grads, **CLOSE)
    torch.testing.assert_close(stand_in.buffers, lone.buffers, **CLOSE)
    assert all(grad.eq(0).all() for grad in [*stand_in.input_grads, *stand_in.grads[0]])


def test_a_rank_is_live_again_when_told():
    def on_rank(rank: int, size: int) -> Tensor:
        norm = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0))
        globalise_batch_norm(norm, dist.group.WORLD)
        set_live(norm, rank == 0)
        set_live(norm, True)
        norm(torch.tensor([[1.0], [3.0]]) + 4 * rank)
        return norm[0].running_mean

    assert run_ranks(on_rank, 2) == [torch.tensor([4.0])] * 2


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)], ids=str)
def test_one_value_in_the_whole_world_raises_torchs_error_on_every_rank(shape):
    norm = nn.BatchNorm1d(3) if len(shape) == 2 else nn.BatchNorm2d(3)
    with pytest.raises(ValueError, match="Expected more than 1 value") as lone:
        norm(torch.ones(shape))

    def on_rank(rank: int, size: int) -> str:
        globalise_batch_norm(norm, dist.group.WORLD)
        try:
            norm(torch.ones(shape).split([1, 0])[rank])
        except ValueError as error:
            return str(error)
        return "no error"

    assert run_ranks(on_rank, 2) == [str(lone.value)] * 2


def test_one_row_on_every_rank_is_a_batch_of_two():
    check_same_as_one_process(nn.BatchNorm1d(3, dtype=torch.float64), (2, 3), [1, 1])


def test_evaluation_and_frozen_norms_send_nothing():
    def on_rank(rank: int, size: int) -> Tensor | None:
        norm = nn.BatchNorm1d(3)
        globalise_batch_norm(norm, dist.group.WORLD)
        norm.eval()
        # Rank 1 stays away: a collective would hang, and the harness would say so.
        return norm(torch.ones(4, 3)) if rank == 0 else None

    out, _ = run_ranks(on_rank, 2, time_limit_s=5)
    assert torch.equal(out, nn.BatchNorm1d(3).eval()(torch.ones(4, 3)))


def test_wrong_channels_are_told_before_any_collective():
    def on_rank(rank: int, size: int) -> None:
        norm = nn.BatchNorm1d(3)
        globalise_batch_norm(norm, dist.group.WORLD)
        if rank == 0:
            norm(torch.ones(4, 5))

    with pytest.raises(RuntimeError, match="running_mean should contain 5 elements not 3"):
        run_ranks(on_rank, 2, time_limit_s=5)


def test_only_the_given_group_shares_a_batch():
    def on_rank(rank: int, size: int) -> Tensor:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        norm = nn.BatchNorm1d(1, momentum=1.0)
        globalise_batch_norm(norm, pairs[rank // 2])
        norm(torch.tensor([[1.0], [3.0]]) + 10 * rank)
        return norm.running_mean.item()

    assert run_ranks(on_rank, 4) == [7.0, 7.0, 27.0, 27.0]


def test_the_users_modules_parameters_and_names_stay():
    def on_rank(rank: int, size: int) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(3)))
        modules, params = list(model.modules()), dict(model.named_parameters())
        keys = list(model.state_dict())
        assert globalise_batch_norm(model, dist.group.WORLD) == ["1", "2.0"]
        assert list(model.modules()) == modules
        assert all(params[name] is p for name, p in model.named_parameters())
        assert list(model.state_dict()) == keys
        assert isinstance(model[1], nn.BatchNorm1d)
        twin = copy.deepcopy(model)
        assert torch.equal(twin[1](torch.ones(2, 3) * rank), model[1](torch.ones(2, 3) * rank))
        alone = pickle.loads(pickle.dumps(model))
        if rank == 0:
            alone[1](torch.randn(4, 3))

    run_ranks(on_rank, 2, time_limit_s=5)


class Renamed(nn.BatchNorm1d):
    """A subclass that leaves forward alone."""


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_subclass_without_a_forward_of_its_own_is_converted():
    check_same_as_one_process(Renamed(3, dtype=torch.float64), (7, 3), [5, 2])


def test_a_materialised_lazy_norm_is_converted():
    model = nn.LazyBatchNorm1d(dtype=torch.float64)
    model.eval()(torch.zeros(2, 3, dtype=torch.float64))
    check_same_as_one_process(model.train(), (7, 3), [5, 2])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Own(3), "norm: Own has its own forward"),
        (lambda: nn.LazyBatchNorm1d(), "norm: it is lazy"),
        (
            lambda: nn.SyncBatchNorm(3, process_group=dist.group.WORLD),
            "norm: it brings its own process_group",
        ),
    ],
    ids=["own forward", "lazy", "own group"],
)
def test_what_cannot_see_the_global_batch_is_refused_by_name(make, reason):
    def on_rank(rank: int, size: int) -> None:
        globalise_batch_norm(nn.ModuleDict({"norm": make()}), dist.group.WORLD)

    with pytest.raises(JobError, match=reason):
        run_ranks(on_rank, 2)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), Own(3), nn.SyncBatchNorm(3)], ids=["plain", "own", "sync"])
def test_a_world_of_one_is_bit_equal_to_torch(norm):
    xs = batches((8, 3), torch.float32)
    lone = train(copy.deepcopy(norm), xs, xs)
    globalise_batch_norm(norm, None)
    ours = train(norm, xs, xs)
    assert all(torch.equal(a, b) for a, b in zip(ours.input_grads, lone.input_grads, strict=True))
    assert all(torch.equal(ours.buffers[name], b) for name, b in lone.buffers.items())


def test_norms_frozen_by_eval_do_not_use_the_batch():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.LayerNorm(3), Own(3))
    assert has_batch_norm(model) == ["0", "3"]
    assert has_batch_norm(model.eval()) == ["0", "1", "3"]
