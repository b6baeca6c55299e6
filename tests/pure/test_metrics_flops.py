import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shoal.metrics import flops
from shoal.metrics.definitions import dense_flops_per_token
from shoal.metrics.flops import CONVENTION, count_flops


def flops_of_step(model, *inputs):
    with count_flops() as count:
        out = model(*inputs)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert not count.uncounted
    return count


class Block(nn.Module):
    """Pre-norm transformer layer with fused QKV, as any GPT has it."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


def test_mlp_costs_six_flops_per_weight_and_sample():
    mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8, requires_grad=True)
    assert flops_of_step(mlp, x).model == 6 * 5 * (8 * 16 + 16 * 4)


def test_first_layer_needs_no_gradient_of_its_input():
    assert flops_of_step(nn.Linear(8, 16), torch.randn(5, 8)).model == 4 * 5 * 8 * 16


def test_frozen_weights_cost_no_weight_gradient():
    frozen = nn.Linear(8, 16).requires_grad_(False)
    assert flops_of_step(frozen, torch.randn(5, 8, requires_grad=True)).model == 4 * 5 * 8 * 16


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_grouped_convolution_costs_its_weights_at_each_position(groups):
    conv = nn.Conv2d(8, 16, 3, padding=1, stride=2, groups=groups)
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    assert flops_of_step(conv, x).model == 3 * 2 * (2 * 3 * 3) * (16 * 8 // groups * 3 * 3)


def test_transposed_convolution_costs_its_weights_at_each_input_position():
    conv = nn.ConvTranspose1d(4, 6, 3, stride=2)
    x = torch.randn(2, 4, 10, requires_grad=True)
    assert flops_of_step(conv, x).model == 3 * 2 * (2 * 10) * (4 * 6 * 3)


@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_attention_costs_the_same_whichever_kernel_runs(kernel):
    q, k, v = (torch.randn(2, 3, length, 16, requires_grad=True) for length in (5, 7, 7))
    backend = {"flash": nn.attention.SDPBackend.FLASH_ATTENTION, "math": nn.attention.SDPBackend.MATH}[kernel]
    with nn.attention.sdpa_kernel(backend), count_flops() as count:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert count.model == 3 * 2 * (2 * 2 * 3 * 5 * 7 * 16)


def test_transformer_block_costs_6n_plus_full_attention():
    batch, context, width = 2, 12, 32
    block = Block(width, heads=4)
    x = torch.randn(batch, context, width, requires_grad=True)
    num_weights = sum(p.numel() for p in block.parameters() if p.dim() == 2)
    per_token = dense_flops_per_token(num_weights, depth=1, width=width, context=context)
    assert flops_of_step(block, x).model == batch * context * per_token


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_cost_their_weights_at_each_time_step(kind, gates):
    time, batch = 6, 2
    layer = kind(8, 16, batch_first=True, bidirectional=True)
    x = torch.randn(batch, time, 8, requires_grad=True)
    counted = flops_of_step(layer, x).model
    full = 3 * 2 * batch * time * 2 * gates * 16 * (8 + 16)
    first_hidden_state = 2 * batch * 2 * gates * 16 * 16
    # The unfused layers skip the gradient of the first hidden state, which is a constant.
    assert counted in (full, full - first_hidden_state)


def test_sparse_product_costs_only_what_is_stored():
    stored = torch.eye(6).to_sparse()
    weight = torch.randn(6, 3, requires_grad=True)
    with count_flops() as count:
        torch.sparse.mm(stored, weight).sum().backward()
    assert count.model == 2 * (2 * 6 * 3)


def test_micro_batches_together_cost_the_batch():
    layer, x = nn.Linear(8, 16), torch.randn(6, 8, requires_grad=True)
    with count_flops() as accumulated:
        for part in x.chunk(3):
            layer(part).sum().backward()
    assert accumulated.model == flops_of_step(layer, x).model


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_adds_hardware_flops_only(reentrant):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(5, 8, requires_grad=True)
    count = flops_of_step(lambda x: checkpoint(layers, x, use_reentrant=reentrant), x)
    assert count.model == flops_of_step(layers, x).model
    assert count.recomputed == 2 * 5 * 2 * 8 * 8
    assert count.hardware == count.model + count.recomputed


def test_double_backward_is_no_recomputation():
    layer, x = nn.Linear(8, 8), torch.randn(5, 8, requires_grad=True)
    with count_flops() as count:
        (gradient,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert count.recomputed == 0
    assert count.model > 2 * (2 * 5 * 8 * 8)


def test_fused_optimizer_costs_nothing():
    layer = nn.Linear(8, 8)
    layer(torch.randn(2, 8)).sum().backward()
    with count_flops() as count:
        torch.optim.AdamW(layer.parameters(), fused=True).step()
    assert count.model == 0


def test_inference_mode_is_counted_too():
    with count_flops() as count, torch.inference_mode():
        Block(32, heads=4)(torch.randn(2, 12, 32))
    assert count.model == 2 * 12 * (2 * 12 * 32 * 32 + 4 * 12 * 32)


def test_autocast_counts_as_full_precision_does():
    layer, x = nn.Linear(8, 16), torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        count = flops_of_step(layer, x)
    assert count.model == 6 * 5 * 8 * 16


def test_counting_does_not_change_a_bit():
    torch.manual_seed(0)
    block, x = Block(32, heads=4), torch.randn(2, 12, 32)

    def gradients():
        block.zero_grad()
        block(x).square().sum().backward()
        return [p.grad.clone() for p in block.parameters()]

    plain = gradients()
    with count_flops():
        counted = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))


def test_trial_on_fake_tensors_inside_a_real_step_is_not_counted():
    # DTensor tries every new operation at its global shape so, before the first real one.
    x = torch.randn(5, 8)
    with count_flops() as count:
        with FakeTensorMode():
            torch.randn(20, 8) @ torch.randn(8, 8)
        x @ x.T
    assert count.model == 2 * 5 * 8 * 5


def test_dry_run_on_fake_tensors_is_counted():
    with FakeTensorMode(), count_flops() as count:
        nn.Linear(8, 16)(torch.randn(5, 8)).sum().backward()
    assert count.model == 4 * 5 * 8 * 16


def test_operation_called_as_no_formula_knows_is_named_and_does_not_stop_the_step():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(flops._FORMULAS, torch.ops.aten.mm, lambda a, *, out_val: 1)
        with count_flops() as count:
            product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.sum() == 8
    assert count.uncounted == {"aten.mm"}


def test_custom_kernel_without_formula_is_named():
    with torch.library._scoped_library("shoaltest", "FRAGMENT") as library:
        library.define("kernel(Tensor x) -> Tensor")
        library.impl("kernel", lambda x: x @ x, "CPU")
        with count_flops() as count:
            torch.ops.shoaltest.kernel(torch.ones(2, 2))
    assert count.uncounted == {"shoaltest.kernel"}


def test_convention_says_how_causal_attention_counts():
    assert "causal attention counted in full" in CONVENTION
