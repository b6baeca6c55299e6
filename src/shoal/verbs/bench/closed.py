"""What a step should send, by the textbook: to hold what was sent against.

    dp      all-reduce of the gradients in a ring: 2 (n-1)/n of them
    fsdp    every block gathered for its forward and for its backward, the rest once; gradients scattered: (n-1)/n each
    pp      what crosses the cut forward, and its gradients back; a weight in two stages, once each way

Sums of a few numbers (the loss, the norm, which parameters were used) are left out, and so is tp: what it sums depends
on the model's layers, and `shoal plan` tells it.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from shoal.parallel.blocks import find_blocks
from shoal.parallel.parts import local_of
from shoal.parallel.place import placement_of
from shoal.run import Run


def closed_form(run: Run) -> dict[str, int]:
    """Bytes that this rank sends in an optimizer step, by axis."""
    placement, sizes = placement_of(run.model), run.world.mesh.sizes
    own = _bytes(p for p in run.model.parameters() if p.requires_grad)
    found: dict[str, float] = {}
    if sizes["fsdp"] > 1:
        others = sizes["fsdp"] - 1
        found["fsdp"] = others * (_gathered(run) + own)
    if sizes["dp"] > 1:
        found["dp"] = 2 * (sizes["dp"] - 1) / sizes["dp"] * own
    if placement.pipeline is not None:
        stages, reduction = placement.pipeline.stages, placement.pipeline.reduction
        found["pp"] = sum(stage.sent_bytes() for stage in stages) + reduction.sent_bytes()
    return {axis: round(sent) for axis, sent in found.items()}


def _gathered(run: Run) -> int:
    """Bytes of this rank's shards, as often as they are gathered in a step."""
    layout, once = run.world.layout, _bytes(run.model.parameters())
    if layout.pp > 1:
        return once  # before the first micro-batch
    again = _bytes(p for name in find_blocks(run.model) for p in run.model.get_submodule(name).parameters())
    stays = layout.reshard is False or layout.zero == 2
    return once + (0 if stays else again * (2 * layout.micro - 1))


def _bytes(tensors: Iterable[Tensor | nn.Parameter]) -> int:
    return sum({id(t): local_of(t).nbytes for t in tensors}.values())
