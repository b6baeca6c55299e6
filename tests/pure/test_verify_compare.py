"""Two recordings side by side: equal ones show nothing, and what was changed is the first thing that differs."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.verbs.verify.command import VerifyError
from shoal.verbs.verify.compare import KINDS, aligned, backward_order, distance, measure, relative
from shoal.verbs.verify.diagnose import diagnose
from shoal.verbs.verify.recording import Recorded, Recording


class Net(nn.Module):
    """Three layers; the key's bias of an attention gets a gradient of rounding noise alone."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = nn.ReLU()
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.embed(x))
        mixed = torch.softmax(self.query(x) @ self.key(x).transpose(-2, -1), dim=-1) @ x
        return self.head(self.act(mixed)).mean(1)


def recorded(folder, *, steps=2, optimizer=torch.optim.SGD, act=None, **changes):
    """Record a small training; `act(step, model, optimizer)` happens between backward and update."""
    torch.manual_seed(0)
    model = Net().double()
    with contextlib.suppress(KeyError):
        changes.pop("start")(model)
    made = optimizer(model.parameters(), lr=0.1)
    recording = Recording(folder, model, made, outputs=2)
    for step in range(1, steps + 1):
        made.zero_grad()
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(6, 5, 4, generator=draw, dtype=torch.float64)
        loss = F.cross_entropy(model(x), torch.arange(6) % 3)
        loss.backward()
        if act is not None:
            act(step, model, made)
        made.step()
        facts = {"sample_ids": range(6 * step, 6 * step + 6), "grad_norm": 1.5, "clip": None, **changes}
        told = facts.pop("loss", loss)
        recording.step(told, micro_ids=[list(facts["sample_ids"])], **facts)
    recording.close()
    return Recorded(folder)


@pytest.fixture
def reference(tmp_path):
    return recorded(tmp_path / "reference")


def differing(found, reference):
    return [row for row in measure(found, reference) if row.differs()]


def test_the_same_training_twice_is_equal_to_the_bit(tmp_path, reference):
    rows = measure(recorded(tmp_path / "again"), reference)
    assert all(row.error == 0.0 for row in rows if row.error is not None)
    figures = {"loss", "gradient norm", "learning rate"}
    assert {row.kind for row in rows} == figures | {
        "initial weights", "sample ids", "module outputs", "gradients", "weights"
    }  # fmt: skip


def test_state_of_the_optimizer_is_compared_where_there_is_some(tmp_path):
    runs = [recorded(tmp_path / name, optimizer=torch.optim.Adam) for name in "ab"]
    assert {row.name for row in measure(*runs) if row.kind == "optimizer state"} >= {
        "head.weight step", "head.weight exp_avg", "head.weight exp_avg_sq"
    }  # fmt: skip


def scale_gradient(name, factor, at=1):
    def act(step, model, optimizer):
        if step >= at:
            model.get_parameter(name).grad.mul_(factor)

    return act


def set_weight(name, value):
    def start(model):
        with torch.no_grad():
            model.get_parameter(name).flatten()[0] += value

    return start


def set_state(step, model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.05


CHANGES = {
    "one weight at the start": ({"start": set_weight("norm.weight", 1e-15)}, 0, "initial weights", "norm.weight"),
    "the samples": ({"sample_ids": range(6)}, 1, "sample ids", "the global batch"),
    "the loss": ({"loss": 2.0}, 1, "loss", "loss"),
    "one gradient": ({"act": scale_gradient("query.weight", 1 + 1e-9)}, 1, "gradients", "query.weight"),
    "one gradient of step 2": ({"act": scale_gradient("embed.bias", 0.5, at=2)}, 2, "gradients", "embed.bias"),
    "the norm": ({"grad_norm": 1.6}, 1, "gradient norm", "gradient norm"),
    "the learning rate": ({"act": set_state}, 1, "learning rate", "group 0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_the_first_thing_that_differs(tmp_path, reference, name):
    changes, step, kind, what = CHANGES[name]
    first = differing(recorded(tmp_path / "found", **changes), reference)[0]
    assert (first.step, first.kind, first.name) == (step, kind, what)


def test_a_module_that_computes_otherwise_is_named_before_what_follows_from_it(tmp_path, reference):
    def start(model):
        model.key.forward = lambda x: 1.5 * F.linear(x, model.key.weight, model.key.bias)

    rows = differing(recorded(tmp_path / "found", start=start), reference)
    assert (rows[0].kind, rows[0].name) == ("module outputs", "key")
    assert [row.name for row in rows if row.kind == "module outputs" and row.step == 1] == [
        "key", "act", "head", "the model"
    ]  # fmt: skip
    told = diagnose(rows[0], Recorded(tmp_path / "found"), reference)
    assert told.sentence == "the output of key is 1.5 times the reference."
    assert told.cosine == pytest.approx(1.0)


def test_gradients_are_ordered_as_backward_comes_to_them(reference):
    order = backward_order(reference)
    ranked = sorted(order, key=order.__getitem__)
    assert ranked[0].startswith("head")
    assert ranked[-1].startswith("unused")
    assert ranked.index("key.weight") < ranked.index("norm.weight") < ranked.index("embed.weight")


def test_a_gradient_that_one_process_does_not_have_is_a_difference(tmp_path, reference):
    def act(step, model, optimizer):
        model.unused.weight.grad = torch.zeros_like(model.unused.weight)

    (first, *_) = differing(recorded(tmp_path / "found", act=act), reference)
    assert (first.kind, first.name, first.error) == ("gradients", "unused.weight", math.inf)
    told = diagnose(first, Recorded(tmp_path / "found"), reference)
    assert told.sentence == "the gradient of unused.weight exists, and one process has none."


def test_a_gradient_that_is_missing_is_a_difference(tmp_path, reference):
    def act(step, model, optimizer):
        model.head.bias.grad = None

    (first, *_) = differing(recorded(tmp_path / "found", act=act), reference)
    assert (first.kind, first.name) == ("gradients", "head.bias")


def test_rounding_of_a_gradient_that_is_zero_by_construction_is_no_difference(tmp_path):
    """Adam divides it by itself: weights and state of that parameter differ by the size of a whole update."""

    def adam(params, lr):
        return torch.optim.Adam(params, lr=lr, eps=1e-30)

    def noise(step, model, optimizer):
        model.key.bias.grad += 1e-19 * torch.randn(8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    reference = recorded(tmp_path / "a", optimizer=adam, steps=1)
    rows = measure(recorded(tmp_path / "b", optimizer=adam, act=noise, steps=1), reference)
    assert [row for row in rows if row.differs()] == []
    left_out = {row.name for row in rows if row.error is None}
    assert left_out == {"key.bias", "key.bias step", "key.bias exp_avg", "key.bias exp_avg_sq"}


def test_a_step_that_is_left_out_is_a_difference(tmp_path, reference):
    short = recorded(tmp_path / "found", steps=3)
    (short.folder / "step_000002").rename(tmp_path / "gone")
    assert [row.kind for row in differing(Recorded(short.folder), recorded(tmp_path / "longer", steps=3))] == ["steps"]


def test_recordings_without_a_step_in_common_differ(tmp_path, reference):
    found = recorded(tmp_path / "found", steps=1)
    (found.folder / "step_000001").rename(found.folder / "step_000009")
    assert "steps" in [row.kind for row in differing(Recorded(found.folder), reference)]


def test_a_recording_is_not_mixed_with_an_older_one(tmp_path, reference):
    with pytest.raises(VerifyError, match="is not empty"):
        recorded(reference.folder)


def test_looking_changes_nothing(tmp_path):
    def weights(look):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        recording = Recording(tmp_path / "a", model, optimizer, outputs=9, streams=True) if look else None
        for _ in range(3):
            optimizer.zero_grad()
            F.dropout(model(torch.randn(6, 5, 4)), 0.3).sum().backward()
            optimizer.step()
            if recording is not None:
                recording.step()
        if recording is not None:
            recording.close()
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        return [param.detach() for param in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(False), weights(True), strict=True))


def test_outputs_are_seen_once_however_often_backward_computes_them(tmp_path):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Saving()
    recording = Recording(tmp_path / "a", model, torch.optim.SGD(model.parameters(), lr=0.1), outputs=1)
    model(torch.randn(2, 4)).sum().backward()
    recording.step()
    calls = Recorded(tmp_path / "a").facts("step_000001")["calls"]
    assert calls == ["outputs/inner@0.0@0", "outputs/@0.0@0"]


@pytest.mark.parametrize(
    ("found", "whole", "expected"),
    [
        ((3, 4), (7, 4), "rows"),  # a batch
        ((3 * 5, 4), (7 * 5, 4), "rows"),  # a batch, flattened with time
        ((5, 3, 4), (5, 7, 4), "rows"),  # time first
        ((5, 4), (5, 4), "all"),  # no batch at all
        ((3, 4), (7, 5), None),
        ((3, 4), (8, 4), None),
        ((3, 4, 1), (7, 4), None),
    ],
)
def test_a_part_of_the_batch_is_put_beside_its_rows(found, whole, expected):
    reference = torch.arange(math.prod(whole)).reshape(whole).double()
    part = aligned(torch.zeros(found), reference, [4, 5, 6], 7, [])
    if expected is None:
        assert part is None
    elif expected == "all":
        assert torch.equal(part, reference)
    else:
        dim = next(d for d in range(len(found)) if found[d] != whole[d])
        size = found[dim]
        assert torch.equal(part, reference.narrow(dim, whole[dim] - size, size))


def test_features_of_a_split_layer_are_put_beside_theirs():
    whole = torch.arange(12).reshape(1, 12).double()
    spans = [[1, 0, 2, 2], [1, 2, 6, 2], [1, 4, 10, 2]]  # the second half of each of three fused parts
    assert aligned(torch.zeros(1, 6), whole, [0], 1, spans).tolist() == [[2, 3, 6, 7, 10, 11]]


def test_distance_is_relative_and_knows_what_is_not_finite():
    a = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert distance(a * 1.1, a) == pytest.approx(0.1)
    assert distance(a * 1.1, a, floor=50.0) == pytest.approx(0.01)
    assert distance(a, a[:1]) == math.inf
    masked = torch.tensor([-math.inf, 4.0])
    assert distance(masked, masked) == 0.0
    assert distance(torch.tensor([-math.inf, 5.0]), masked) == pytest.approx(0.25)
    assert distance(torch.tensor([1.0, 4.0]), masked) == math.inf
    assert distance(torch.tensor([math.nan, 4.0]), a) == math.inf
    lost = torch.tensor([math.nan, 4.0])
    assert (distance(lost, lost), distance(torch.tensor([0.0, 4.0]), lost)) == (0.0, math.inf)
    assert distance(torch.zeros(2), torch.zeros(2)) == 0.0
    assert distance(torch.ones(2), torch.zeros(2)) == math.inf


def test_figures_are_relative_too():
    assert relative(2.0, 1.0) == 1.0
    assert relative(0.0, 0.0) == 0.0
    assert relative(math.nan, 1.0) == math.inf
    assert relative(1e-9, 0.0, floor=1e-5) == pytest.approx(1e-4)


def test_every_kind_has_its_place_in_the_chain_of_causes(reference, tmp_path):
    rows = measure(recorded(tmp_path / "again"), reference)
    places = [(row.step, KINDS.index(row.kind)) for row in rows]
    assert places == sorted(places)
