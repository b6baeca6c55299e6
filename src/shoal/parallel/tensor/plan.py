"""Which layers are split, and how: glob -> style, as the job, the model or Hugging Face's own plan says it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.errors import LayoutError, nearest
from shoal.parallel.tensor.styles import STYLES, fits

# The spelling of Hugging Face's plans, and the older one.
_ALIASES = {
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "rowwise_rep": "rowwise_scatter",
    "rowwise_split_input": "rowwise_scatter",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "colwise_gather",
    "replicated_with_grad_allreduce": "replicated",
    "replicate": "replicated",
    "sequence": "replicated",  # where its activations lie is a question of memory, not of the training
    "sequence_parallel": "replicated",
    "packed_colwise": "packed_colwise",
    "packed_rowwise": "packed_rowwise",
    "moe_tp_experts": "experts",
}
KNOWN = (*STYLES, *_ALIASES)


@dataclass(frozen=True)
class Style:
    """How one layer is to be split.

    Attributes:
        name: one of `STYLES`, or `experts`.
        is_packed: two matrices side by side in one, each to be cut (gate and up).
        tensors: of experts, the styles of their parameters by name, as pairs.
    """

    name: str
    is_packed: bool = False
    tensors: tuple[tuple[str, "Style"], ...] = ()

    @staticmethod
    def of(told: str) -> "Style":
        """As a plan spells it."""
        name = _ALIASES.get(told, told)
        return Style(name.removeprefix("packed_"), is_packed=name.startswith("packed_"))

    def __str__(self) -> str:
        return ("packed_" if self.is_packed else "") + self.name


def _experts(name: str, found: Mapping[str, Style]) -> Style:
    below = {key.removeprefix(f"{name}."): style for key, style in found.items() if key.startswith(f"{name}.")}
    if not any(style.name == "rowwise" for style in below.values()):
        raise LayoutError(f"tensor plan: {name} are experts, and no parameter of theirs is rowwise.")
    return Style("experts", tensors=tuple(below.items()))


def given_plan(model: nn.Module, plan: Mapping[str, str] | None) -> dict[str, str]:
    """The plan that somebody stated: the job's, else the model's `tp_plan`, else Hugging Face's; {} for none."""
    if plan:
        return dict(plan)
    for name in ("tp_plan", "_tp_plan"):
        own: Any = getattr(model, name, None)  # two conventions; most models have neither
        if isinstance(own, Mapping) and own:
            return {str(glob): str(style) for glob, style in own.items()}
    return {}


def resolve(model: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """Every layer that the plan names, with its style.

    A `*` stands for one part of a name; a later rule overrides an earlier one.

    Raises:
        LayoutError: an unknown style, a rule that matches nothing, or a style that does not fit the layer.
    """
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    found: dict[str, Style] = {}
    for glob, told in plan.items():
        if told not in KNOWN:
            raise LayoutError(f"tensor plan: {glob!r} has the unknown style {told!r}.{nearest(told, KNOWN)}")
        pattern = re.compile("".join("[^.]+" if part == "*" else re.escape(part) for part in re.split(r"(\*)", glob)))
        names = [name for name in (*modules, *params) if pattern.fullmatch(name)]
        if not names:
            raise LayoutError(f"tensor plan: {glob!r} matches nothing in the model.{nearest(glob, _globs(modules))}")
        for name in names:
            found[name] = Style.of(told)
            _check_fits(name, modules.get(name), found[name])
    experts = {name: _experts(name, found) for name, style in found.items() if style.name == "experts"}
    rest = {name: style for name, style in found.items() if style.name not in ("replicated", "experts")}
    for name in rest:
        layer = name.rpartition(".")[0]
        if name not in modules and layer not in experts:
            glob = next(iter(_globs({layer: model})), layer)
            raise LayoutError(
                f"tensor plan: {name} is a parameter, and only parameters of experts have styles of their own. Give "
                f"the style to its layer: {glob!r}."
            )
    return experts | {name: style for name, style in rest.items() if name in modules}


def _check_fits(name: str, module: nn.Module | None, style: Style) -> None:
    if module is not None and style.name not in ("experts", "replicated") and not fits(module, style.name):
        raise LayoutError(
            f"tensor plan: {name} is a {type(module).__name__}, which cannot be split {str(style)!r}. "
            "Linear layers (Conv1D, convolutions) take colwise and rowwise, tables vocabulary; leave others out."
        )


def _globs(modules: Mapping[str, nn.Module]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules if name))
