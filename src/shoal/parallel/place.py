"""A mesh and a model -> the placed model: the one function that knows the order in which a model is spread."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from shoal.dry import convert, is_dry
from shoal.errors import JobError, LayoutError
from shoal.parallel.blocks import find_blocks
from shoal.parallel.clip import clip_factor, grad_norm, scale_gradients
from shoal.parallel.norm import globalise_batch_norm, has_batch_norm, release_batch_norm
from shoal.parallel.parts import Part, cut, keep_parts, local_of, parts_of
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.replicate import DryReplica, Replica, check_no_hooks, check_replicable
from shoal.parallel.tensor import Sample, Split, split_tensors
from shoal.parallel.threads import Threads
from shoal.world import World

if TYPE_CHECKING:
    from shoal.parallel.pipeline import Costs, Pipeline
    from shoal.parallel.shard import Shards

_KEY = "_shoal_placement"


@dataclass
class Placement:
    """How a model was spread; kept beside its parameters, never among them."""

    world: World
    global_norms: list[str] = field(default_factory=list)
    local_norms: list[str] = field(default_factory=list)
    split: Split | None = None
    replica: Replica | DryReplica | None = None
    shards: "Shards | None" = None
    pipeline: "Pipeline | None" = None
    threads: Threads | None = None
    model: nn.Module | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placement":
        return Placement(self.world)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Within: gradients add up on this rank and are not reduced."""
        reduction = self.shards or self.replica
        return reduction.accumulate() if reduction else contextlib.nullcontext()

    def own_gradients(self) -> dict[str, Tensor]:
        """This rank's gradients, that `accumulate` has kept from being reduced."""
        if self.shards is not None:
            return self.shards.own_gradients()
        assert self.model is not None
        return {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}

    def forget(self) -> None:
        """Drop those of them that lie elsewhere than in `.grad`."""
        if self.shards is not None:
            self.shards.forget()

    def settle(self) -> None:
        """After the last backward of a step: what the reduction over the data ranks leaves to do."""
        for part in (self.shards, self.replica, self.split, self.pipeline):
            if part is not None:
                part.settle()

    @property
    def is_cut(self) -> bool:
        """Ranks hold different parts of the model, so that they must call it equally often, evaluation included."""
        return self.shards is not None or self.split is not None or self.pipeline is not None

    @contextlib.contextmanager
    def quiet_norms(self, live: bool) -> Iterator[None]:
        """Around a forward: a stand-in (not live) must not enter the statistics that a rank keeps for itself."""
        norms = [] if live or self.model is None else [self.model.get_submodule(name) for name in self.local_norms]
        for norm in norms:
            norm.eval()
        try:
            yield
        finally:
            for norm in norms:
                norm.train()


def place(
    model: nn.Module,
    world: World,
    *,
    batch_norm: Literal["global", "local"] = "global",
    plan: Mapping[str, str] | None = None,
    sample: Sample | None = None,
    value: Callable[[str], Tensor] | None = None,
    stages: Sequence[Sequence[str]] = (),
    costs: "Costs | None" = None,
) -> nn.Module:
    """Spread a model over a world; it stays the same module, with the same parameter names.

    After it, `loss.backward()` leaves the mean over the data ranks of each rank's gradient in `.grad`.
    Order (an invariant): survey for the pipeline, statistics over the global batch, tensor split, pipeline cut,
    recompute, compile, then shards or replicas.

    Args:
        plan: how tensor parallelism splits the model, glob -> style; inferred where it is left out.
        sample: (args, kwargs) that the model may be called with; tensor parallelism looks at it.
        stages: the modules of each pipeline stage, by name; balanced by `costs` where it is left out.
        costs: names of modules -> the work of each in one forward; by their parameters where it is left out.
        value: gives a parameter by its name, whole, where they are on `meta`; each is there for a moment only.

    Raises:
        LayoutError: the layout would split a BatchNorm batch into micro-batches, or does not fit the sizes.
        JobError: the model is placed already, or has parameters without a shape.
    """
    world.layout.require_available()
    _check_shards(world)
    if _KEY in model.__dict__:
        raise JobError("this model is placed already; place it once, and build a new one for another world.")
    check_replicable(model)
    if world.size * world.layout.num_parts > 1:
        check_no_hooks(model)
    placement = Placement(world, model=model)
    if world.layout.threads > 1:
        placement.threads = Threads(model, world)
    if world.layout.pp > 1:
        placement.pipeline = _survey(model, world, sample, stages, costs)
    _place_norms(model, world, placement, batch_norm)
    held = model.state_dict(keep_vars=True)
    parts = {name: Part.whole(tensor.shape) for name, tensor in held.items() if isinstance(tensor, Tensor)}
    if world.mesh.sizes["tp"] > 1:
        if value is not None:
            raise LayoutError(
                f"{world.layout}: with init=by-name no weights are there yet, and tensor parallelism proves its split "
                "on them. Take fsdp alone, or init=whole."
            )
        placement.split = split_tensors(model, world, plan=plan, sample=sample)
        parts |= placement.split.parts
    if placement.pipeline is not None:
        regions = placement.split.regions if placement.split is not None else []
        glued = [[f"{region.name}.{layer}".strip(".") for layer in region.cuts] for region in regions]
        parts = placement.pipeline.cut(parts, glued)
    _place_blocks(model, world)
    if world.mesh.sizes["fsdp"] > 1:
        from shoal.parallel.shard import Shards  # with DTensor and more: half a second that others need not pay

        placement.shards = Shards(model, world)
        for name, rows in placement.shards.rows.items():
            parts[name] = parts[name].take(0, [rows], "fsdp")
        if placement.pipeline is not None:
            placement.pipeline.shards = placement.shards
    if value is not None:
        _allocate(model, world.device)
    if world.mesh.sizes["fsdp"] == 1 and world.num_data > 1 and placement.pipeline is None:
        placement.replica = DryReplica(model, world) if is_dry() else Replica(model, world)
    if placement.split is not None:
        placement.split.show_outputs()
    if value is not None:
        _fill(model, parts, value)
    if placement.pipeline is not None:
        parts = _with_axes_of_holders(parts, world)
    keep_parts(model, parts)
    model.__dict__[_KEY] = placement  # not setattr: nothing of ours may look like a part of the module
    if placement.threads is not None:
        placement.threads.start()
    return model


def _survey(
    model: nn.Module, world: World, sample: Sample | None, stages: Sequence[Sequence[str]], costs: "Costs | None"
) -> "Pipeline":
    from shoal.parallel.pipeline import Pipeline

    if sample is None:
        raise LayoutError(
            f"{world.layout}: a pipeline looks at what the model does with one sample, and was given none. Pass one to "
            "shoal.place(model, world, sample=((inputs,), {})); the data of a job must have an index for it."
        )
    return Pipeline(model, world, sample, stated=stages, costs=costs)


def _with_axes_of_holders(parts: dict[str, Part], world: World) -> dict[str, Part]:
    """A tensor that is in other stages is cut there over axes that only they know of; every rank must name the same."""
    held = {name: part.axes for name, part in parts.items() if part.boxes}
    told: dict[str, list[str]] = {}
    for row in world.gather_text(json.dumps(held)):
        told |= json.loads(row)
    return {name: replace(part, axes=tuple(told.get(name, part.axes))) for name, part in parts.items()}


def _check_shards(world: World) -> None:
    """Options of shards, where there are none."""
    layout = world.layout
    if layout.fsdp == 1 and layout.zero in (2, 3):
        raise LayoutError(
            f"{layout}: zero={layout.zero} cuts gradients over fsdp. Write fsdp{layout.dp}:zero={layout.zero}."
        )
    if layout.fsdp == 1 and layout.offload != "none":
        raise LayoutError(f"{layout}: offload=cpu keeps the shards of fsdp on the host, and there are none. Add fsdpN.")


def _fill(model: nn.Module, parts: Mapping[str, Part], value: Callable[[str], Tensor]) -> None:
    """This rank's part of every parameter, one after the other."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if parts[name].boxes:  # what is of other stages is not made here
                local_of(param).copy_(cut(value(name), parts[name]))


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for what is on `meta`. torch's own conversion would make two parameters of one that is shared."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the absent one too: its id stays its own
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.device.type == "meta":
                empty = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
                module._parameters[name] = made.setdefault(id(param), (param, empty))[1]
    convert(model, lambda tensor: tensor)  # fully_shard looks for its parameters anew


def _place_blocks(model: nn.Module, world: World) -> None:
    """Recompute inside, so that a compiled block holds both runs; both under the shards, which must gather first."""
    layout = world.layout
    if layout.recompute == "none" and layout.compile == "none":
        return
    blocks = find_blocks(model)
    if layout.recompute != "none":
        recompute_blocks(model, blocks, layout.recompute)
    if layout.compile != "none":
        for name in blocks or [""]:
            model.get_submodule(name).compile()


def _place_norms(model: nn.Module, world: World, placement: Placement, batch_norm: Literal["global", "local"]) -> None:
    norms, threads = has_batch_norm(model), placement.threads
    if norms and batch_norm == "global" and world.layout.micro > 1:
        raise LayoutError(
            f"micro={world.layout.micro} would split the batch of the BatchNorm {norms[0]!r} and change the training: "
            "its statistics belong to the whole global batch. Drop micro=, replace BatchNorm by GroupNorm, or say "
            "in the job that statistics of each micro-batch are wanted: --set batch_norm=local"
        )
    if batch_norm == "local":
        placement.local_norms = norms
        if threads is not None:
            threads.local_norms = norms
        return
    placement.global_norms = globalise_batch_norm(model, world.data_side_group if threads is None else threads.scope)
    world.at_close(lambda: release_batch_norm(model))


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Clip the gradients of a placed model by their global norm, and return the norm before."""
    params = dict(model.named_parameters())
    norm = grad_norm(params, parts_of(model), placement_of(model).world)
    scale_gradients(params.values(), clip_factor(norm, max_norm))
    return norm


def placement_of(model: nn.Module) -> Placement:
    """How a model was placed.

    Raises:
        JobError: it was not.
    """
    placement = model.__dict__.get(_KEY)
    if placement is None:
        raise JobError("this model is not placed; call shoal.place(model, world) first.")
    return placement  # type: ignore[no-any-return]
