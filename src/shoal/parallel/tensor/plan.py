"""Which layers are split, and how: glob -> style, as the job, the model or Hugging Face's own plan says it."""

import fnmatch
import re
from collections.abc import Mapping
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


class Experts(str):
    """The style `experts`, with those of the module's own parameters (experts, out, in)."""

    tensors: Mapping[str, str]

    def width(self, module: nn.Module) -> int:
        """Features of one expert's middle layer."""
        name = next(name for name, style in self.tensors.items() if style.endswith("rowwise"))
        return module.get_parameter(name).shape[-1]


def _experts(name: str, found: Mapping[str, str]) -> Experts:
    style = Experts("experts")
    style.tensors = {key.removeprefix(f"{name}."): told for key, told in found.items() if key.startswith(f"{name}.")}
    if not any(told.endswith("rowwise") for told in style.tensors.values()):
        raise LayoutError(f"tensor plan: {name} are experts, and no parameter of theirs is rowwise.")
    return style


def given_plan(model: nn.Module, plan: Mapping[str, str] | None) -> dict[str, str]:
    """The plan that somebody stated: the job's, else the model's `tp_plan`, else Hugging Face's; {} for none."""
    if plan:
        return dict(plan)
    for name in ("tp_plan", "_tp_plan"):
        own: Any = getattr(model, name, None)  # two conventions; most models have neither
        if isinstance(own, Mapping) and own:
            return {str(glob): str(style) for glob, style in own.items()}
    return {}


def resolve(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Every layer (or parameter) that the plan names, with its style.

    A `*` stands for one part of a name; a later rule overrides an earlier one.

    Raises:
        LayoutError: an unknown style, a rule that matches nothing, or a style that does not fit the layer.
    """
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    found: dict[str, str] = {}
    for glob, told in plan.items():
        style = _ALIASES.get(told, told)
        if told not in KNOWN:
            raise LayoutError(
                f"tensor plan: {glob!r} has the style {told!r}, which does not exist.{nearest(told, KNOWN)}"
            )
        pattern = re.compile("".join("[^.]+" if part == "*" else re.escape(part) for part in re.split(r"(\*)", glob)))
        names = [name for name in (*modules, *params) if pattern.fullmatch(name)]
        if not names:
            raise LayoutError(f"tensor plan: {glob!r} matches nothing in the model.{nearest(glob, _globs(modules))}")
        for name in names:
            _check_fits(name, modules.get(name), style)
            found[name] = style
    experts = {name: _experts(name, found) for name, style in found.items() if style == "experts"}
    return experts | {n: s for n, s in found.items() if s not in ("replicated", "experts") and n in modules}


def _check_fits(name: str, module: nn.Module | None, style: str) -> None:
    if module is None or style in ("experts", "replicated"):
        return
    plain = style.removeprefix("packed_")
    if not fits(module, plain):
        raise LayoutError(
            f"tensor plan: {name} is a {type(module).__name__}, which cannot be split {style!r}. "
            "Linear layers (Conv1D, convolutions) take colwise and rowwise, tables vocabulary; leave others out."
        )


def _globs(modules: Mapping[str, nn.Module]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules if name))


def matches(name: str, globs: Mapping[str, str]) -> bool:
    """Whether any glob of a plan means this name."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)
