"""While a forward is still, nothing drops; what would have is named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.verbs.verify.still import Still, without_dropout


class Custom(nn.Module):
    """Attention that calls torch's functions with rates of its own."""

    def forward(self, x):
        x = F.dropout(x, 0.5, self.training)
        x = torch.dropout(x, 0.5, self.training)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)


MODULES = {
    "module": lambda: nn.Dropout(0.5),
    "spatial": lambda: nn.Dropout1d(0.5),
    "alpha": lambda: nn.AlphaDropout(0.5),
    "functional": Custom,
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
    "recurrent": lambda: Recurrent(),
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


@pytest.mark.parametrize("name", MODULES)
def test_a_still_forward_is_that_of_evaluation(name):
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(2, 5, 8)
    still = Still()
    named = without_dropout(module)
    with still:
        found = module(x)
    assert still.silenced or named
    torch.backends.mha.set_fastpath_enabled(False)
    assert torch.allclose(found, module.eval()(x), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "recurrent"])
def test_without_it_the_same_forward_drops(name):
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(2, 5, 8)
    assert not torch.allclose(module(x), module(x), atol=1e-3)


def test_activations_that_backward_computes_again_are_still_too():
    torch.manual_seed(0)
    layer, drop, x = nn.Linear(8, 8), nn.Dropout(0.5), torch.randn(4, 8)
    with Still():
        checkpoint(lambda t: drop(layer(t)) ** 2, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    found = layer.weight.grad.clone()
    layer.zero_grad()
    (layer(x) ** 2).sum().backward()
    assert torch.allclose(found, layer.weight.grad)


def test_what_drops_nothing_is_left_alone_and_not_named():
    still, x = Still(), torch.randn(3, 4, requires_grad=True)
    with still:
        (F.dropout(x, 0.0) * 2).sum().backward()
    assert still.silenced == set()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
