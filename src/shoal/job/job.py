"""What is trained: model, data, loss, optimizer, and the values that change the numbers. Never where."""

import dataclasses
import re
import sys
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import JobError, nearest

Precision = Literal["fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Sum:
    """A value added over samples, and how many were added; divided once, at the very end.

    A mean of means is wrong as soon as two parts differ in size; sums and counts add up in any layout.
    Shapes: `value` is 0-dim for a loss, any shape for a metric; `count` is a number or a 0-dim tensor.
    """

    value: Tensor
    count: Tensor | float

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value, self.count + other.count)

    def mean(self) -> Tensor:
        """The value per counted item."""
        return self.value / self.count


def mean_loss(losses: Tensor) -> Sum:
    """The Sum of a loss that has one entry per sample (or per pixel, per token): any shape but a scalar.

    Raises:
        JobError: the loss is a scalar, so it was already averaged and its count is lost.
    """
    if losses.dim() == 0:
        raise JobError(
            "mean_loss() got a scalar, which has lost its count: a mean over ragged parts cannot be put "
            "together again. Pass the loss of each sample: F.cross_entropy(output, target, reduction='none')"
        )
    return Sum(losses.sum(), float(losses.numel()))


def token_loss(logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Sum:
    """Cross entropy added over the tokens that count.

    Shapes: logits (..., vocabulary), targets (...) of int64; entries equal to `ignore_index` count nothing.
    """
    flat = targets.reshape(-1)
    value = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), flat, ignore_index=ignore_index, reduction="sum")
    return Sum(value, (flat != ignore_index).sum())


class Params(list[nn.Parameter]):
    """The parameters of the placed model, each once, in the order of the model; `named` has their names."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(named.values())
        self.named = dict(named)


class Scheduler(Protocol):
    """What shoal needs of a learning-rate schedule: torch's own all fit."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """A training: four methods, and the values that change its numbers.

    Subclass it as a frozen dataclass; its fields become options of the command line (`--set lr=3e-4`).
    A value that may change the loss beyond rounding belongs here; the rest belongs to the layout.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # by name: values that are set together, --preset NAME

    batch_size: int  # samples per optimizer step in the whole world
    steps: int
    seed: int = 0
    precision: Precision = "fp32"
    clip_grad_norm: float | None = None
    batch_norm: Literal["global", "local"] = "global"  # local: each rank's own micro-batch
    nonfinite: Literal["stop", "skip"] = "stop"
    init: Literal["whole", "by-name"] = "whole"  # by-name: no rank ever holds the whole model, and other numbers

    @abstractmethod
    def model(self) -> nn.Module:
        """The module as for one device; called after torch.manual_seed(seed)."""

    @abstractmethod
    def data(self) -> Any:
        """A map-style or iterable dataset of single samples: no loader, no sampler."""

    @abstractmethod
    def loss(self, output: Any, batch: Any) -> Sum:
        """The loss of a part of the batch, added and counted."""

    @abstractmethod
    def optimizer(self, params: Params) -> torch.optim.Optimizer:
        """Called after placement; `params.named` has the names."""

    # Members with a default, not hooks: override what differs.

    def inputs(self, batch: Any) -> Any:
        """What the model is called with: a tuple spreads to positions, a dict to keywords."""
        return batch[0] if isinstance(batch, tuple | list) else batch

    def collate(self, samples: list[Any]) -> Any:
        """Samples -> batch."""
        return torch.utils.data.default_collate(samples)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Scheduler | None:
        """The learning-rate schedule, advanced once per optimizer step."""
        return None

    def evaluation(self) -> Any | None:
        """A dataset that every evaluation visits exactly once."""
        return None

    def metrics(self, output: Any, batch: Any) -> dict[str, Sum]:
        """Figures of evaluation besides the loss, as Sums (a confusion matrix is one too)."""
        return {}

    def stages(self, model: nn.Module) -> Sequence[Sequence[str]]:
        """The modules of each pipeline stage, by name, in the order in which they run; empty: balanced by cost."""
        return ()

    def tensor_plan(self) -> Mapping[str, str]:
        """How tensor parallelism splits the model, glob -> style; {}: the model's own plan, else inferred."""
        return {}

    def show(self, model: nn.Module, figures: Mapping[str, float]) -> str:
        """What a person sees at the end, besides the figures of the evaluation: a sample, a table."""
        return ""


def check_job(job: Job) -> None:
    """Refuse values that no training can have.

    Raises:
        JobError: naming the field, its value and the rule.
    """
    clip = job.clip_grad_norm
    rules = {
        "batch_size": (_is_whole(job.batch_size) and job.batch_size >= 1, "at least 1 sample per optimizer step"),
        "steps": (_is_whole(job.steps) and job.steps >= 1, "at least 1 optimizer step"),
        "seed": (_is_whole(job.seed) and 0 <= job.seed < 2**63, "from 0 to 2**63 - 1"),
        "precision": (job.precision in typing.get_args(Precision), "one of fp64, fp32, bf16, fp16"),
        "clip_grad_norm": (clip is None or (isinstance(clip, int | float) and clip > 0), "None or above 0"),
        "batch_norm": (job.batch_norm in ("global", "local"), "global or local"),
        "init": (job.init in ("whole", "by-name"), "whole or by-name"),
        "nonfinite": (job.nonfinite in ("stop", "skip"), "stop or skip"),
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            raise JobError(f"{type(job).__name__}.{name} is {getattr(job, name)!r}; it must be {rule}.")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def identity(job: Job) -> dict[str, Any]:
    """What makes two trainings the same one: the class and every value, but not how far to go (`steps`)."""
    fields = {f.name: getattr(job, f.name) for f in dataclasses.fields(job) if f.name != "steps"}
    return {"job": _named(type(job)), **{name: _plain(value) for name, value in fields.items()}}


def _named(thing: Any) -> str:
    """`file:Name` of a class or a function: the same whether its file is run, imported or named as a job."""
    source = sys.modules.get(thing.__module__)
    return f"{Path(getattr(source, '__file__', None) or thing.__module__).stem}:{thing.__qualname__}"


def _plain(value: Any) -> Any:
    """A value of the identity: the same in another process, so never with an address in memory."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, type | types.FunctionType):
        return _named(value)
    if isinstance(value, set | frozenset):  # in an order of its own in every process
        return f"{type(value).__name__}({sorted(map(repr, map(_plain, value)))})"
    own_words: object = type(value).__repr__
    if own_words is object.__repr__:
        return f"{_named(type(value))} object"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def scale_lr(lr: float, *, batch_size: int, base_batch_size: int, rule: Literal["linear", "sqrt"]) -> float:
    """The learning rate for another global batch; a helper, never applied by itself.

    Linear (SGD): Goyal et al. 2017, arXiv:1706.02677. Square root (Adam): Malladi et al. 2022, arXiv:2205.10287.

    Raises:
        JobError: another rule, or a batch without samples.
    """
    powers = {"linear": 1.0, "sqrt": 0.5}
    if rule not in powers:
        raise JobError(f"scale_lr() knows no rule {rule!r}.{nearest(str(rule), powers)}")
    if batch_size < 1 or base_batch_size < 1:
        raise JobError(f"scale_lr() got batches of {batch_size} and {base_batch_size}; each holds at least 1 sample.")
    return float(lr * (batch_size / base_batch_size) ** powers[rule])
