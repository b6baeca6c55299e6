"""One tiny job for each kind of model: what the generality matrix trains in every layout.

All in float64, three steps of momentum and clipping that bites; 19 samples in batches of 7, so that the last batch is
ragged. Sequences differ in how many tokens count. Dropout is off, since its draws may differ between layouts (law 7).
Models are written as their users would write them, with nothing in them that knows of layouts.

Dimensions: B batch, T tokens, W width, H heads, D width of a head.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.job import Job, Params, Sum, mean_loss, token_loss
from shoal.models.gpt import GPT

SIDE, CLASSES = 32, 4  # of images
VOCABULARY, LENGTH = 32, 10  # of sequences


@dataclass(frozen=True, kw_only=True)
class Tiny(Job):
    """What all of them share."""

    batch_size: int = 7
    steps: int = 3
    precision: str = "fp64"  # type: ignore[assignment]
    clip_grad_norm: float | None = 0.5

    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)

    def data(self) -> Any:
        return self.samples(19, seed=1)

    def evaluation(self) -> Any:
        return self.samples(5, seed=2)

    @abstractmethod
    def samples(self, num: int, seed: int) -> Any:
        """A data set, drawn on the spot."""

    def loss(self, output: Any, batch: Any) -> Sum:
        """Of the logits, which a model of `transformers` hands out among other things."""
        return self.loss_of(output if isinstance(output, Tensor) else output.logits, batch)

    def loss_of(self, logits: Tensor, batch: Any) -> Sum:
        """Cross entropy of the second of the pair."""
        return token_loss(logits, batch[1])


class Images(Tiny):
    """Classify images of noise."""

    def samples(self, num: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(num, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
        return TensorDataset(images, torch.randint(CLASSES, (num,), generator=generator))

    def loss_of(self, logits: Tensor, batch: Any) -> Sum:
        return mean_loss(F.cross_entropy(logits, batch[1], reduction="none"))


class Text(Tiny):
    """Predict the next token; of each sequence the first 3 to 10 count."""

    def samples(self, num: int, seed: int) -> TensorDataset:
        return text(num, seed)


def text(num: int, seed: int) -> TensorDataset:
    """Sequences of random tokens, and what follows each of those that count."""
    tokens = torch.randint(VOCABULARY, (num, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:].masked_fill(~counting(num), -100))


def counting(num: int) -> Tensor:
    """(num, LENGTH): which tokens of each sequence count."""
    return torch.arange(LENGTH) < 3 + torch.arange(num)[:, None] % (LENGTH - 2)


class Perceptron(Images):
    def model(self) -> nn.Module:
        first, second, third = nn.Linear(3 * SIDE * SIDE, 16), nn.Linear(16, 32), nn.Linear(32, CLASSES)
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.GELU(), third)


class Convolutions(Images):
    """With a bias before BatchNorm, which has no gradient but rounding."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * 2 * 2, CLASSES)),
        )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2015, arXiv:1512.03385)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """Four stages of two blocks, at an eighth of the usual width."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._stage(width, width, stride=1)
        self.layer2 = self._stage(width, 2 * width, stride=2)
        self.layer3 = self._stage(2 * width, 4 * width, stride=2)
        self.layer4 = self._stage(4 * width, 8 * width, stride=2)
        self.fc = nn.Linear(8 * width, CLASSES)

    @staticmethod
    def _stage(channels_in: int, channels: int, stride: int) -> nn.Module:
        return nn.Sequential(BasicBlock(channels_in, channels, stride), BasicBlock(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class Residual(Images):
    def model(self) -> nn.Module:
        return ResNet18()


class Recurrent(nn.Module):
    """Embedding, two layers of LSTM, head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, 2 * width, num_layers=2, batch_first=True)
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, vocabulary)."""
        return self.head(self.lstm(self.embed(tokens))[0])


class LSTM(Text):
    def model(self) -> nn.Module:
        return Recurrent()


class Translator(nn.Module):
    """Encoder and decoder of torch, with embeddings and a head."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, width)
        self.target = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.body = nn.Transformer(width, heads, 2, 2, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, padding: Tensor, target: Tensor) -> Tensor:
        """(B, T) of tokens, (B, T) true at padding, (B, T) of tokens -> (B, T, vocabulary)."""
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=source.device).triu(1)
        hidden = self.body(
            self.source(source) + self.position,
            self.target(target) + self.position,
            tgt_mask=future,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.head(hidden)


class Pairs(Tiny):
    """Predict the next token of a target from a source of 3 to 10 tokens."""

    def samples(self, num: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        source = torch.randint(VOCABULARY, (num, LENGTH), generator=generator)
        target = torch.randint(VOCABULARY, (num, LENGTH + 1), generator=generator)
        wanted = target[:, 1:].masked_fill(~counting(num).flip(0), -100)
        return TensorDataset(source, wanted, counting(num), target[:, :-1])


class EncoderDecoder(Pairs):
    def model(self) -> nn.Module:
        return Translator()

    def inputs(self, batch: Any) -> Any:
        source, _, is_real, target = batch
        return source, ~is_real, target


class SelfAttention(nn.Module):
    """Query, key and value in one matrix, one after the other, as in most vision transformers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) -> (B, T, W)."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)  # (B, H, T, D)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, self.heads * self.head_width))


class VisionBlock(nn.Module):
    """One layer, normalised before each half."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches of 8x8 and a class token (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, stride=8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) / 10)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (SIDE // 8) ** 2, width) / 10)
        self.blocks = nn.Sequential(VisionBlock(width, heads), VisionBlock(width, heads))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Vision(Images):
    def model(self) -> nn.Module:
        return VisionTransformer()


@dataclass(frozen=True, kw_only=True)
class TiedGPT(GPT):
    """The job that ships, with its own optimizer and schedule."""

    width: int = 32
    depth: int = 2
    context: int = LENGTH
    batch_size: int = 7
    steps: int = 3
    precision: str = "fp64"  # type: ignore[assignment]

    def data(self) -> Any:
        return text(19, seed=1)

    def evaluation(self) -> Any:
        return text(5, seed=2)


# From `transformers`, which takes seconds to import: where it is used, not at the top.


class HuggingGPT2(Text):
    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
        dropouts = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


class HuggingLlama(Text):
    """Each head for keys and values serves two for queries."""

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))


class HuggingMixtral(Text):
    """Four experts, two for each token; without the loss that balances them, which is no Sum over samples."""

    def model(self) -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        # The grouped kernel that is the default has no float64.
        how = {"experts_implementation": "eager", "output_router_logits": False}
        return MixtralForCausalLM(MixtralConfig(**SMALL, **how, num_key_value_heads=2, num_local_experts=4))


class HuggingBert(Text):
    """Fill in tokens; what is padding counts for nothing."""

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForMaskedLM(BertConfig(**SMALL, **dropouts))

    def inputs(self, batch: Any) -> Any:
        return {"input_ids": batch[0], "attention_mask": batch[1] != -100}


class HuggingT5(Pairs):
    def model(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **sizes))

    def inputs(self, batch: Any) -> Any:
        source, _, is_real, target = batch
        return {"input_ids": source, "attention_mask": is_real, "decoder_input_ids": target}


class HuggingViT(Images):
    def model(self) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        config = ViTConfig(**sizes, num_attention_heads=4, image_size=SIDE, patch_size=8, num_labels=CLASSES)
        return ViTForImageClassification(config)


ZOO: dict[str, type[Job]] = {
    "MLP": Perceptron,
    "CNN with BatchNorm": Convolutions,
    "ResNet-18": Residual,
    "LSTM language model": LSTM,
    "encoder-decoder (nn.Transformer)": EncoderDecoder,
    "ViT": Vision,
    "gpt, tied weights": TiedGPT,
    "GPT-2 (transformers)": HuggingGPT2,
    "Llama (transformers)": HuggingLlama,
    "BERT (transformers)": HuggingBert,
    "T5 (transformers)": HuggingT5,
    "ViT (transformers)": HuggingViT,
    "Mixtral (transformers)": HuggingMixtral,
}
