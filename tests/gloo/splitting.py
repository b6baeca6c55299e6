"""A model split over ranks beside the same model in one process: outputs, gradients and weights of a few steps.

    found = assert_same_split(Gate, vectors)                      # tp2, as shoal infers it
    found = assert_same_split(Gate, vectors, "tp4", plan={...})   # or as a plan says
    assert found.styles == {"up": "colwise", "down": "rowwise"}

Everything is float64. The sample that a split is proved on has 2 rows and the steps have 3, so that nothing that is
learnt from the sample may lean on its size.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from ranks import run_processes
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from trainings import TOLERANCE, _between, distance

from shoal.agreement import check_replicas
from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.parallel.parts import gather_whole, parts_of
from shoal.parallel.place import place, placement_of
from shoal.world import Place, World

STEPS = 3
WIDTH = 12

Inputs = Callable[[int], Any]  # rows of the batch -> a tuple of arguments, a dict of them, or one


def vectors(rows: int) -> Tensor:
    """(rows, WIDTH)"""
    return torch.randn(rows, WIDTH, dtype=torch.float64)


def sequences(rows: int) -> Tensor:
    """(rows, 6, WIDTH)"""
    return torch.randn(rows, 6, WIDTH, dtype=torch.float64)


def images(rows: int) -> Tensor:
    """(rows, 3, 6, 6)"""
    return torch.randn(rows, 3, 6, 6, dtype=torch.float64)


def tokens(vocabulary: int) -> Inputs:
    """Makes (rows, 6) of token ids."""
    return lambda rows: torch.randint(0, vocabulary, (rows, 6))


class MLP(nn.Module):
    """The plainest thing to split."""

    def __init__(self, width: int = WIDTH, hidden: int = 24, act: Any = torch.relu, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@dataclass
class Walk:
    """What a few steps of SGD gave: outputs and gradients by step, and the state at the end."""

    outputs: list[list[Tensor]] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor | None] = field(default_factory=dict)


@dataclass
class Found:
    """What a rank saw, how the layers were split, and which share of the parameters it holds."""

    walk: Walk
    styles: dict[str, str]
    share: float
    extra: Any = None


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on a tuple of arguments, a dict of them, or one."""
    args, kwargs = as_call(inputs)
    return model(*args, **kwargs)


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def built(make_model: Callable[[], nn.Module], train: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return make_model().double().train(train)


def walk(
    model: nn.Module,
    inputs: Inputs,
    steps: int = STEPS,
    *,
    whole: Callable[[Mapping[str, Tensor | None]], dict[str, Tensor | None]] = dict,
    settle: Callable[[], None] = lambda: None,
) -> Walk:
    """Steps of SGD on a fixed weighing of all outputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = Walk()
    for step in range(steps):
        torch.manual_seed(100 + step)
        batch = inputs(3)
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(step)  # of what the forward draws
        outputs = tensors_in(call(model, batch))
        generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
        (sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)) / 10).backward()
        settle()
        seen.outputs.append([output.detach().clone() for output in outputs])
        grads = {name: param.grad for name, param in model.named_parameters()}
        seen.grads.append({n: None if g is None else g.clone() for n, g in whole(grads).items()})
        optimizer.step()
    seen.state = {name: tensor.detach().clone() for name, tensor in whole(model.state_dict()).items()}
    return seen


def tensors_in(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, of a dataclass too."""
    if dataclasses.is_dataclass(output):
        output = [getattr(output, f.name) for f in dataclasses.fields(output)]
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def split_run(
    make_model: Callable[[], nn.Module],
    inputs: Inputs,
    layout: str = "tp2",
    *,
    plan: Mapping[str, str] | None = None,
    steps: int = STEPS,
    train: bool = True,
    then: Callable[[nn.Module, World], Any] = lambda model, world: None,
) -> list[Found]:
    """Place the model in a layout and walk it; `then` is called at the end, and its result kept."""

    def rank(rank: int, size: int, rendezvous: str) -> Found:
        where = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open(layout, place=where) as world:
            model = built(make_model, train)
            num_whole = sum(param.numel() for param in model.parameters())
            torch.manual_seed(99)
            place(model, world, plan=plan, sample=as_call(inputs(2)))
            parts, placement = parts_of(model), placement_of(model)

            def whole(held: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
                gathered = gather_whole({n: t for n, t in held.items() if t is not None}, parts, world)
                return {name: gathered.get(name) for name in held}

            seen = walk(model, inputs, steps, whole=whole, settle=placement.settle)
            check_replicas(model, world, steps)
            assert placement.split is not None
            styles = {
                f"{region.name}.{layer}".strip("."): cut.style
                for region in placement.split.regions
                for layer, cut in region.cuts.items()
            }
            share = sum(param.numel() for param in model.parameters()) / num_whole
            return Found(seen, styles, share, then(model, world))

    return run_processes(rank, Layout.parse(layout).num_ranks, time_limit_s=15)


def assert_same_split(
    make_model: Callable[[], nn.Module], inputs: Inputs, layout: str = "tp2", **options: Any
) -> Found:
    """Every rank saw what one process sees, at every output, parameter and buffer; returns what rank 0 saw."""
    alone = {name: options[name] for name in ("steps",) if name in options}
    reference = walk(built(make_model, options.get("train", True)), inputs, **alone)
    found = split_run(make_model, inputs, layout, **options)
    for rank, seen in enumerate(found):
        _assert_same(seen.walk, reference, f"rank {rank}")
    return found[0]


def assert_same_or_refused(make_model: Callable[[], nn.Module], inputs: Inputs, layout: str = "tp2") -> None:
    """Split rightly, left whole, or refused before a step: never another training."""
    with contextlib.suppress(LayoutError):
        assert_same_split(make_model, inputs, layout)


def _assert_same(seen: Walk, reference: Walk, who: str) -> None:
    for step, (ours, theirs) in enumerate(zip(seen.outputs, reference.outputs, strict=True)):
        assert [o.shape for o in ours] == [o.shape for o in theirs], f"{who}, step {step}: shapes of the outputs"
        far = max(map(distance, ours, theirs), default=0.0)
        assert far < TOLERANCE, f"{who}, step {step}: outputs differ by {far:.1e}"
    for step, (grads, expected) in enumerate(zip(seen.grads, reference.grads, strict=True)):
        assert {n for n, g in grads.items() if g is None} == {n for n, g in expected.items() if g is None}, who
        for what, far in _between(f"step {step}: gradient of ", grads, expected):
            assert far < TOLERANCE, f"{who}, {what}: {far:.1e}"
    for what, far in _between("", seen.state, reference.state):
        assert far < TOLERANCE, f"{who}, {what}: {far:.1e}"
