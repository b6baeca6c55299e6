"""How many bytes a checkpoint of a job takes: parameters, buffers and the optimizer's state, on shapes alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.job import Job


def checkpoint_bytes(name: str, fields: Mapping[str, Any]) -> int:
    """Of a job by its name; nothing is computed, and no memory of that size is taken.

    Raises:
        JobError: no such job, or a value that does not fit.
    """
    from shoal.job import load_job

    return bytes_of(load_job(name, fields))


def bytes_of(job: "Job") -> int:
    """Of a job: one step of its optimizer makes the state."""
    import torch
    from torch.utils._pytree import tree_leaves

    from shoal.dry import dry_run
    from shoal.job import Params

    with dry_run():
        model = job.model()
        optimizer = job.optimizer(Params(dict(model.named_parameters())))
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        optimizer.step()
        state = [leaf for leaf in tree_leaves(optimizer.state_dict()["state"]) if isinstance(leaf, torch.Tensor)]
        held = [*model.parameters(), *model.buffers(), *state]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)
