"""How many bytes a job takes: a checkpoint (parameters, buffers, optimizer state), and what loader workers hold."""

from typing import TYPE_CHECKING, Any

from shoal.layout import Layout

if TYPE_CHECKING:
    from shoal.job import Job

_AHEAD = 3  # batches of a loader worker: two that it has ready, and one in use


def checkpoint_bytes(job: "Job") -> int:
    """One step of the optimizer makes the state; nothing is computed, and no memory of that size is taken."""
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


def loader_bytes(job: "Job", layout: Layout, ranks_per_host: int) -> int:
    """In the shared memory of one host; 0 without loader workers, or where no sample can be looked at alone."""
    if layout.workers == 0:
        return 0
    import torch
    from torch.utils._pytree import tree_leaves

    data: Any = job.data()
    if not hasattr(data, "__getitem__"):  # a stream, whose samples come in order only
        return 0
    leaves = [leaf for leaf in tree_leaves(job.collate([data[0]])) if isinstance(leaf, torch.Tensor)]
    sample_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    batch_bytes = sample_bytes * -(-job.batch_size // layout.num_data)
    return batch_bytes * _AHEAD * layout.workers * ranks_per_host
