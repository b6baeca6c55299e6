"""What a proof rests on, the whole model by itself: where that fails it is said, and not taken for a wrong guess."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_processes
from splitting import MLP, WIDTH, as_call, assert_same_split, sequences, split_run, tokens, vectors
from test_tensor_training import Text
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zoo import Images, Perceptron

from shoal.errors import LayoutError
from shoal.job import Job
from shoal.parallel.place import place, placement_of
from shoal.parallel.tensor import styles
from shoal.run import assemble
from shoal.world import Place, World


def in_tp2(act: Any) -> list[Any]:
    """act(world) on two ranks."""

    def rank(rank: int, size: int, rendezvous: str) -> Any:
        where = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("tp2", place=where) as world:
            return act(world)

    return run_processes(rank, 2)


def split_of(model: nn.Module) -> tuple[dict[str, str], str]:
    """Style by layer, and what the run says of it."""
    split = placement_of(model).split
    assert split is not None
    styles = {f"{r.name}.{n}".strip("."): cut.style for r in split.regions for n, cut in r.cuts.items()}
    return styles, str(split)


def split_of_job(make_job: Any, precision: str) -> tuple[dict[str, str], str]:
    (first, second) = in_tp2(lambda world: split_of(assemble(make_job(precision=precision), world, quiet=True).model))
    assert first == second
    return first


# -- the precision of the job, of the weights, of what the code makes ------------------------------------------


class Pictures(Perceptron):
    """With inputs of float32, as data sets have them."""

    def samples(self, num: int, seed: int) -> TensorDataset:
        images, labels = Images.samples(self, num, seed).tensors
        return TensorDataset(images.float(), labels)


@pytest.mark.parametrize(
    ("job", "share"),
    [(Text, "100% of the matrix products' FLOPs"), (Pictures, "100%")],
    ids=["gpt", "mlp"],
)
def test_every_precision_splits_the_same_layers(job: type[Job], share: str):
    expected = split_of_job(job, "fp64")
    assert share in expected[1]
    assert {"colwise", "rowwise"} <= set(expected[0].values())
    for precision in ("fp32", "bf16", "fp16"):
        assert split_of_job(job, precision) == expected, precision


def styles_at(make_model: Any, inputs: Any, dtype: torch.dtype) -> dict[str, str]:
    """How a model with weights of this type is split."""

    def act(world: World) -> dict[str, str]:
        torch.manual_seed(0)
        model = make_model().to(dtype)
        args = tuple(t.to(dtype) if t.is_floating_point() else t for t in as_call(inputs(2))[0])
        return split_of(place(model, world, sample=(args, {})))[0]

    return in_tp2(act)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("make_model", "inputs"), [(MLP, vectors), (lambda: Text().model(), tokens(40))], ids=["mlp", "gpt"]
)
def test_weights_of_every_precision_are_split_alike(make_model, inputs, dtype):
    assert styles_at(make_model, inputs, dtype) == styles_at(make_model, inputs, torch.float64) != {}


class StartsAtZero(MLP):
    """The type of what it makes is torch's default."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), WIDTH)
        for _ in range(2):
            state = super().forward(state + x)
        return super().forward(torch.ones(len(x), WIDTH)) + state


class HoldsFloats(MLP):
    """A tensor beside the parameters that no cast of the model reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.basis = torch.eye(WIDTH, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.basis)


class Casts(MLP):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x).to(torch.float32)).type(torch.float32)
        return self.down(hidden.to(x.dtype)) + F.linear(x.float(), torch.eye(WIDTH, dtype=torch.float32))


class DrawsItself(MLP):
    """Dropout that is no module, so that a mask would differ from that of the whole model."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("make_model", [StartsAtZero, HoldsFloats, Casts, DrawsItself])
def test_code_that_is_float32_by_itself_is_tried_and_split(make_model):
    assert styles_at(make_model, vectors, torch.float32) == {"up": "colwise", "down": "rowwise"}


class OffByALittle(MLP):
    """In float32, too, a wrong cut is far off: a norm over features of which a rank has a part."""

    def __init__(self) -> None:
        super().__init__(act=lambda hidden: torch.softmax(hidden @ self.basis, dim=-1))
        self.basis = torch.eye(24, dtype=torch.float32)


def test_a_wrong_guess_is_told_in_float32():
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrong, self.right = OffByALittle(), HoldsFloats()

        def forward(self, x: Tensor) -> Tensor:
            return self.right(self.wrong(x))

    found = styles_at(Beside, vectors, torch.float32)
    assert found["right.up"] == "colwise"
    assert found.get("wrong.up") != "colwise"


# -- what cannot be tried is refused, with the reason ----------------------------------------------------------


class Narrow(nn.Module):
    """Three features, which four ranks cannot share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Locked(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Noisy(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return super().forward(x) * float(torch.randn((), generator=torch.Generator().manual_seed(self.calls[0])))

    def __deepcopy__(self, memo: Any) -> "Noisy":
        twin = Noisy().to(self.up.weight.dtype)
        twin.load_state_dict(self.state_dict())
        twin.calls = self.calls  # one count for all copies
        return twin.train(self.training)


class Wrapped:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Wrapping(MLP):
    def forward(self, x: Tensor) -> Any:
        return Wrapped(super().forward(x))


@pytest.mark.parametrize(
    ("make_model", "layout", "reason"),
    [
        (Narrow, "tp4", "splits nothing of this model"),
        (Locked, "tp2", "cannot pickle '_thread.lock' object"),
        (Noisy, "tp2", "does not even compute the same twice"),
        (Wrapping, "tp2", "no floating-point tensor is found in what it returns"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_with_the_reason(make_model, layout, reason):
    with pytest.raises(LayoutError, match=reason):
        split_run(make_model, vectors, layout)


def test_the_reason_why_a_part_could_not_be_tried_is_told():
    class Strict(Narrow):
        def forward(self, x: Tensor) -> Tensor:
            if not self.inside[0]:
                raise ValueError("call me from my parent")
            return super().forward(x)

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Strict()
            self.mlp.inside = [False]

        def forward(self, x: Tensor) -> Tensor:
            self.mlp.inside[0] = True
            out = self.mlp(x)
            self.mlp.inside[0] = False
            return out

    with pytest.raises(LayoutError, match=r"mlp could not be tried by itself \(ValueError: call me from my parent\)"):
        split_run(Parent, vectors, "tp4")


def test_a_dataclass_that_the_model_returns_is_looked_into():
    @dataclass
    class Output:
        logits: Tensor

    class Classed(MLP):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    found = assert_same_split(Classed, vectors)
    assert found.styles == {"up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize("error", [AttributeError, TypeError, NameError, KeyError])
def test_a_mistake_of_shoals_own_is_no_wrong_guess(error, monkeypatch):
    def slip(*_: Any) -> Any:
        raise error("a slip of ours")

    slip.__code__ = slip.__code__.replace(co_filename=styles.__file__)
    monkeypatch.setattr(styles, "_without_bias", slip)
    with pytest.raises(error, match="a slip of ours"):
        split_run(MLP, vectors)


def test_a_complaint_of_the_users_code_about_a_slice_is_a_wrong_guess():
    class Picky(MLP):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            if hidden.shape[-1] != 24:
                raise TypeError("24 features, please")
            return self.down(hidden)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picky, self.mlp = Picky(), MLP(hidden=200)

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.picky(x))

    assert assert_same_split(Both, sequences).styles == {"mlp.up": "colwise", "mlp.down": "rowwise"}
