"""sequence=true: between the splits of tensor parallelism each rank holds its share of the tokens, and nothing changes.

Dimensions: B batch, T tokens, W width, N ranks of tp.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_processes
from splitting import WIDTH, assert_same_split, sequences, split_run, vectors
from test_tensor_attention import MERGES, SPLITS, Attention, SelfOrCross
from test_tensor_random import assert_equal_over_ranks
from test_tensor_training import Text
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset
from trainings import assert_same_training, record
from zoo import EncoderDecoder, HuggingBert, HuggingGPT2, HuggingLlama, Vision

from shoal.errors import LayoutError
from shoal.models.gpt import Decoder
from shoal.parallel.place import place, placement_of
from shoal.world import Place, World

HEADS = 4


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale + self.shift


class Feed(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


class Block(nn.Module):
    """Attention that looks at its input's shape, norms, dropout, a scale: what stands between splits."""

    def __init__(self, dropout: float = 0.0, heads: int = HEADS) -> None:
        super().__init__()
        self.norm = Norm()
        self.attention = SelfOrCross()
        if heads != HEADS:
            self.attention = Attention(SPLITS["unflatten"], MERGES["flatten"], heads, heads)
        self.scale, self.drop = nn.Parameter(torch.rand(WIDTH)), nn.Dropout(dropout)
        self.after, self.feed = nn.LayerNorm(WIDTH), Feed(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x))) * self.scale
        return x + self.drop(self.feed(self.after(x)))


class Stack(nn.Module):
    def __init__(self, make_block: Callable[[], nn.Module] = Block, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def long(num_tokens: int) -> Callable[[int], Tensor]:
    """(rows, num_tokens, WIDTH)"""
    return lambda rows: torch.randn(rows, num_tokens, WIDTH, dtype=torch.float64)


def stretches(model: nn.Module, world: World) -> Any:
    return placement_of(model).split.stretches


# -- the law -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        "tp2:sequence=true",
        "tp4:sequence=true",
        "dp2.tp2:sequence=true",
        "tp2:micro=2,sequence=true",
        "tp3:recompute=block,sequence=true",
        "fsdp2.tp2:recompute=block,sequence=true",
    ],
)
def test_gpt_is_the_same_training_as_lone(layout):
    (reference,) = record(Text)
    found = record(Text, layout)
    assert_same_training(found, reference)
    assert any("Between the splits of 2 blocks each holds its share of the tokens" in note for note in found[0].notes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # in evaluation with padding
@pytest.mark.parametrize("job", [HuggingLlama, HuggingGPT2, HuggingBert, EncoderDecoder, Vision], ids=str)
def test_other_models_of_blocks_are_the_same_training(job):
    job().model()  # what it imports is imported here, once, and not in every rank
    (reference,) = record(job)
    found = record(job, "tp2:sequence=true")
    assert_same_training(found, reference)
    assert any("each holds its share of the tokens" in note for note in found[0].notes)


@pytest.mark.parametrize(("num_tokens", "layout"), [(7, "tp2"), (5, "tp4"), (4, "tp3"), (2, "tp2")])
def test_tokens_that_do_not_divide_are_shared_out_unevenly(num_tokens, layout):
    found = assert_same_split(Stack, long(num_tokens), f"{layout}:sequence=true", then=stretches)
    assert found.extra.runs == (("blocks.0", "blocks.1"),)
    # Its code looks at its input's shape, so the tokens are whole before it; those of an MLP at its first layer.
    assert found.extra.entries == {0: "blocks.0.attention", 1: None, 2: "blocks.1.attention", 3: None}


@dataclass(frozen=True, kw_only=True)
class SevenTokens(Text):
    def data(self) -> Any:
        return TensorDataset(*(tensor[:, :7] for tensor in super().data().tensors))


@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.drill), "interleaved,virtual=2,recompute=block"]
)
def test_a_pipeline_passes_on_whole_tokens(schedule):
    def job() -> Text:
        return SevenTokens(depth=4)

    (reference,) = record(job)
    assert_same_training(record(job, f"pp2.tp2:micro=4,schedule={schedule},sequence=true"), reference)


def test_no_stage_of_a_pipeline_may_end_inside_of_a_block():
    def glued(model: nn.Module, world: World) -> list[list[str]]:
        return placement_of(model).split.glued()

    found = assert_same_split(Stack, long(7), "tp2:sequence=true", then=glued).extra
    assert ["blocks.0.feed.up", "blocks.0.feed.down"] in found
    assert any({"blocks.0.norm", "blocks.0.feed.down"} <= set(names) for names in found)


class Ragged(Dataset):  # type: ignore[type-arg]
    """Sequences of 1 to 8 tokens."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, 256, (9,), generator=torch.Generator().manual_seed(index))
        length = (8, 1, 5, 7, 2, 3)[index % 6]
        return tokens[:length], tokens[1 : length + 1]


@dataclass(frozen=True, kw_only=True)
class RaggedText(Text):
    """Each batch, and each micro-batch, as long as its longest."""

    batch_size: int = 4
    steps: int = 4

    def data(self) -> Any:
        return Ragged()

    def collate(self, samples: Any) -> Any:
        inputs, targets = zip(*samples, strict=True)
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(inputs, batch_first=True), pad(targets, batch_first=True, padding_value=-100)

    def metrics(self, output: Tensor, batch: Any) -> Any:
        return {}


@pytest.mark.parametrize("layout", ["tp2", "tp3:recompute=block", "tp2:micro=4", "dp2.tp2"])
def test_sequences_of_another_length_in_every_batch(layout):
    (reference,) = record(RaggedText)
    degrees, _, options = layout.partition(":")
    assert_same_training(record(RaggedText, f"{degrees}:{options + ',' * bool(options)}sequence=true"), reference)


def test_two_forwards_of_other_lengths_before_their_backward_with_blocks_that_run_again():
    def both(model: nn.Module) -> Tensor:
        torch.manual_seed(1)
        first, second = torch.randn(2, 7, WIDTH).double(), torch.randn(2, 4, WIDTH).double()
        model.zero_grad(set_to_none=True)
        (model(first).square().sum() + 3 * model(second).square().sum()).backward()
        return model.first.weight.grad.clone()

    torch.manual_seed(0)
    expected = both(Stack().double())

    def rank(rank: int, size: int, rendezvous: str) -> Tensor:
        where = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open("tp2:sequence=true,recompute=block", place=where) as world:
            torch.manual_seed(0)
            model = Stack().double()
            place(model, world, sample=((long(6)(2),), {}))
            return both(model)

    for found in run_processes(rank, 2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_blocks_that_the_model_runs_again_itself():
    class Again(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)
            return self.norm(x)

    assert_same_split(Again, long(7), "tp2:sequence=true")


class TokensFirst(nn.Module):
    """torch's encoder, as it is without batch_first."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.transpose(0, 1)).mean(dim=0)


def test_tokens_in_the_first_dim():
    found = assert_same_split(TokensFirst, long(7), "tp3:sequence=true", then=stretches)
    assert found.extra.dim == 0


class Kept(Stack):
    """What blocks give is an output of the model, too, so it must be whole there."""

    def forward(self, x: Tensor) -> list[Tensor]:
        kept = [self.first(x)]
        for block in self.blocks:
            kept.append(block(kept[-1]))
        return kept


class Shared(Stack):
    """One block, called twice."""

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = block(x)
        return x


@pytest.mark.parametrize("make", [Kept, Shared])
def test_blocks_between_which_tokens_must_be_whole_are_stretches_of_their_own(make):
    found = assert_same_split(make, long(7), "tp2:sequence=true", then=stretches)
    assert found.extra.runs == (("blocks.0",), ("blocks.1",))


def test_a_copy_computes_the_same_and_evaluation_too():
    def compare(model: nn.Module, world: World) -> bool:
        twin, batch = copy.deepcopy(model).eval(), long(5)(1)
        model.eval()
        with torch.no_grad():
            return torch.equal(model(batch), twin(batch))

    assert assert_same_split(Stack, long(7), "tp2:sequence=true", then=compare).extra


@pytest.mark.parametrize("left_out", [0, 2])
def test_a_block_at_an_end_that_is_left_out_later_is_an_error_and_never_another_training(left_out):
    class Leaving(Stack):
        def __init__(self) -> None:
            super().__init__(depth=3)
            self.left_out: int | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                x = x if number == self.left_out else block(x)
            return self.norm(x).mean(dim=1)

    def leave(model: nn.Module, world: World) -> None:
        model.left_out = left_out
        model(long(6)(2))

    split_run(Leaving, long(6), "tp2:sequence=true")
    with pytest.raises(LayoutError, match="was left out of this forward"):
        split_run(Leaving, long(6), "tp2:sequence=true", steps=0, then=leave)


# -- memory --------------------------------------------------------------------------------------------


def saved_bytes(model: nn.Module, batch: Tensor) -> int:
    """Of the activations that a forward keeps for its backward; each piece of memory once, parameters left out."""
    ours = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in ours:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_what_is_kept_between_splits_is_a_share_of_the_tokens():
    """Of each block: the inputs of two norms (B, T, W) are kept by slices; those of two splits stay whole."""
    batch, num_tokens, width, depth = 2, 32, 16, 3

    def kept(layout: str) -> int:
        def rank(rank: int, size: int, rendezvous: str) -> int:
            where = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
            with World.open(layout, place=where) as world:
                torch.manual_seed(0)
                model = Decoder(width=width, depth=depth, heads=4, context=num_tokens, tied=True, dropout=0.0)
                tokens = torch.randint(0, 256, (batch, num_tokens))
                place(model, world, sample=((tokens,), {}))
                return saved_bytes(model, tokens)

        return run_processes(rank, 4)[0]

    whole, sliced = kept("tp4"), kept("tp4:sequence=true")
    one = batch * num_tokens * width * 4  # bytes of (B, T, W)
    norms = 2 * batch * num_tokens * 4  # mean and deviation of each token
    assert whole - sliced == 2 * depth * (one + norms) * 3 // 4


# -- random numbers ------------------------------------------------------------------------------------


def dropping() -> nn.Module:
    return Stack(lambda: Block(0.4))


@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.drill), "tp3"])
def test_ranks_stay_alike_with_dropout(layout):
    found = split_run(dropping, long(7), f"{layout}:sequence=true")
    assert_equal_over_ranks(found)
    again = split_run(dropping, long(7), f"{layout}:sequence=true")[0].walk
    assert all(torch.equal(tensor, again.state[name]) for name, tensor in found[0].walk.state.items())


def test_one_dropout_for_blocks_and_what_is_around_them():
    """Around them ranks hold the same, and must draw the same; bit-equal weights after three steps show it."""

    class Around(Stack):
        def __init__(self) -> None:
            super().__init__(depth=2)
            self.drop = self.blocks[0].drop = self.blocks[1].drop = nn.Dropout(0.4)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(super().forward(self.drop(x)))

    assert_equal_over_ranks(split_run(Around, long(7), "tp2:sequence=true"))


def test_each_rank_draws_its_own_mask_of_its_tokens():
    def masks(model: nn.Module, world: World) -> list[Tensor]:
        seen: list[Tensor] = []
        drop = model.blocks[0].drop
        drop.register_forward_hook(lambda module, args, output: seen.append((output != 0).double()))
        model.train()
        torch.manual_seed(3)
        model(long(80)(4))
        return seen

    first, second = (seen.extra for seen in split_run(dropping, long(8), "tp2:sequence=true", then=masks))
    assert [mask.shape for mask in first] == [(4, 40, WIDTH)] * 2
    for ours, theirs in zip(first, second, strict=True):
        assert 0.55 < float(ours.mean()) < 0.65
        # Independent: two masks that keep 0.6 agree where both keep or both drop, 0.6^2 + 0.4^2 = 0.52 of all.
        assert 0.48 < float((ours == theirs).double().mean()) < 0.56


class AtFirst(Block):
    """Dropout before all else: when the block after it runs again, torch stops in the midst of its last region."""

    def __init__(self) -> None:
        super().__init__(0.4)
        self.feed = Feed()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        x = x + self.attention(self.norm(x)) * self.scale
        return x + self.feed(self.after(x))


@pytest.mark.parametrize("make_block", [lambda: Block(0.4), AtFirst], ids=["in both halves", "at first"])
def test_blocks_that_run_again_draw_again_what_they_drew(make_block):
    kept, again = (
        split_run(lambda: Stack(make_block), long(7), f"tp2:{option}sequence=true")[0].walk
        for option in ("", "recompute=block,")
    )
    for ours, theirs in zip(again.grads, kept.grads, strict=True):
        assert all(torch.equal(grad, theirs[name]) for name, grad in ours.items())


# -- refused -------------------------------------------------------------------------------------------


class Functional(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.feed(self.norm(x)), 0.3, self.training)


class StochasticDepth(Block):
    """One draw for each sample: slices that draw for themselves would leave out other samples."""

    def forward(self, x: Tensor) -> Tensor:
        keep = (torch.rand(len(x), 1, 1) < 0.7).to(x) if self.training else 1.0
        return x + self.feed(self.norm(x)) * keep


class Mixing(Block):
    """A mean over all tokens, outside of the layers that are split."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(dim=1, keepdim=True)


class Unused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0 * self.idle


@pytest.mark.parametrize(
    ("make_block", "reason"),
    [
        (Functional, "or draws random numbers other than by nn.Dropout"),
        (StochasticDepth, "or draws random numbers other than by nn.Dropout"),
        (Mixing, "looks at several tokens at once"),
        (lambda: Block(heads=1), "looks at several tokens at once"),
        (Unused, "blocks.0.idle has no gradient"),
    ],
    ids=["functional dropout", "stochastic depth", "a mean", "an attention that is left whole", "unused"],
)
def test_blocks_that_cannot_run_on_slices_are_refused_with_the_reason(make_block, reason):
    split_run(lambda: Stack(make_block), sequences, "tp2", steps=0)  # without sequence it runs
    with pytest.raises(LayoutError, match=reason):
        split_run(lambda: Stack(make_block), sequences, "tp2:sequence=true")


def test_models_without_blocks_or_tokens_are_refused_with_the_reason():
    with pytest.raises(LayoutError, match="no block of which a layer is split"):
        split_run(Feed, sequences, "tp2:sequence=true")
    with pytest.raises(LayoutError, match=r"called with a tensor of shape \(2, 12\)"):
        split_run(lambda: Stack(Feed), vectors, "tp2:sequence=true")
    with pytest.raises(LayoutError, match=r"with at least 4 tokens in the first samples of the data"):
        split_run(Stack, long(3), "tp4:sequence=true")
