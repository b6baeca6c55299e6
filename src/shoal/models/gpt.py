"""A decoder-only transformer over bytes, and the job that trains it on source text.

Dimensions: B batch, T time (bytes), W width, H heads, D width of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data import StdlibText
from shoal.errors import JobError
from shoal.job import Job, Params, Scheduler, Sum, token_loss

NUM_BYTES = 256  # the vocabulary


class Attention(nn.Module):
    """Causal self-attention.

    The rows of `qkv` lie head by head, and query, key, value within each, so that a slice holds whole heads.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) -> (B, T, W); the number of heads is read off the activation."""
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))  # (B, T, H, 3, D)
        query, key, value = qkv.transpose(1, 2).unbind(3)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """Two layers, four times wider between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) -> (B, T, W)."""
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class Block(nn.Module):
    """One layer, normalised before each half."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) -> (B, T, W)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        output: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return output


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out; a vocabulary beyond 256 has rows that no byte names."""

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        heads: int,
        context: int,
        tied: bool,
        dropout: float,
        vocabulary: int = NUM_BYTES,
    ) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._init(std=0.02, residual_std=0.02 / math.sqrt(2 * depth))
        if tied:
            self.head.weight = self.token.weight

    def _init(self, *, std: float, residual_std: float) -> None:
        """Normal weights, smaller where they add to the residual stream (Radford et al. 2019, GPT-2)."""
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif param.dim() > 1:
                adds = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(param, std=residual_std if adds else std)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) of int64, T up to the context -> (B, T, vocabulary)."""
        position = self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(self.token(tokens) + position)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Brown et al. 2020, arXiv:2005.14165, table 2.1 (3.2 M tokens per batch); the vocabulary of 50,257 rounded up to a
    # multiple of 128.
    "gpt3-175b": {
        "width": 12288,
        "depth": 96,
        "heads": 96,
        "context": 2048,
        "vocabulary": 50304,
        "batch_size": 1536,
        "tied": True,
    },
    # Shoeybi et al. 2019, arXiv:1909.08053, section 5.1; the vocabulary as they pad it, to 128 x 8 ranks.
    "megatron-8.3b": {
        "width": 3072,
        "depth": 72,
        "heads": 24,
        "context": 1024,
        "vocabulary": 51200,
        "batch_size": 512,
        "tied": True,
    },
}


@dataclass(frozen=True, kw_only=True)
class GPT(Job):
    """Predicts the next byte of the Python standard library's own source."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS

    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128
    vocabulary: int = NUM_BYTES  # rows of the table and the head: at least one for each byte
    tied: bool = True
    dropout: float = 0.0
    lr: float = 2e-3
    batch_size: int = 32
    steps: int = 300
    clip_grad_norm: float | None = 1.0

    def model(self) -> nn.Module:
        """The decoder.

        Raises:
            JobError: the width does not divide into the heads, or the vocabulary has no row for some byte.
        """
        if self.vocabulary < NUM_BYTES:
            raise JobError(
                f"vocabulary={self.vocabulary} is too small: the text is bytes, so take {NUM_BYTES} or more."
            )
        if self.heads < 1 or self.width % self.heads:
            fit = [n for n in range(1, self.width + 1) if self.width % n == 0]
            nearest = [n for n in fit if n < self.heads][-1:] + [n for n in fit if n > self.heads][:1]
            raise JobError(
                f"width={self.width} does not divide into heads={self.heads} of equal width. "
                f"Nearest that fit: {' or '.join(f'heads={n}' for n in nearest)}."
            )
        return Decoder(
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            context=self.context,
            tied=self.tied,
            dropout=self.dropout,
            vocabulary=self.vocabulary,
        )

    def data(self) -> Any:
        return StdlibText(self.context)

    def evaluation(self) -> Any:
        return StdlibText(self.context, split="test")

    def loss(self, output: Tensor, batch: Any) -> Sum:
        return token_loss(output, batch[1])

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        matrices = [p for p in params if p.dim() > 1]
        vectors = [p for p in params if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Scheduler:
        warm_up = max(1, min(self.steps // 10, 100))
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warm_up, total_iters=warm_up)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=max(1, self.steps - warm_up), eta_min=self.lr / 10
        )
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warm_up])

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Sum]:
        """Two to the power of bits per byte is the perplexity."""
        loss = token_loss(output, batch[1])
        hits = output.argmax(-1) == batch[1]
        return {
            "bits_per_byte": Sum(loss.value / math.log(2), loss.count),
            "accuracy": Sum(hits.sum(), float(hits.numel())),
        }

    def show(self, model: nn.Module, figures: Mapping[str, float]) -> str:
        """The perplexity on the held-out text (a model that knows nothing has 256), and a sample."""
        known = f"perplexity {math.exp(figures['loss']):.2f} of {NUM_BYTES}\n" if "loss" in figures else ""
        return f"{known}sample: {self.sample(model)}"

    @torch.no_grad()
    def sample(self, model: nn.Module, prompt: str = "def ", num_bytes: int = 200) -> str:
        """The prompt continued, one byte drawn after the other; the same for the same weights and seed."""
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(self.seed)
        tokens = torch.tensor([list(prompt.encode())], device=device)
        was_training = model.training
        model.eval()
        for _ in range(num_bytes):
            logits = model(tokens[:, -self.context :])[:, -1]
            drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], dim=1)
        model.train(was_training)
        text = bytes(tokens[0].tolist()).decode(errors="replace")
        # A terminal must survive an untrained model, which draws escape sequences too.
        return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
