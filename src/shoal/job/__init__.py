"""What is trained (`job`), how a name becomes one (`load`), and how text becomes its fields (`fields`)."""

from shoal.job.fields import with_fields
from shoal.job.job import (
    Job,
    Params,
    Precision,
    Scheduler,
    Sum,
    check_job,
    identity,
    mean_loss,
    scale_lr,
    token_loss,
)
from shoal.job.load import BUILT_IN, load_job, preset_of

__all__ = [
    "BUILT_IN",
    "Job",
    "Params",
    "Precision",
    "Scheduler",
    "Sum",
    "check_job",
    "identity",
    "load_job",
    "mean_loss",
    "preset_of",
    "scale_lr",
    "token_loss",
    "with_fields",
]
