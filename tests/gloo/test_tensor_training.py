"""Whole trainings under tensor parallelism: the law, and the parts of a run that a split reaches."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jobs
import pytest
import torch
import torch.nn.functional as F
from ranks import run_processes
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset
from trainings import Record, assert_same_training, record

from shoal.errors import LayoutError, ShoalError
from shoal.job import Job, Params, Sum, mean_loss, token_loss
from shoal.models.gpt import Decoder
from shoal.parallel.place import clip_grad_norm_, place
from shoal.run import assemble
from shoal.world import Place, World


@dataclass(frozen=True, kw_only=True)
class Text(jobs.Points):
    """A small gpt: tied weights, fused q, k and v."""

    batch_size: int = 7
    steps: int = 3
    num_samples: int = 10
    width: int = 16
    depth: int = 2
    heads: int = 4
    tied: bool = True
    dropout: float = 0.0

    def model(self) -> nn.Module:
        return Decoder(
            width=self.width, depth=self.depth, heads=self.heads, context=8, tied=self.tied, dropout=self.dropout
        )

    def data(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        rows = torch.randint(0, 256, (self.num_samples, 9), generator=generator)
        return TensorDataset(rows[:, :-1], rows[:, 1:])

    def loss(self, output: Any, batch: Any) -> Sum:
        return token_loss(output, batch[1])

    def evaluation(self) -> Any:
        return self.data()

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Sum]:
        return {"accuracy": Sum((output.argmax(-1) == batch[1]).sum(), float(batch[1].numel()))}


@functools.cache
def lone(job: Callable[[], Job]) -> Record:
    """What one process sees of a job."""
    (reference,) = record(job)
    return reference


# -- the law -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp2", "tp4", "dp2.tp2", "tp2:micro=2", "dp2.tp2:micro=2"])
def test_gpt_is_the_same_training_as_lone(layout):
    found = record(Text, layout)
    assert_same_training(found, lone(Text))
    assert any("100% of the matrix products' FLOPs" in note for note in found[0].notes)


@pytest.mark.parametrize("layout", ["tp2", "dp2.tp2"])
def test_clipping_by_the_norm_of_all_slices(layout):
    def job() -> Text:
        return Text(clip_grad_norm=0.01)

    (reference,) = record(job)
    assert min(reference.norms) > 0.01
    assert_same_training(record(job, layout), reference)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"tied": False}, "tp2"),
        ({"heads": 2}, "tp4"),
        ({"width": 30, "heads": 3}, "tp2"),
        ({"batch_size": 1}, "dp2.tp2"),
    ],
    ids=str,
)
def test_gpt_of_odd_sizes(options, layout):
    def job() -> Text:
        return Text(**options)

    (reference,) = record(job)
    assert_same_training(record(job, layout), reference)


@pytest.mark.parametrize("layout", ["tp2", "dp2.tp2", "tp3"])
@pytest.mark.parametrize("job", [jobs.Points, jobs.Normed, jobs.Adamant, jobs.Tokens], ids=lambda j: j.__name__)
def test_every_small_job_is_the_same_training(job, layout):
    assert_same_training(record(job, layout), lone(job))


@dataclass(frozen=True, kw_only=True)
class Images(jobs.Points):
    """Convolutions with a norm of the global batch between them."""

    def model(self) -> nn.Module:
        first, second = nn.Conv2d(3, 9, 3, padding=1, bias=False), nn.Conv2d(9, 6, 3, padding=1)
        between = nn.BatchNorm2d(9), nn.ReLU()
        return nn.Sequential(first, *between, second, nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(96, 3))

    def data(self) -> Any:
        generator = torch.Generator().manual_seed(4)
        images = torch.randn(self.num_samples, 3, 4, 4, generator=generator, dtype=torch.float64)
        return TensorDataset(images, torch.randint(0, 3, (self.num_samples,), generator=generator))

    def evaluation(self) -> Any:
        return self.data()


@pytest.mark.parametrize("layout", ["tp2", "dp2.tp2", "tp4"])
def test_convolutions_with_batch_norm_are_the_same_training(layout):
    assert_same_training(record(Images, layout), lone(Images))


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Adagrad", "NAdam", "Rprop"])
def test_optimizers_that_treat_each_element_by_itself(name):
    class Optimized(jobs.Points):
        def optimizer(self, params: Params) -> torch.optim.Optimizer:
            return getattr(torch.optim, name)(params, lr=0.01)

    (reference,) = record(Optimized)
    assert_same_training(record(Optimized, "tp2"), reference)


class Rowwise(torch.optim.Optimizer):
    """One step size for all of a matrix, as in LAMB, LARS and many others."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.norm() * param.grad / (param.grad.norm() + 1e-3)


OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "one's own": Rowwise,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_looks_at_a_whole_matrix_is_right_or_refused(name):
    class Optimized(jobs.Points):
        def optimizer(self, params: Params) -> torch.optim.Optimizer:
            return OPTIMIZERS[name](params)

    (reference,) = record(Optimized)
    try:
        found = record(Optimized, "tp2")
    except ShoalError:
        return
    assert_same_training(found, reference)


def test_a_stream_has_no_sample_to_look_at_and_is_refused():
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return ((torch.full((4,), float(i)), i % 3) for i in range(100))

    class Streaming(jobs.Points):
        def data(self) -> Any:
            return Stream()

    with pytest.raises(LayoutError, match="sample"):
        record(Streaming, "tp2")


def test_a_loop_of_ones_own_clips_by_the_norm_of_all_slices():
    def trained(layout: str, rank: int, size: int, rendezvous: str) -> list[float]:
        where = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open(layout, place=where if size > 1 else None) as world:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
            inputs = torch.randn(6, 4, dtype=torch.float64)
            place(model, world, sample=((inputs[:2],), {}))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            norms = []
            for _ in range(3):
                optimizer.zero_grad()
                model(inputs).square().sum().backward()
                norms.append(float(clip_grad_norm_(model, 0.1)))
                optimizer.step()
            return norms

    reference = trained("lone", 0, 1, "")
    for norms in run_processes(lambda *args: trained("tp2", *args), 2):
        assert norms == pytest.approx(reference, rel=1e-12)


# -- half precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "rel"), [("fp32", 1e-5), ("bf16", 2e-3), ("fp16", 2e-4)])
def test_lower_precision_stays_close_to_lone(value, rel):
    def job() -> Text:
        return Text(precision=value)

    (reference,) = record(job)
    for seen in record(job, "tp2"):
        assert seen.losses == pytest.approx(reference.losses, rel=rel)


def conv_chain() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.Conv1d(8, 4, 1))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), (2, 4)),
    "convolution": (conv_chain, (2, 3, 5)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 3, 4)),
    "table": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 40)), (2, 4)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_split_layers_give_the_kind_of_number_that_whole_ones_give_under_autocast(kind):
    make, shape = LAYERS[kind]

    def kinds(model: nn.Module) -> dict[str, torch.dtype]:
        seen = {}
        for name, module in model.named_modules():
            module.register_forward_hook(
                lambda m, args, out, name=name: seen.update({name: (out[0] if isinstance(out, tuple) else out).dtype})
            )
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(shape))
        return seen

    def rank(rank: int, size: int, rendezvous: str) -> dict[str, torch.dtype]:
        where = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("tp2", place=where) as world:
            return kinds(place(make(), world, sample=((torch.ones(shape),), {})))

    assert run_processes(rank, 2) == [kinds(make())] * 2


def test_the_scale_of_fp16_is_one_for_all_slices():
    """A slice that overflows on one rank alone must lower the scale of all, or their gradients no longer add up."""

    class Overflowing(jobs.Points):
        def model(self) -> nn.Module:
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
            with torch.no_grad():
                model[2].weight[:, :1] *= 3e4  # of the first rank's slice
            return model

        def data(self) -> Any:
            inputs, targets = super().data().tensors
            return TensorDataset(inputs.float(), targets)

        def evaluation(self) -> Any:
            return None

    def scales(layout: str, rank: int, size: int, rendezvous: str) -> list[float]:
        where = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open(layout, place=where if size > 1 else None) as world:
            run = assemble(Overflowing(precision="fp16", steps=3), world, quiet=True)
            found = []
            for step in run.steps():
                step()
                found.append(run._engine.scaler.get_scale())
            return found

    assert run_processes(lambda *args: scales("tp2", *args), 2) == [scales("lone", 0, 1, "")] * 2


# -- logits that stay in slices ------------------------------------------------------------------------


def all_tokens(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Sum]:
    return lambda output, batch: Sum(loss(output, batch[1]), float(batch[1].numel()))


def in_place(output: Tensor, batch: Any) -> Sum:
    output[..., 0] = -30.0
    output.div_(2.0)
    return token_loss(output, batch[1])


def with_z_loss(output: Tensor, batch: Any) -> Sum:
    loss = token_loss(output, batch[1])
    return Sum(loss.value + 1e-2 * output.logsumexp(-1).square().sum(), loss.count)


def of_some_tokens(output: Tensor, batch: Any) -> Sum:
    return token_loss(output, torch.where(batch[1] % 3 == 0, batch[1], -100))


LOSSES: dict[str, Callable[[Any, Any], Sum]] = {
    "each token's": lambda o, b: mean_loss(F.cross_entropy(o.flatten(0, 1), b[1].flatten(), reduction="none")),
    "tokens that count": of_some_tokens,
    "label smoothing": all_tokens(
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum", label_smoothing=0.1)
    ),
    "weights by class": all_tokens(
        lambda o, t: F.cross_entropy(
            o.flatten(0, 1), t.flatten(), torch.linspace(0, 1, 256, dtype=torch.float64), reduction="sum"
        )
    ),
    "a module": all_tokens(lambda o, t: nn.CrossEntropyLoss(reduction="sum")(o.view(-1, 256), t.view(-1))),
    "classes in the middle": all_tokens(lambda o, t: F.cross_entropy(o.transpose(1, 2), t, reduction="sum")),
    "log_softmax, nll": all_tokens(
        lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t.flatten(), reduction="sum")
    ),
    "a slice of the time": lambda o, b: token_loss(o[:, :-1], b[1][:, :-1]),
    "a temperature": lambda o, b: token_loss(o / 2.0, b[1]),
    "twice": lambda o, b: Sum(token_loss(o, b[1]).value + token_loss(o, b[0]).value, float(b[1].numel())),
    "z-loss": with_z_loss,
    "in place": in_place,
}


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_on_the_logits_of_a_split_head(name):
    class Lossy(Text):
        def loss(self, output: Any, batch: Any) -> Sum:
            return LOSSES[name](output, batch)

        def metrics(self, output: Tensor, batch: Any) -> dict[str, Sum]:
            top = output.topk(5, dim=-1).values.sum(dim=(1, 2))
            return {**super().metrics(output, batch), "top": Sum(top.sum(), float(len(top)))}

    def job() -> Text:
        return Lossy(steps=2)

    (reference,) = record(job)
    assert_same_training(record(job, "tp2"), reference)


def test_a_target_outside_of_the_vocabulary_is_an_error_as_in_one_process():
    class Outside(Text):
        def loss(self, output: Any, batch: Any) -> Sum:
            return token_loss(output, batch[1] + 20)

    def job() -> Text:
        return Outside(steps=1)

    with pytest.raises(IndexError):
        record(job)
    with pytest.raises(IndexError):
        record(job, "tp2")


def test_logits_that_stand_elsewhere_in_the_output_of_training():
    class Auxiliary(Decoder):
        def forward(self, tokens: Tensor) -> Any:
            logits = super().forward(tokens)
            return (tokens.double().mean(), logits) if self.training else (logits, None)

    class Ordered(Text):
        def model(self) -> nn.Module:
            return Auxiliary(width=16, depth=1, heads=4, context=8, tied=True, dropout=0.0)

        def loss(self, output: Any, batch: Any) -> Sum:
            return token_loss(next(t for t in output if t is not None and t.dim() == 3), batch[1])

        def metrics(self, output: Any, batch: Any) -> dict[str, Sum]:
            return {}

    (reference,) = record(Ordered)
    assert_same_training(record(Ordered, "tp2"), reference)


def test_the_model_of_a_run_gives_whole_outputs_to_who_calls_it():
    """Job.show does, and every loop of one's own that samples or evaluates."""

    def rank(rank: int, size: int, rendezvous: str) -> Tensor:
        where = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("tp2", place=where) as world, torch.no_grad():
            model = assemble(Text(), world, quiet=True).model
            return model(torch.arange(8)[None])

    torch.manual_seed(0)
    with torch.no_grad():
        expected = Text().model().double()(torch.arange(8)[None])
    for found in run_processes(rank, 2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
