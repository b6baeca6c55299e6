"""One stage, as torch's schedules know it: what a micro-batch is, what is sent, how backward is run.

torch's schedules say when each action runs and in which order tensors are sent; this class says what the actions are.
What crosses from stage to stage is one message per micro-batch and direction, of the size that the program states, so
that micro-batches may differ in shape, and a value without gradient is told from one whose gradient is zero.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from shoal.parallel.pipeline.backward import first_half, whole
from shoal.parallel.pipeline.message import message_bytes, pack, unpack
from shoal.parallel.pipeline.program import Cut, Meta, Program


@dataclass(frozen=True)
class Plan:
    """What the forward of one micro-batch does, and where."""

    program: Program
    cut: Cut
    likenesses: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # by stage: see StageWalk

    def entering(self, stage: int) -> list[Meta]:
        """What a stage is sent."""
        return [self.program.values[value] for value in self.cut.enters[stage]]

    def leaving(self, stage: int) -> list[Meta]:
        """What it sends."""
        return [self.program.values[value] for value in self.cut.leaves(stage)]


@dataclass(frozen=True)
class Chunk:
    """A micro-batch: what its forward does, and what the model is called with."""

    plan: Plan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int


class Stage(_PipelineStageBase):
    """A stage of this rank.

    Args:
        run: runs the forward: (stage, chunk, values received) -> the model's output in the last stage, else the
            tensors that leave.
        params: gives its parameters, as they are while it runs.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        run: Callable[[int, Chunk, list[Tensor]], Any],
        params: Callable[[], list[nn.Parameter]],
    ) -> None:
        super().__init__(nn.Module(), index, num_stages, device, group)  # an empty module: what runs is ours
        self._run, self._params = run, params
        self._chunks: Sequence[Chunk] = ()
        self._inbox: dict[tuple[str, int], Tensor] = {}  # messages that are on the way
        self._local: dict[tuple[str, int], list[Tensor | None]] = {}  # from a stage of this rank
        self._alive: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # outputs and inputs, until their backward
        self._leaving: dict[tuple[str, int], list[Tensor | None]] = {}
        self._halfway: dict[int, Callable[[], Any]] = {}  # what is left of a backward that was split
        # Of the last step: what, which micro-batch, begin and end as time.time() tells them.
        self.spans: list[tuple[str, int, float, float]] = []

    def begin(self, chunks: Sequence[Chunk], *, has_backward: bool) -> None:
        """Before a step over these micro-batches."""
        self._chunks, self.has_backward, self.chunks = chunks, has_backward, len(chunks)
        self.spans = []
        for kept in (self._inbox, self._local, self._alive, self._leaving, self._halfway):
            kept.clear()  # of a step that failed

    def sent_bytes(self) -> int:
        """What it has sent to other ranks in the last step."""
        here, plans = self.stage_index, [chunk.plan for chunk in self._chunks]
        sent = 0
        if not self.is_last and self._resolve_peer_global_rank(here + 1) != dist.get_rank():
            sent += sum(message_bytes(plan.leaving(here)) for plan in plans)
        if not self.is_first and self._resolve_peer_global_rank(here - 1) != dist.get_rank():
            sent += sum(message_bytes(self._with_gradient(plan.entering(here))) for plan in plans)
        return sent

    # -- messages ------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The values that come from the stage before."""
        metas = [] if self.is_first else self._plan(fwd_chunk_id).entering(self.stage_index)
        return self._receive("values", fwd_chunk_id, metas, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The gradients that come from the stage after."""
        metas = self._with_gradient(self._plan(bwd_chunk_id).leaving(self.stage_index)) if self.has_backward else []
        return self._receive("gradients", bwd_chunk_id, metas, self.stage_index + 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The values that go to the stage after."""
        return self._send(
            "values", fwd_chunk_id, self._plan(fwd_chunk_id).leaving(self.stage_index), self.stage_index + 1
        )

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The gradients that go to the stage before."""
        metas = self._with_gradient(self._plan(bwd_chunk_id).entering(self.stage_index)) if self.has_backward else []
        return self._send("gradients", bwd_chunk_id, metas, self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Values of a stage of this rank."""
        self._local["values", mb_index] = [tensor.detach() for tensor in prev_stage_outputs]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Gradients for a stage of this rank."""
        return tuple(self._leaving.pop(("gradients", mb_index), ()))

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Gradients of a stage of this rank."""
        self._local["gradients", mb_index] = list(next_stage_bwd_outputs)

    def _receive(self, what: str, chunk: int, metas: Sequence[Meta], stage: int) -> list[dist.P2POp]:
        if not metas:
            return []
        message = torch.empty(message_bytes(metas), dtype=torch.uint8, device=self.device)
        self._inbox[what, chunk] = message
        return [dist.P2POp(dist.irecv, message, self._resolve_peer_global_rank(stage), self.group)]

    def _send(self, what: str, chunk: int, metas: Sequence[Meta], stage: int) -> list[dist.P2POp]:
        tensors = self._leaving.pop((what, chunk), [])
        if not metas:
            return []
        message = pack(tensors, metas, self.device)
        return [dist.P2POp(dist.isend, message, self._resolve_peer_global_rank(stage), self.group)]

    def _taken(self, what: str, chunk: int, metas: Sequence[Meta]) -> list[Tensor | None]:
        if (what, chunk) in self._local:
            return self._local.pop((what, chunk))
        return unpack(self._inbox.pop((what, chunk)), metas, all_there=what == "values") if metas else []

    @staticmethod
    def _with_gradient(metas: Sequence[Meta]) -> list[Meta]:
        return [meta for meta in metas if meta.requires_grad]

    def _plan(self, chunk: int) -> Plan:
        return self._chunks[chunk].plan

    # -- actions -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, what: str, chunk: int) -> Iterator[None]:
        began = time.time()
        yield
        self.spans.append((what, chunk, began, time.time()))

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """The forward of one micro-batch."""
        metas = [] if self.is_first else self._plan(fwd_chunk_id).entering(self.stage_index)
        inputs: list[Tensor] = []
        for tensor, meta in zip(self._taken("values", fwd_chunk_id, metas), metas, strict=True):
            assert tensor is not None, "every value is sent"
            inputs.append(tensor.requires_grad_(meta.requires_grad and self.has_backward))
        with torch.enable_grad() if self.has_backward else torch.no_grad(), self._timed("F", fwd_chunk_id):
            outputs = self._run(self.stage_index, self._chunks[fwd_chunk_id], inputs)
        if not self.is_last:
            self._leaving["values", fwd_chunk_id] = list(outputs)
        if self.has_backward:
            self._alive[fwd_chunk_id] = ([] if self.is_last else list(outputs), inputs)
        return outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward of one micro-batch, in full, or of the inputs alone."""
        if not self.has_backward:
            return
        outputs, inputs = self._alive.pop(bwd_chunk_id)
        grads: list[Tensor | None] = [torch.ones_like(loss)] if self.is_last else []
        if self.is_last:
            outputs = [loss]
        else:
            leaving = self._plan(bwd_chunk_id).leaving(self.stage_index)
            outputs = [tensor for tensor, meta in zip(outputs, leaving, strict=True) if meta.requires_grad]
            grads = self._taken("gradients", bwd_chunk_id, self._with_gradient(leaving))
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        used = [(tensor, grad) for tensor, grad in zip(outputs, grads, strict=True) if grad is not None]
        with self._timed("B" if full_backward else "I", bwd_chunk_id):
            if full_backward:
                whole(used)
            else:
                self._halfway[bwd_chunk_id] = first_half(used, wanted, self._params)
        if self.is_last and wanted:
            loss.detach_()  # torch's schedule keeps it to the end of the step; its graph would keep what was received
        self._leaving["gradients", bwd_chunk_id] = [tensor.grad for tensor in wanted]
        for tensor in wanted:
            tensor.grad = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The part of a backward that was left: the gradients of the weights."""
        if self.has_backward:
            with self._timed("W", bwd_chunk_id):
                self._halfway.pop(bwd_chunk_id)()

    # -- what torch does and shoal does elsewhere -----------------------------------------------------------

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: gradients are sums, and are reduced when the step is over."""

    def clear_runtime_states(self) -> None:
        """Nothing: `begin` does."""

    def _prepare_forward_infra(self, *unused: Any, **named: Any) -> None:
        """Nothing: the program says what is sent."""

    def _prepare_backward_infra(self, *unused: Any, **named: Any) -> None:
        """Nothing."""

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        return ()
