"""The proof that a model computes the same when it is cut into stages.

A pipeline runs the model's own Python, and Python can reach around anything: an object that blocks share, a number that
one keeps for another. So before the first step a copy of the model runs whole and a second one in stages, in float64,
on a sample, with weights moved away from special values: outputs and every gradient must agree, in two steps, of which
the second sees what the first has left behind.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from shoal.errors import LayoutError
from shoal.parallel.meeting import Streams
from shoal.parallel.parts import Part
from shoal.parallel.tensor.stream import Undropped
from shoal.parallel.wide import WIDTHS, draws, is_close, moved, tensors_in, weights, wide
from shoal.precision import Widened
from shoal.units import show_bytes
from shoal.world import World

Sample = tuple[tuple[Any, ...], dict[str, Any]]
_STEPS = 2
_MOST_BYTES = 2 << 30  # of the parameters of a model that is copied


@dataclass
class Answer:
    """Of one step: the outputs of every micro-batch, and the gradients by parameter."""

    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)


class Proof:
    """Made while the model is whole; `check` is called when it is known where it is cut.

    Attributes:
        left_out: why nothing is proved; empty where it is.
    """

    def __init__(self, model: nn.Module, sample: Sample, world: World) -> None:
        self._world, self._sample = world, sample
        self._whole: list[Answer] = []
        # As many micro-batches as a schedule asks for; where any number will do, two.
        layout = world.layout
        self._num_micro = min(2, layout.micro) if layout.num_stages == layout.pp else layout.micro
        streams = Streams()
        self.left_out = self._try_whole(model)
        streams.restore()

    def _try_whole(self, model: nn.Module) -> str:
        """The answers of the whole model, or why there are none."""
        if self._world.kind != "real" or any(param.device.type == "meta" for param in model.parameters()):
            return "there are no numbers yet"
        if (size := sum(param.nbytes for param in model.parameters())) > _MOST_BYTES:
            return f"two copies of {show_bytes(size)} would take too much memory; shoal verify proves a smaller one"
        why = "it draws random numbers"
        for width in WIDTHS:
            self._width = width
            try:
                self._copy = moved(model, width.dtype).train()
                if self._draws() and self._draws(in_training=False):
                    return why
                self._trains = self._copy.training
                self._whole = self._answers(copy.deepcopy(self._copy))
                return ""
            except Exception as error:  # the user's code, which may not run on a copy, or not so wide
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
        return why

    def _draws(self, *, in_training: bool = True) -> bool:
        """With its dropout off. One with BatchNorm, which would wait for the other data ranks, is not asked."""
        self._copy.train(in_training)
        if in_training and any(isinstance(module, _BatchNorm) for module in self._copy.modules()):
            return True
        with self._around():
            return draws(self._copy, [self._call()], in_training=in_training)

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        with Widened() if self._width.dtype == torch.float64 else contextlib.nullcontext(), Undropped():
            yield

    def _call(self) -> Sample:
        made: Sample = tree_map_only(Tensor, lambda t: wide(t, self._width.dtype).clone(), copy.deepcopy(self._sample))
        return made

    def _answers(self, model: nn.Module) -> list[Answer]:
        found = []
        for _ in range(_STEPS):
            answer = Answer()
            for number in range(self._num_micro):
                args, kwargs = self._call()
                with self._around(), torch.enable_grad():
                    loss = _loss(model(*args, **kwargs), number, answer)
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
            answer.grads = _taken(model)
            found.append(answer)
        return found

    def check(self, owner: Mapping[str, int]) -> str:
        """A line about what is proved; collective.

        Args:
            owner: the stage of every atom, of the model's own pipeline.

        Raises:
            LayoutError: in stages the copy computes something else; says what.
        """
        if why := next(filter(None, self._world.gather_text(self.left_out)), ""):
            return f"none: {why}"
        streams = Streams()
        wrong = self._wrong(owner)
        streams.restore()
        told = [text for text in self._world.gather_text(wrong) if text]
        if told:
            raise LayoutError(
                f"{self._world.layout}: in stages this model does not compute what it computes whole ({told[0]}; tried "
                "before the first step on copies, with two samples). Something of it reaches around what a pipeline "
                "sees: a number, a tensor or an object that one module keeps and another reads, or numbers that Python "
                "or numpy draw. Let modules return what others need, or take a layout without pp."
            )
        mode = "" if self._trains else ", in evaluation mode"
        return f"on two samples{mode}: outputs and gradients are those of the whole model ({self._width.dtype})"

    def _wrong(self, owner: Mapping[str, int]) -> str:
        """What this rank has seen to be another one; empty where nothing is."""
        from shoal.parallel.pipeline.pipeline import Pipeline  # which makes proofs

        model, self._copy = self._copy, nn.Module()
        stated = [[name for name, stage in owner.items() if stage == s] for s in range(self._world.layout.num_stages)]
        parts = {n: Part.whole(t.shape) for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        with self._around():
            pipeline = Pipeline(model, self._world, self._call(), stated=stated, is_trial=True)
            held = pipeline.cut(parts)
        wrong = ""
        for step, expected in enumerate(self._whole):
            answer = Answer()
            calls = [self._call() for _ in range(self._num_micro)]
            on_output = functools.partial(_loss, into=answer)
            pipeline.run(calls, on_output, has_backward=True, around=self._around)
            pipeline.settle()
            answer.grads = _taken(model)
            wrong = wrong or self._compared(answer, expected, held, step)
        pipeline.close()
        return wrong

    def _compared(self, ours: Answer, whole: Answer, held: Mapping[str, Part], step: int) -> str:
        """What differs, of what this rank has; empty where nothing does."""
        again = ", when it is called again" if step else ""
        for number, outputs in ours.outputs.items():
            pairs = zip(outputs, whole.outputs[number], strict=False)
            if len(outputs) != len(whole.outputs[number]) or not all(is_close(a, b, self._width) for a, b in pairs):
                return f"its output is another one{again}"
        for name, expected in whole.grads.items():
            if name in held and held[name].boxes and not is_close(ours.grads.get(name), expected, self._width):
                return f"the gradient of {name} is another one{again}"
        return ""


def _loss(output: Any, number: int, into: Answer) -> Tensor:
    """A sum in which every element of an output counts, differently."""
    floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    into.outputs[number] = [tensor.detach() for tensor in floats]
    trained = [(tensor * weights(tensor)).sum() for tensor in floats if tensor.requires_grad]
    return torch.stack(trained).sum() if trained else torch.zeros(())


def _taken(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: param.grad.to_dense() for name, param in model.named_parameters() if param.grad is not None}
    for param in model.parameters():
        param.grad = None
    return grads
