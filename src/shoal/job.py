"""What is trained: model, data, loss, optimizer, and the values that change the numbers. Never where."""

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import tomllib
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import JobError, nearest

Precision = Literal["fp64", "fp32", "bf16", "fp16"]

BUILT_IN = {"digits": "shoal.models.digits:Digits", "gpt": "shoal.models.gpt:GPT"}


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

    batch_size: int  # samples per optimizer step in the whole world
    steps: int
    seed: int = 0
    precision: Precision = "fp32"
    clip_grad_norm: float | None = None
    batch_norm: Literal["global", "local"] = "global"  # local: each rank's own micro-batch
    nonfinite: Literal["stop", "skip"] = "stop"

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

    def show(self, model: nn.Module, figures: Mapping[str, float]) -> str:
        """What a person sees at the end, besides the figures of the evaluation: a sample, a table."""
        return ""


def check_job(job: Job) -> None:
    """Refuse values that no training can have.

    Raises:
        JobError: naming the field, its value and the rule.
    """
    rules = {
        "batch_size": (job.batch_size >= 1, "at least 1 sample per optimizer step"),
        "steps": (job.steps >= 1, "at least 1 optimizer step"),
        "seed": (0 <= job.seed < 2**63, "from 0 to 2**63 - 1"),
        "precision": (job.precision in typing.get_args(Precision), "one of fp64, fp32, bf16, fp16"),
        "clip_grad_norm": (job.clip_grad_norm is None or job.clip_grad_norm > 0, "None or above 0"),
        "batch_norm": (job.batch_norm in ("global", "local"), "global or local"),
        "nonfinite": (job.nonfinite in ("stop", "skip"), "stop or skip"),
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            raise JobError(f"{type(job).__name__}.{name} is {getattr(job, name)!r}; it must be {rule}.")


def identity(job: Job) -> dict[str, Any]:
    """What makes two trainings the same one: the class and every value, but not how far to go (`steps`)."""
    source = sys.modules.get(type(job).__module__)
    module = Path(getattr(source, "__file__", None) or type(job).__module__).stem
    fields = {f.name: getattr(job, f.name) for f in dataclasses.fields(job) if f.name != "steps"}
    plain = {k: v if isinstance(v, int | float | str | None) else repr(v) for k, v in fields.items()}
    return {"job": f"{module}:{type(job).__qualname__}", **plain}


def scale_lr(lr: float, *, batch_size: int, base_batch_size: int, rule: Literal["linear", "sqrt"]) -> float:
    """The learning rate for another global batch; a helper, never applied by itself.

    Linear (SGD): Goyal et al. 2017, arXiv:1706.02677. Square root (Adam): Malladi et al. 2022, arXiv:2205.10287.
    """
    ratio = batch_size / base_batch_size
    return lr * (ratio if rule == "linear" else ratio**0.5)


def load_job(spec: str, settings: Mapping[str, Any] | None = None) -> Job:
    """The job that a command line names: `digits`, `jobs/gpt.py`, `jobs/gpt.py:GPTSmall`, `module:Name`.

    Args:
        settings: field -> text of its value (or a value), typed by the field's annotation.

    Raises:
        JobError: no such file, class or field (with the nearest), or a value of the wrong type.
    """
    job = _build(_job_class(BUILT_IN.get(spec, spec)), settings or {})
    check_job(job)
    return job


def with_fields(job: Job, settings: Mapping[str, Any]) -> Job:
    """A copy of a job with some fields set, from values or from text."""
    _check_names(type(job), settings)
    hints = typing.get_type_hints(type(job))
    changed = dataclasses.replace(job, **{n: _typed(type(job), n, hints[n], v) for n, v in settings.items()})
    check_job(changed)
    return changed


def _job_class(spec: str) -> type[Job]:
    place, _, name = spec.partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, spec)
    here = {
        n: c
        for n, c in vars(module).items()
        if isinstance(c, type) and issubclass(c, Job) and not inspect.isabstract(c)
    }
    own = {n: c for n, c in here.items() if c.__module__ == module.__name__}
    if name:
        if name not in here:
            raise JobError(f"{place} has no job {name!r}.{nearest(name, here) if here else ' It has no job.'}")
        return here[name]
    if len(own) != 1:
        found = ", ".join(own) or "none; a job is a subclass of shoal.Job with model, data, loss, optimizer"
        raise JobError(f"{place} must hold one job, or name it as {place}:Name. It holds: {found}.")
    return next(iter(own.values()))


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise JobError(f"no job file {path}. Built-in jobs: {', '.join(BUILT_IN)}.")
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path.resolve()):
        return sys.modules[name]
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        name = f"job_{name}"  # never shadow a real module, such as `test` or `random`
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as import does: dataclasses and loader processes look the module up by name.
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(place: str, spec: str) -> ModuleType:
    if ":" not in spec:
        raise JobError(
            f"no job {spec!r}.{nearest(spec, BUILT_IN)} A job of your own is a file, jobs/mine.py:Mine, or module:Name."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not place.startswith(error.name):
            raise  # the job's module is there; something that it imports is not
        raise JobError(f"no module {place!r} (job {spec!r}): {error}.") from None


def _build(cls: type[Job], settings: Mapping[str, Any]) -> Job:
    if "__dataclass_fields__" not in vars(cls) and vars(cls).get("__annotations__"):
        raise JobError(f"put @dataclass(frozen=True, kw_only=True) above class {cls.__name__}(Job).")
    _check_names(cls, settings)
    hints = typing.get_type_hints(cls)
    values = {name: _typed(cls, name, hints[name], value) for name, value in settings.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise JobError(f"{cls.__name__}: {error}. Give fields as --set name=value.") from None


def _check_names(cls: type[Job], settings: Mapping[str, Any]) -> None:
    fields = {f.name for f in dataclasses.fields(cls) if f.init}
    for name in settings:
        if name not in fields:
            raise JobError(f"{cls.__name__} has no field {name!r}.{nearest(name, fields)}")


def _typed(cls: type[Job], name: str, hint: Any, value: Any) -> Any:
    from pydantic import TypeAdapter, ValidationError

    if isinstance(value, str) and hint is not str:
        value = None if value.lower() == "none" else _toml_value(value)
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        shown = getattr(hint, "__name__", hint)
        why = error.errors()[0]["msg"]
        raise JobError(f"{cls.__name__}.{name} is {shown}; {value!r} does not fit: {why}.") from None


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
