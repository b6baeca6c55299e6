"""One optimizer step, the same for every layout."""

from shoal.step.forward import DTYPES, Forward, call_of, on_device, rounds
from shoal.step.seeds import seed_everything
from shoal.step.step import Step, StepResult, use_fused

__all__ = [
    "DTYPES",
    "Forward",
    "Step",
    "StepResult",
    "call_of",
    "on_device",
    "rounds",
    "seed_everything",
    "use_fused",
]
