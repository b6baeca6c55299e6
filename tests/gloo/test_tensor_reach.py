"""A split reaches no further than what was proved, and the model stays the user's."""

import copy
import gc
import random
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_processes
from splitting import MLP, WIDTH, assert_same_or_refused, assert_same_split, split_run, tokens, vectors
from torch import Tensor, nn

from shoal.parallel.place import place
from shoal.world import Place, World

# -- what reaches into a region from outside -----------------------------------------------------------


class Reaching(nn.Module):
    """An MLP, a head, and a parent that may look inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(40, WIDTH), MLP(), nn.Linear(WIDTH, 3)


class TiedByHand(Reaching):
    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.embed(ids)) @ self.embed.weight.T


class TiedByHandAndSliced(Reaching):
    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mlp(self.embed(ids)), self.embed.weight)[..., :20]


class Penalised(Reaching):
    def forward(self, ids: Tensor) -> Any:
        return self.head(self.mlp(self.embed(ids))), self.mlp.up.weight.square().sum()


class Peeking(Reaching):
    """An inner activation that is kept for the parent: hooks for features and auxiliary losses do so."""

    def forward(self, ids: Tensor) -> Any:
        self.mlp.act = self._keep
        return self.head(self.mlp(self.embed(ids))), self.kept.mean(dim=-1)

    def _keep(self, hidden: Tensor) -> Tensor:
        self.kept = torch.relu(hidden)
        return self.kept


@pytest.mark.parametrize("model", [TiedByHand, TiedByHandAndSliced, Penalised, Peeking])
def test_a_model_that_uses_a_weight_or_an_activation_of_a_region_outside_of_it(model):
    """Left whole or refused, but never another training."""
    assert_same_or_refused(model, tokens(20))


class SharedActivation(nn.Module):
    """One learnt activation inside of a region and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()
        self.mlp = MLP(act=self.act)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.mlp(x)))


def test_a_parameter_that_is_used_inside_of_a_region_and_outside():
    assert_same_or_refused(SharedActivation, vectors)


def test_a_parameter_that_several_regions_use_is_summed_once():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            act = nn.PReLU()
            self.blocks = nn.Sequential(*(MLP(act=act) for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x)

    assert_same_split(Shared, vectors)


def test_a_parameter_that_is_itself_the_input_of_a_split_layer():
    """Learnt queries, prompts, class tokens."""

    class Queries(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.queries) + x.mean()

    found = assert_same_split(Queries, vectors)
    assert found.styles == {"up": "colwise", "down": "rowwise"}


def test_a_gradient_of_a_gradient_inside_of_the_model():
    """A gradient penalty; forces of an energy."""

    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.last = nn.LayerNorm(WIDTH), MLP(act=torch.tanh), MLP(act=torch.tanh)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.last(torch.tanh(self.first(self.norm(x))))
                (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return energy + force.square().sum()

    assert_same_or_refused(Penalty, vectors)


def test_blocks_of_one_class_that_compute_differently_are_each_proved():
    def soft(x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1)

    found = assert_same_split(lambda: nn.Sequential(MLP(act=soft), MLP(), MLP(act=soft), MLP(act=torch.tanh)), vectors)
    assert found.styles["1.up"] == found.styles["3.up"] == "colwise"
    assert found.styles["1.down"] == found.styles["3.down"] == "rowwise"


def test_an_output_in_which_no_tensor_is_found_proves_nothing():
    @dataclass
    class Output:
        logits: Tensor

    class Soft(MLP):
        def __init__(self) -> None:
            super().__init__(act=lambda x: torch.softmax(x, dim=-1))

        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    assert_same_or_refused(Soft, vectors)


def test_code_that_runs_in_training_alone_is_proved_too():
    class Modes(MLP):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            return self.down(torch.softmax(hidden, dim=-1) if self.training else torch.relu(hidden))

    assert_same_or_refused(Modes, vectors)


# -- the model stays the user's ------------------------------------------------------------------------


def test_a_look_at_the_model_changes_none_of_its_buffers():
    class Counting(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    assert_same_split(Counting, vectors)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_layers_with_a_computed_weight_stay_whole_and_as_they_were(norm):
    parametrised = getattr(torch.nn.utils.parametrizations, norm)

    def made() -> nn.Module:
        return nn.Sequential(parametrised(nn.Linear(WIDTH, 24)), nn.ReLU(), nn.Linear(24, 3))

    found = assert_same_split(made, vectors)
    assert "0" not in found.styles


def test_what_a_job_wrote_on_a_parameter_is_on_its_slice_too():
    """Many optimizers are told by it which parameters decay."""

    def made() -> nn.Module:
        model = MLP()
        model.up.weight.no_decay = True
        return model

    found = assert_same_split(made, vectors, then=lambda model, world: vars(model.up.weight))
    assert found.extra == {"no_decay": True}


def test_each_rank_holds_half_of_a_model():
    (first, second) = split_run(lambda: nn.Sequential(MLP(), MLP()), vectors)
    assert first.share < 0.55
    assert second.share < 0.55


def test_a_copy_of_a_split_model_computes_the_same_and_trains_apart():
    def compare(model: nn.Module, world: World) -> tuple[bool, bool]:
        twin = copy.deepcopy(model)
        batch = torch.ones(3, WIDTH, dtype=torch.float64)
        model.zero_grad(set_to_none=True)
        twin(batch).sum().backward()
        return torch.equal(model(batch), twin(batch)), all(p.grad is None for p in model.parameters())

    assert assert_same_split(MLP, vectors, then=compare).extra == (True, True)


def test_activations_are_freed_when_their_step_is_over():
    def count(model: nn.Module, world: World) -> int:
        alive = []
        hook = model[0].register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
        for _ in range(5):
            model(torch.randn(3, WIDTH, dtype=torch.float64)).sum().backward()
            model.zero_grad()
        hook.remove()
        gc.collect()
        return sum(ref() is not None for ref in alive)

    found = assert_same_split(lambda: nn.Sequential(nn.LayerNorm(WIDTH), MLP()), vectors, then=count)
    assert found.extra <= 1  # the last one may be kept until the next


def test_placing_a_model_moves_no_random_stream():
    class Dropping(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(F.dropout(x, 0.5, self.training)), 0.5, self.training)

    def rank(rank: int, size: int, rendezvous: str) -> list[float]:
        where = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("tp2", place=where) as world:
            model = Dropping().double()
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)
            place(model, world, sample=((torch.ones(2, WIDTH, dtype=torch.float64),), {}))
            assert model.training
            return [float(torch.rand(())), random.random(), float(np.random.rand())]

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert run_processes(rank, 2) == [[float(torch.rand(())), random.random(), float(np.random.rand())]] * 2
