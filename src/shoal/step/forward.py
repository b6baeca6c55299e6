"""The model applied to a batch as the job says: inputs, precision, loss, micro-batches."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shoal.data import RankBatch
from shoal.errors import JobError
from shoal.job import Job, Sum
from shoal.parallel.place import placement_of
from shoal.precision import Widened
from shoal.world import World

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def rounds(batch: RankBatch, world: World, most: int | None = None) -> list[tuple[Any, bool]]:
    """The micro-batches of a rank and whether each is live: as many on every rank, since ranks may meet in a forward.

    A rank with fewer samples than rounds, or with none, fills up with stand-ins, which count nothing; so do all ranks
    of a pipeline that trains, whose schedule is made for one number of micro-batches.

    Args:
        most: into how many parts a batch is cut where it does not train; else it is for the layout to say.
    """
    live = batch.num_samples > 0
    is_fixed = most is None and world.layout.pp > 1
    most = world.layout.num_parts if most is None else most
    if not is_fixed:
        most = min(most, -(-batch.num_global // world.num_data))
    own = [(part, live) for part in batch.micro]
    return own + [(batch.micro[-1], False)] * (most - len(own))


def on_device(batch: Any, job: Job, world: World) -> Any:
    """A batch where the model is; its numbers as wide as the model's in a float64 run."""

    def move(tensor: Tensor) -> Tensor:
        wide = job.precision == "fp64" and tensor.is_floating_point()
        return tensor.to(world.device, torch.float64 if wide else None, non_blocking=True)

    return tree_map_only(Tensor, move, batch)


def call_of(job: Job, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with for a batch: positions and keywords."""
    inputs = job.inputs(batch)
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


class Forward:
    """The model applied as the job says: precision, inputs, loss; shared by training and evaluation."""

    def __init__(self, job: Job, model: nn.Module, world: World) -> None:
        self._job, self._model, self._world = job, model, world
        self._half = DTYPES[job.precision] if job.precision in ("bf16", "fp16") else None

    def __call__(self, batch: Any, replica: nn.Module | None = None) -> tuple[Any, Any, Sum]:
        """Returns (output, batch on the device, loss); raises JobError for a loss that is no Sum.

        Args:
            replica: in the place of the model.
        """
        batch = on_device(batch, self._job, self._world)
        with self.autocast():
            args, kwargs = call_of(self._job, batch)
            output = (self._model if replica is None else replica)(*args, **kwargs)
        return output, batch, self.loss(output, batch)

    def through_stages(
        self,
        parts: Sequence[Any],
        on_output: Callable[[int, Any, Any, Sum], Any],
        *,
        has_backward: bool,
        seed: Callable[[int, int], None] | None = None,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """The same in a pipeline, for all micro-batches of a rank; collective.

        Args:
            on_output: called in the last stage with the number of the micro-batch and what `__call__` returns; gives
                what backward begins with.
            around: put around every forward of a stage.
        """
        pipeline = placement_of(self._model).pipeline
        assert pipeline is not None, "the layout has an axis pp"
        batches = [on_device(part, self._job, self._world) for part in parts]

        @contextlib.contextmanager
        def around_both() -> Iterator[None]:
            with self.autocast(), around():
                yield

        pipeline.run(
            [call_of(self._job, batch) for batch in batches],
            lambda output, number: on_output(number, output, batches[number], self.loss(output, batches[number])),
            has_backward=has_backward,
            around=around_both,
            **({} if seed is None else {"seed": seed}),
        )

    def loss(self, output: Any, batch: Any) -> Sum:
        """The job's loss, under its precision; raises JobError where it is no Sum."""
        with self.autocast():
            return _checked(self._job.loss(output, batch), type(self._job).__name__)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the job, around a forward."""
        if self._job.precision == "fp64":
            return Widened()
        if self._half is None:
            return contextlib.nullcontext()
        # Its cache of weights is one for all threads, and whoever is done first empties it.
        return torch.autocast(self._world.device.type, self._half, cache_enabled=self._world.layout.threads == 1)


def _checked(loss: object, job: str) -> Sum:
    if not isinstance(loss, Sum):
        raise JobError(
            f"{job}.loss() returned {type(loss).__name__}, not a Sum(value, count). A mean cannot be put together "
            "again over ranks: return mean_loss(F.cross_entropy(output, target, reduction='none')), "
            "token_loss(logits, targets), or Sum(value, count)."
        )
    if not isinstance(loss.value, Tensor) or loss.value.dim() != 0:
        shape = tuple(loss.value.shape) if isinstance(loss.value, Tensor) else type(loss.value).__name__
        raise JobError(f"{job}.loss() returned a Sum whose value is {shape}; it must be a 0-dim tensor: add it up.")
    counts = loss.count
    if not isinstance(counts, Tensor | int | float) or (isinstance(counts, Tensor) and counts.requires_grad):
        what = "depends on parameters" if isinstance(counts, Tensor) else f"is {type(counts).__name__}"
        raise JobError(
            f"{job}.loss() returned a Sum whose count {what}; it must be a plain number of samples, tokens or weights."
        )
    return loss
