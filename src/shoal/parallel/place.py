"""A mesh and a model -> the placed model: the one function that knows the order in which a model is spread."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from shoal.errors import JobError, LayoutError
from shoal.parallel.norm import globalise_batch_norm, has_batch_norm, release_batch_norm
from shoal.parallel.replicate import Replica, check_no_hooks, check_replicable
from shoal.world import World

_KEY = "_shoal_placement"


@dataclass
class Placement:
    """How a model was spread; kept beside its parameters, never among them."""

    world: World
    global_norms: list[str] = field(default_factory=list)
    local_norms: list[str] = field(default_factory=list)
    replica: Replica | None = None
    model: nn.Module | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placement":
        return Placement(self.world)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Within: gradients add up on this rank and are not reduced."""
        return self.replica.accumulate() if self.replica else contextlib.nullcontext()

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


def place(model: nn.Module, world: World, *, batch_norm: Literal["global", "local"] = "global") -> nn.Module:
    """Spread a model over a world; it stays the same module, with the same parameter names.

    After it, `loss.backward()` leaves the mean over the data ranks of each rank's gradient in `.grad`.
    Order (an invariant; later axes join in here): statistics over the global batch, then replication.

    Raises:
        LayoutError: the layout would split a BatchNorm batch into micro-batches.
        JobError: the model is placed already, or has parameters without a shape.
    """
    world.layout.require_available()
    if _KEY in model.__dict__:
        raise JobError("this model is placed already; place it once, and build a new one for another world.")
    check_replicable(model)
    if world.num_data * world.layout.micro > 1:
        check_no_hooks(model)
    norms = has_batch_norm(model)
    if norms and batch_norm == "global" and world.layout.micro > 1:
        raise LayoutError(
            f"micro={world.layout.micro} would split the batch of the BatchNorm {norms[0]!r} and change the training: "
            "its statistics belong to the whole global batch. Drop micro=, replace BatchNorm by GroupNorm, or say "
            "in the job that statistics of each micro-batch are wanted: --set batch_norm=local"
        )
    placement = Placement(world, model=model)
    if batch_norm == "global":
        placement.global_norms = globalise_batch_norm(model, world.side_group)
        world.at_close(lambda: release_batch_norm(model))
    else:
        placement.local_norms = norms
    if world.kind != "lone":
        placement.replica = Replica(model, world)
    model.__dict__[_KEY] = placement  # not setattr: nothing of ours may look like a part of the module
    return model


def placement_of(model: nn.Module) -> Placement:
    """How a model was placed.

    Raises:
        JobError: it was not.
    """
    placement = model.__dict__.get(_KEY)
    if placement is None:
        raise JobError("this model is not placed; call shoal.place(model, world) first.")
    return placement  # type: ignore[no-any-return]
