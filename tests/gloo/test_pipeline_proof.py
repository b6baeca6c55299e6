"""Whatever a model's own Python does around its modules: in stages it is the same training, or refused before it."""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trainings import assert_same_training, record
from zoo import Text

from shoal.errors import JobError, LayoutError
from shoal.job import token_loss

WIDTH = 8
SPLIT = "pp2:micro=2,split=2"  # two blocks in each stage


class Net(nn.Module):
    """A table, four blocks, a head."""

    block: type[nn.Module] = nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList(self.block(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens):
        return self.head(self.between(self.token(tokens)))

    def between(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def job(net, **methods):
    return dataclass(frozen=True, kw_only=True)(type(net.__name__, (Text,), {"model": lambda self: net(), **methods}))


# -- the same training --------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class ByAFunctionOfAutograds(Net):
    def between(self, x):
        for block in self.blocks:
            x = Doubled.apply(torch.tanh(block(x)))
        return x


class FilledThroughAView(Net):
    def between(self, x):
        for block in self.blocks:
            y = torch.tanh(block(x))
            x = torch.zeros_like(y)
            x.view(-1, 2, 4)[:, 0] = y.reshape(-1, 2, 4)[:, 0]
            x.view(-1, 2, 4)[:, 1].add_(y.reshape(-1, 2, 4)[:, 1])
        return x


class OwnCall(nn.Linear):
    def __call__(self, x):
        return 0.5 * super().__call__(x) + x


class BlocksWithACallOfTheirOwn(Net):
    block = OwnCall


class LateHooks(Net):
    def between(self, x):
        found = []
        for block in self.blocks:
            x = torch.tanh(block(x))
            found.append(x)
        for value in found:
            if value.requires_grad:
                value.register_hook(lambda grad: grad * 0.5)
        return x


class CountsAtItsEnd(Net):
    count = 0

    def forward(self, tokens):
        out = super().forward(tokens) / (1 + self.count)
        self.count += 1
        return out


class ScaledInEvaluation(Net):
    def forward(self, tokens):
        out = super().forward(tokens)
        return out if self.training else out * self.token.weight.square().sum()


class DrawsBetween(Net):
    """What one stage drops must not part the draws that all share: here a factor that cancels."""

    def between(self, x):
        if not self.training:
            return super().between(x)
        x = F.dropout(x, 1e-14)
        factor = torch.rand((), dtype=x.dtype) + 1
        again = (x.detach()[..., :1] * 0 + 1) * factor
        return super().between(x) * factor / again


@pytest.mark.parametrize(
    "net",
    [
        ByAFunctionOfAutograds,
        FilledThroughAView,
        BlocksWithACallOfTheirOwn,
        LateHooks,
        CountsAtItsEnd,
        ScaledInEvaluation,
        DrawsBetween,
    ],
)
def test_it_is_the_same_training(net):
    layout = "pp2:split=2" if net is CountsAtItsEnd else SPLIT  # a number of its own counts calls
    assert_same_training(record(job(net), layout), record(job(net))[0])


class ReturnsAWeight(Net):
    def forward(self, tokens):
        return super().forward(tokens), self.token.weight


@dataclass
class Answer:
    """No tree that torch knows."""

    logits: object
    size: object


class ReturnsAnObject(Net):
    """With a value of the first stage in it."""

    def forward(self, tokens):
        x = self.token(tokens)
        return Answer(self.head(self.between(x)), x.square().mean(-1, keepdim=True))


def test_a_model_may_return_an_object():
    made = job(ReturnsAnObject, loss=lambda self, output, batch: token_loss(output.logits * output.size, batch[1]))
    assert_same_training(record(made, SPLIT), record(made)[0])


def test_a_model_may_return_a_weight_for_the_loss():
    def loss(self, output, batch):
        logits, weight = output
        return token_loss(logits + (logits * weight.square().mean()), batch[1])

    made = job(ReturnsAWeight, loss=loss)
    assert_same_training(record(made, SPLIT), record(made)[0])


# -- refused, with the reason -------------------------------------------------------------------------------

FOUND = []


class CollectedByHooks(Net):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, given, out: FOUND.append(out))

    def between(self, x):
        FOUND.clear()
        return super().between(x) + torch.stack(FOUND).mean(0)


class Kept(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self._square = y.square().mean()
        return y


class KeptUnderAPrivateName(Net):
    block = Kept

    def between(self, x):
        return super().between(x) + sum(block._square for block in self.blocks)


class Telling(nn.Linear):
    def forward(self, x):
        y = super().forward(x) * self.board[0].scale
        self.board[0].scale = 1 + y.square().mean()
        return y


class ToldThroughAnObject(Net):
    """Blocks tell each other a scale."""

    block = Telling

    def __init__(self):
        super().__init__()
        self.board = SimpleNamespace(scale=1.0)
        for block in self.blocks:
            block.board = [self.board]

    def between(self, x):
        self.board.scale = torch.ones(())
        return super().between(x)


class Cooling(nn.Linear):
    heat = 1.0

    def forward(self, x):
        self.heat *= 0.5
        return super().forward(x)


class ReadsANumberOfABlock(Net):
    block = Cooling

    def between(self, x):
        return super().between(x) * self.blocks[0].heat


class ReadsABufferOfABlock(Net):
    def __init__(self):
        super().__init__()
        self.blocks[0].register_buffer("scale", torch.full((WIDTH,), 2.0))

    def between(self, x):
        return super().between(x) * self.blocks[0].scale


class ByShape(Net):
    """A weight of the first stage in the last one, for batches of more samples than shoal's two."""

    def forward(self, tokens):
        out = super().forward(tokens)
        return out * self.token.weight.square().sum() if len(tokens) > 2 else out


class InAClosure(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.scaled = lambda x: x * self.scale

    def between(self, x):
        return self.scaled(super().between(x))


class TakesAGradient(Net):
    def between(self, x):
        y = super().between(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0] if torch.is_grad_enabled() else y


class ClampsAWeight(Net):
    def between(self, x):
        self.blocks[0].weight.data.clamp_(-0.1, 0.1)
        return super().between(x)


class ReplacesAWeight(Net):
    def between(self, x):
        self.blocks[0].weight.data = F.normalize(self.blocks[0].weight.data)
        return super().between(x)


class Remembers(Net):
    memory = torch.zeros(WIDTH)

    def between(self, x):
        y = super().between(x + self.memory)
        self.memory = y.detach().mean((0, 1))
        return y


class TwoInOneMemory(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].weight = nn.Parameter(self.blocks[0].weight.data)  # as a careless tying does


class Extra(nn.Linear):
    calls = 0

    def get_extra_state(self):
        return torch.tensor(self.calls)

    def set_extra_state(self, state):
        self.calls = int(state)


class StateBesideTensors(Net):
    block = Extra


class CutByItsNumbers(Net):
    def forward(self, tokens):
        out = super().forward(tokens[:, : 3 + int(tokens[0, 0]) % 3])
        return F.pad(out, (0, 0, 0, tokens.shape[1] - out.shape[1]))


def scripted(*sizes):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        return torch.jit.script(nn.Linear(*sizes))


class Scripted(Net):
    block = staticmethod(scripted)  # type: ignore[assignment]


class ThroughNumpy(Net):
    def between(self, x):
        return x + float(super().between(x).detach().numpy().mean())


OTHERWISE = "does not compute what it computes whole"


@pytest.mark.parametrize(
    ("net", "error", "reason"),
    [
        (
            CollectedByHooks,
            (JobError, LayoutError),
            "values that modules have made, and on shapes|stack expects a non-empty",
        ),
        (KeptUnderAPrivateName, LayoutError, "has made, or holds, and has not returned"),
        (ToldThroughAnObject, LayoutError, OTHERWISE),
        (ReadsANumberOfABlock, LayoutError, OTHERWISE),
        (ReadsABufferOfABlock, LayoutError, "has made, or holds, and has not returned"),
        (ByShape, JobError, "uses token.weight in stage 1 for inputs of this shape"),
        (InAClosure, LayoutError, "none of the model's own: it lies in a closure"),
        (TakesAGradient, LayoutError, "calls torch.autograd.grad between its modules"),
        (ClampsAWeight, LayoutError, "writes into blocks.0.weight .*, between its modules"),
        (ReplacesAWeight, LayoutError, "writes into blocks.0.weight .*, between its modules"),
        (Remembers, LayoutError, "keeps what its modules have made, for the next forward"),
        (TwoInOneMemory, JobError, "blocks.0.weight and blocks.1.weight are two parameters in one memory"),
        (StateBesideTensors, JobError, "has a state of its own beside its tensors"),
        (CutByItsNumbers, JobError, "it depends on their numbers"),
        (Scripted, JobError, "is compiled by torch.jit"),
        (ThroughNumpy, LayoutError, "cannot be followed on shapes alone"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_stages_cannot_see_is_refused(net, error, reason):
    with pytest.raises(error, match=reason):
        record(lambda: job(net)(precision="fp32"), SPLIT)  # float64 would part what shares memory


def test_a_loss_that_reads_a_weight_of_another_stage_is_refused():
    def model(self):
        net = Net()
        object.__setattr__(self, "net", net)
        return net

    def loss(self, output, batch):
        return token_loss(output + self.net.token.weight.square().sum(), batch[1])

    made = dataclass(frozen=True, kw_only=True)(type("Penalised", (Text,), {"model": model, "loss": loss}))
    with pytest.raises(JobError, match=r"the loss .* reads token.weight, which is in another stage"):
        record(made, SPLIT)
