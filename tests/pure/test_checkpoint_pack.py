"""Whatever a training state is made of comes back exactly, or is refused by its path."""

import json
import random
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from checkpoint_states import bits, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.checkpoint import pack, unpack
from shoal.errors import CheckpointError


def through_json(tree):
    tensors, skeleton = pack(tree)
    return unpack(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)


TENSORS = [
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.randn(2, 3, dtype=torch.float64),
    torch.randn(3).to(torch.bfloat16),
    torch.randn(3).to(torch.float16),
    torch.randn(3).to(torch.float8_e4m3fn),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, float("nan") - 1j]),
    torch.randn(2, 2, dtype=torch.complex128).t().conj(),
    torch.tensor([-(2**63), 2**63 - 1]),
    torch.tensor([2**32 - 1], dtype=torch.uint32),
    torch.arange(12).reshape(3, 4).t()[::2],
    torch.ones(1).expand(5),
]
ARRAYS = [
    np.arange(5, dtype=np.uint32),
    np.array(2.5),
    np.arange(6.0).reshape(2, 3)[::-1, ::2],
    np.zeros((0, 2), dtype=np.int8),
    np.array([1j], dtype=np.complex64),
    np.float32(0.1),
    np.uint64(2**64 - 1),
    np.bool_(True),
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**64, max_value=2**20_000)
    | st.floats()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs", "Lu"]))
    | st.binary()
    | st.sampled_from(TENSORS)
    | st.sampled_from(ARRAYS)
)
KEYS = (
    st.text(max_size=4)
    | st.integers()
    | st.sampled_from(["__metadata__", "a.b", "a", "[0]", "dict", "tensor", "\ud800"])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_any_nest_of_storable_values_comes_back_exactly(tree):
    assert same(through_json(tree), tree)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}")
def test_every_kind_of_tensor_comes_back_bit_by_bit(tensor):
    back = through_json({"x": tensor})["x"]
    assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))


def test_the_state_of_every_random_generator_comes_back_and_draws_the_same():
    state = {
        "python": random.getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "pcg": np.random.default_rng(5).bit_generator.state,
        "torch": torch.Generator().manual_seed(7).get_state(),
    }
    back = through_json(state)
    assert same(back, state)
    again = np.random.default_rng()
    again.bit_generator.state = back["pcg"]
    assert again.integers(2**63) == np.random.default_rng(5).integers(2**63)
    own, original = random.Random(), random.Random()
    own.setstate(back["python"])
    original.setstate(state["python"])
    assert own.random() == original.random()


def test_tensors_are_named_by_their_path():
    x, y = torch.ones(1), torch.zeros(1)
    tensors, _ = pack({"model": {"blocks.0.weight": x}, "rng": [y], 3: {"a": torch.ones(2)}})
    assert list(tensors) == ["model.blocks.0.weight", "rng[0]", "3.a"]


def test_paths_that_collide_get_two_names():
    tree = {
        "a": {"b": torch.ones(1)},
        "a.b": torch.zeros(1),
        "__metadata__": torch.ones(2),
        0: torch.ones(3),
        "0": torch.ones(4),
    }
    tensors, _ = pack(tree)
    assert len(tensors) == 5
    assert "__metadata__" not in tensors
    assert same(through_json(tree), tree)


def test_tied_tensors_are_stored_once_and_come_back_tied():
    weight = nn.Parameter(torch.randn(4, 2))
    tree = {"embed": weight, "head": weight.data, "part": weight.data[:2], "turned": weight.data.t()}
    tensors, _ = pack(tree)
    assert list(tensors) == ["embed", "part", "turned"]
    back = through_json(tree)
    assert back["embed"] is back["head"]
    assert torch.equal(back["part"], weight[:2])
    assert torch.equal(back["turned"], weight.t())


def test_empty_tensors_are_never_taken_for_tied():
    back = through_json({"a": torch.empty(0), "b": torch.empty(0)})
    assert back["a"] is not back["b"]


class _Optional(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"scheduler": {"lr_lambdas": [lambda step: 1.0]}}, "scheduler.lr_lambdas[0]: a function cannot be stored"),
        ({"extra": {1, 2}}, "extra: a value of type builtins.set cannot"),
        ({"a": [object()]}, "a[0]: a value of type builtins.object"),
        ({"a": nn.Linear}, "a: a value of type builtins.type"),
        ({"d": defaultdict(list)}, "d: a value of type collections.defaultdict"),
        ({"a": {1.5: 0}}, "a: the key 1.5"),
        ({"a": {True: 0}}, "a: the key True"),
        ({"e": torch.eye(2).to_sparse()}, "e: a sparse tensor"),
        ({"m": torch.empty(2, device="meta")}, "m: a tensor on the meta device"),
        ({"t": torch.ones(2).as_subclass(_Optional)}, "t: a _Optional"),
        ({"n": np.array(["text"])}, "n: numpy values of <U4"),
        ({"n": np.array([object()])}, "n: numpy values of object"),
        ({"n": np.array([1], dtype=">i4")}, "n: numpy values in foreign byte order"),
        ({"n": np.longdouble(1)}, "n: numpy values of"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_path(tree, words):
    with pytest.raises(CheckpointError) as raised:
        pack(tree)
    assert str(raised.value).startswith(words)


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_a_quantized_tensor_is_refused_by_its_path():
    with pytest.raises(CheckpointError, match="q: a quantized tensor"):
        pack({"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)})


def test_a_tree_that_contains_itself_is_refused():
    tree = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="containing itself"):
        pack(tree)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"import": "os"},
        {"tensor": "nowhere"},
        {"tensor": "x", "call": "os.system"},
        {"pairs": [[[1], 2]]},
        {"pairs": 5},
        {"int": "0x"},
        {"int": 3},
        {"float": "00"},
        {"bytes": "?"},
        {"size": ["a"]},
        {"dict": {}, "tuple": []},
        {},
    ],
)
def test_a_skeleton_that_no_writer_makes_is_refused(skeleton):
    with pytest.raises(CheckpointError, match="skeleton"):
        unpack(skeleton, {"x": torch.ones(1)})


def test_a_skeleton_nested_without_end_is_refused():
    skeleton = []
    for _ in range(5000):
        skeleton = [skeleton]
    with pytest.raises(CheckpointError, match="nested"):
        unpack(skeleton, {})


def _schedulers(optimizer):
    lr = torch.optim.lr_scheduler
    yield lr.StepLR(optimizer, 2)
    yield lr.MultiStepLR(optimizer, [2, 2, 5])
    yield lr.ExponentialLR(optimizer, 0.9)
    yield lr.LinearLR(optimizer)
    yield lr.PolynomialLR(optimizer, 10)
    yield lr.CosineAnnealingLR(optimizer, 10)
    yield lr.CosineAnnealingWarmRestarts(optimizer, 3)
    yield lr.CyclicLR(optimizer, 1e-4, 1e-3)
    yield lr.OneCycleLR(optimizer, 1e-2, 20)
    yield lr.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    yield lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.5)], [3])


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_the_state_of_every_scheduler_comes_back():
    for number in range(11):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = list(_schedulers(optimizer))[number]
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        state = scheduler.state_dict()
        assert same(through_json(state), state), type(scheduler).__name__


def test_a_counter_stays_a_counter():
    assert through_json(Counter({2: 2, 5: 1})) == Counter({2: 2, 5: 1})
    assert type(through_json(Counter())) is Counter


@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adagrad",
        "RMSprop",
        "Adadelta",
        "Rprop",
        "ASGD",
        "LBFGS",
        "Adafactor",
    ],
)
def test_the_state_of_every_optimizer_comes_back(name):
    model = nn.Linear(3, 2)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(1, 3)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    state = optimizer.state_dict()
    assert same(through_json(state), state)
