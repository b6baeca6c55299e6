"""Known mistakes of pipelines, silent like the others: what users of torch's pipelining meet, and what is near it."""

from dataclasses import replace
from typing import Any

from torch import Tensor

import shoal.parallel.pipeline.stage
import shoal.step.step
from shoal.parallel.pipeline import Pipeline
from shoal.parallel.pipeline.reduce import LateReduction
from shoal.parallel.pipeline.schedule import Schedule
from shoal.parallel.pipeline.stage import Stage
from shoal.step import Step
from shoal.verbs.verify.plant import Mutant, Plant, after, local_norm, swapped

# -- micro-batches ---------------------------------------------------------------------------------------------


def _other_inputs() -> Plant:
    """The first stage works through the micro-batches in an order of its own."""

    def make(old: Any) -> Any:
        def run(self: Any, calls: Any, *args: Any, **options: Any) -> None:
            first = any(stage.is_first for stage in self.stages)
            old(self, list(calls)[::-1] if first else calls, *args, **options)

        return run

    return swapped(Pipeline, "run", make)


def _other_targets() -> Plant:
    """The last stage is one micro-batch ahead with the targets."""

    def make(old: Any) -> Any:
        def run(self: Any, calls: Any, on_output: Any, **options: Any) -> None:
            old(self, calls, lambda output, number: on_output(output, (number + 1) % len(calls)), **options)

        return run

    return swapped(Pipeline, "run", make)


def _stand_ins_counted() -> Plant:
    return swapped(shoal.step.step, "rounds", lambda old: lambda *given: [(part, True) for part, _ in old(*given)])


def _wiped() -> Plant:
    """A stage that is set up anew between micro-batches forgets the gradients so far (D057 in docs/cases.md)."""

    def make(old: Any) -> Any:
        def backward(self: Any, *args: Any, **options: Any) -> None:
            for param in self._params():
                param.grad = None
            old(self, *args, **options)

        return backward

    return swapped(Stage, "backward_one_chunk", make)


def _divided_again() -> Plant:
    """What torch's schedules do by default (scale_grads): right for a mean, wrong for a sum."""

    def divide(stage: Any, *_: Any) -> None:
        for param in stage._params():
            if param.grad is not None:
                param.grad /= len(stage._chunks)

    return swapped(Stage, "perform_reduce_grad", after(divide))


# -- what stages owe each other --------------------------------------------------------------------------------


def _tied_apart() -> Plant:
    return swapped(LateReduction, "_add_over_stages", lambda _: lambda self, grad, ranks: None)


def _last_stage_not_reduced() -> Plant:
    """DDP around a stage, under a schedule that takes backward apart: the last stage is never reduced."""

    def make(old: Any) -> Any:
        def average(self: Any, grads: Any) -> None:
            if self._world.mesh.coordinate(self._world.rank, "pp") + 1 < self._world.layout.pp:
                old(self, grads)

        return average

    return swapped(LateReduction, "_average", make)


def _no_gradient_back() -> Plant:
    def make(old: Any) -> Any:
        def send(self: Any, chunk: int) -> Any:
            for grad in self._leaving.get(("gradients", chunk), ()):
                if grad is not None:
                    grad.zero_()
            return old(self, chunk)

        return send

    return swapped(Stage, "get_bwd_send_ops", make)


def _narrow_messages() -> Plant:
    """What crosses from stage to stage is rounded to float32."""

    def rounded(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or not tensor.is_floating_point() else tensor.float().to(tensor.dtype)

    def make(old: Any) -> Any:
        return lambda tensors, *args: old([rounded(tensor) for tensor in tensors], *args)

    return swapped(shoal.parallel.pipeline.stage, "pack", make)


def _counted_in_each() -> Plant:
    def make(old: Any) -> Any:
        def norm(params: Any, parts: Any, world: Any) -> Any:
            return old(params, {name: replace(part, is_copy=False) for name, part in parts.items()}, world)

        return norm

    return swapped(shoal.step.step, "grad_norm", make)


# -- state -----------------------------------------------------------------------------------------------------


def _trial_forward() -> Plant:
    """A forward more in the first step, to find out what crosses, as torch's stages do it: BatchNorm counts it."""
    done: set[int] = set()

    def make(old: Any) -> Any:
        def run(self: Any, chunks: Any, on_output: Any, *, has_backward: bool) -> None:
            if has_backward and id(self) not in done:
                done.add(id(self))
                old(self, chunks, lambda *_: None, has_backward=False)
            old(self, chunks, on_output, has_backward=has_backward)

        return run

    return swapped(Schedule, "run", make)


def _one_stream_for_stages() -> Plant:
    def make(old: Any) -> Any:
        return lambda self, batch, micro, stage: old(self, batch, micro, min(stage, 0))  # -1 is what lies between

    return swapped(Step, "_seed_stage", make)


def _one_stream_for_micro() -> Plant:
    return swapped(Step, "_seed_stage", lambda old: lambda self, batch, micro, stage: old(self, batch, 0, stage))


STAGE_MUTANTS = (
    Mutant("the first stage takes other micro-batches", _other_inputs, "it is that of micro-batch 5", "pp2:micro=5"),
    Mutant("targets of another micro-batch", _other_targets, "each those of the next", "pp2:micro=5"),
    Mutant("stand-in micro-batches counted", _stand_ins_counted, "micro-batch 5 is counted 4 times", "pp2:micro=8"),
    Mutant("only the last micro-batch's gradient kept", _wiped, "micro-batch 5 of 5 alone", "pp2:micro=5"),
    Mutant("gradients of a stage divided again", _divided_again, "number of micro-batches", "pp2:micro=5"),
    Mutant("tied weight not reduced across stages", _tied_apart, "a sum over pp is missing", "pp2"),
    Mutant("last stage not reduced", _last_stage_not_reduced, "a mean over dp is missing", "pp2.dp2"),
    Mutant("no gradient to the stage before", _no_gradient_back, "no gradient comes back to stage 0", "pp2"),
    Mutant("activations cross in float32", _narrow_messages, "between stage 0 and stage 1", "pp2"),
    Mutant("a stage clips by its own norm", local_norm, "squares are not added up over pp", "pp2"),
    Mutant("tied weight counted in each stage", _counted_in_each, "is counted in each of them", "pp2"),
    Mutant("a trial forward moves statistics", _trial_forward, "were moved by 2 forwards", "pp2", job="pixels"),
    Mutant("the same dropout in all stages", _one_stream_for_stages, "stream of stage 0", "pp2"),
    Mutant("the same dropout in all micro-batches", _one_stream_for_micro, "stream of micro-batch 1", "pp2:micro=5"),
)
