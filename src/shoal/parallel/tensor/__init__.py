"""Tensor parallelism: layers cut by rows and columns, Megatron's way, on any module, without an edit to it.

The plan comes from the job, the model or Hugging Face, or is inferred from the module and one sample; either way each
region of it is proved on the live ranks before a training begins. Parameters are plain tensors: each rank's slice.
"""

from shoal.parallel.tensor.split import Sample, Split, split_tensors

__all__ = ["Sample", "Split", "split_tensors"]
