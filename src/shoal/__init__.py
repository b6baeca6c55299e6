"""Train any PyTorch module on many devices as if it were one.

    import shoal
    shoal.train("digits", "dp2")

The names below are loaded on first use: `import shoal` alone imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data import share as share
    from shoal.job import Job as Job
    from shoal.job import Sum as Sum
    from shoal.job import mean_loss as mean_loss
    from shoal.job import token_loss as token_loss
    from shoal.parallel.place import clip_grad_norm_ as clip_grad_norm_
    from shoal.parallel.place import place as place
    from shoal.run import assemble as assemble
    from shoal.verbs.train import train as train
    from shoal.world import World as World

__version__ = "0.1.0"

_FACE = {
    "Job": "shoal.job",
    "Sum": "shoal.job",
    "World": "shoal.world",
    "assemble": "shoal.run",
    "clip_grad_norm_": "shoal.parallel.place",
    "mean_loss": "shoal.job",
    "place": "shoal.parallel.place",
    "share": "shoal.data",
    "token_loss": "shoal.job",
    "train": "shoal.verbs.train",
}
__all__ = list(_FACE)


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(importlib.import_module(_FACE[name]), name)


def __dir__() -> list[str]:
    return sorted(_FACE)
