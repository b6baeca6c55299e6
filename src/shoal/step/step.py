"""One optimizer step: the same for every layout. Silent: tensors in, tensors out.

forward + backward of each micro-batch, on the sum of the loss   (reduced once, in the last backward)
the sums and counts of all ranks, added                          (one small collective, behind backward where that
                                                                  has none of its own)
gradient norm -> one factor: divide by the global count, clip    (one multiplication)
finite on every rank? -> optimizer, schedule                     (all ranks together, or none)
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.additive import check_additive
from shoal.data import RankBatch
from shoal.data.order import split_evenly
from shoal.errors import JobError, NumericsError, WorldError
from shoal.job import Job, Scheduler, Sum
from shoal.parallel.clip import clip_factor, dense, grad_norm, scale_gradients
from shoal.parallel.norm import set_live
from shoal.parallel.parts import parts_of
from shoal.parallel.place import placement_of
from shoal.record import Phase
from shoal.step.forward import Forward, rounds
from shoal.step.seeds import seed_everything
from shoal.world import World
from shoal.world.desync import NO_SUMS, check_calls

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step left behind, equal on every rank; tensors stay where they are until logged."""

    step: int  # steps done, this one included
    loss: Tensor  # over the global batch
    count: Tensor  # what the loss was divided by: samples, or tokens
    grad_norm: Tensor  # before clipping
    lr: float
    num_samples: int
    skipped: str = ""  # why the update was left out; empty when it was made
    stop: bool = False  # some rank was asked to end


def _unwatched(phase: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def use_fused(optimizer: torch.optim.Optimizer) -> None:
    """Update all parameters in one kernel where torch has one: the same numbers to rounding, several times faster.

    Only where the job left the choice open, and where every parameter allows it (real floating point on CPU or CUDA).
    SGD is left alone: torch's fused one fails when a parameter gets its first gradient later than the others.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not all(param.is_floating_point() and param.device.type in ("cpu", "cuda") for param in params):
        return
    for group in optimizer.param_groups:
        if all(group.get(how) in (None, False) for how in ("foreach", "capturable", "differentiable", "fused")):
            group["fused"] = True


class Step:
    """Runs optimizer steps. `scaler` exists for fp16 alone; its scale is one state, equal on all ranks,
    because it is driven by gradients that are already reduced."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        world: World,
        *,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        usual_count: int = 1,
    ) -> None:
        self._job, self._model, self._world = job, model, world
        self._optimizer, self.scheduler = optimizer, scheduler
        self._forward = Forward(job, model, world)
        self._placement = placement_of(model)
        self._usual_count = usual_count  # of one sample: 1, or its tokens
        self._named = dict(model.named_parameters())
        self._params = list(self._named.values())
        self._parts = parts_of(model)
        self._checked = False
        self._has_late_calls = True  # some rank makes calls in its last backward: the sums come after it
        self._num_late = 1
        self.phase: Callable[[str], contextlib.AbstractContextManager[None]] = _unwatched
        self.scaler = torch.amp.GradScaler(world.device.type) if job.precision == "fp16" else None

    def __call__(self, batch: RankBatch, *, stop: bool = False) -> StepResult:
        """One optimizer step on this rank's part of the global batch of step `batch.step`.

        Args:
            stop: this rank was asked to end; `StepResult.stop` tells all ranks in the same step.

        Raises:
            NumericsError: the loss or a gradient is not finite, and the job says to stop. Weights are untouched.
        """
        seed_everything(self._job.seed, "step", batch.step, self._world.data_rank)
        self._optimizer.zero_grad(set_to_none=True)
        # A step that may be skipped must leave no trace, in running statistics either.
        may_skip = self._job.nonfinite == "skip" or self.scaler is not None
        buffers = [buffer.clone() for buffer in self._model.buffers()] if may_skip else []
        record = self._world.record
        if self._world.calls is not None:
            self._world.calls.ledger.step = batch.step + 1
        with self.phase("compute"), record.phase(Phase.COMPUTE):
            own, totals = self._forward_backward(batch, stop)
        with self.phase("update"), record.phase(Phase.UPDATE):
            result = self._update(batch, own, totals)
        if result.skipped:
            self._put_back(buffers)
        return result

    def _put_back(self, buffers: list[Tensor]) -> None:
        for buffer, before in zip(self._model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _forward_backward(self, batch: RankBatch, stop: bool) -> tuple[Tensor, Tensor]:
        """Backward of the loss *sum*; returns [value, count, stop, step, samples, late calls] of this rank, and of all
        ranks with the sums of `shoal.calls`."""
        if self._placement.global_norms:
            set_live(self._model, batch.num_samples > 0)
        # DDP divides by the number of ranks; the usual count brings magnitudes to those of a mean (fp16 needs it).
        # The one factor of `_update` makes it exact; it is 1, and costs nothing, where the count is the usual one.
        weight = self._world.num_data / (batch.num_global * self._usual_count)
        own = torch.tensor(
            [0.0, 0.0, stop, batch.step, batch.num_global, self._num_late],
            dtype=torch.float64,
            device=self._world.device,
        )
        started = None
        parts = rounds(batch, self._world)
        if self._placement.pipeline is not None or self._placement.threads is not None:
            run = self._in_threads if self._placement.pipeline is None else self._through_stages
            run(batch, parts, own, weight)
            parts = []
        for index, (part, live) in enumerate(parts):
            last = index == len(parts) - 1
            self._world.record.micro(index)
            with contextlib.nullcontext() if last else self._placement.accumulate():
                with self._placement.quiet_norms(live), self._same_buffers():
                    output, moved, loss = self._forward(part)
                self._check_once(output, moved)
                if live:
                    own[0] += loss.value.detach()
                    own[1] += loss.count
                if last and not self._has_late_calls:
                    started = self._start_totals(own)
                num_calls = self._num_calls
                self._backward(loss.value * (weight if live else 0.0), batch)
                self._num_late = self._num_calls - num_calls
        totals, work = started or self._start_totals(own)
        self._placement.settle()
        if work is not None:
            work.wait()
            # Ranks with the same samples count once; of a pipeline the last stage counts alone.
            totals[:2] /= self._world.size / self._world.num_data / self._world.layout.pp
        return own, totals

    def _through_stages(self, batch: RankBatch, parts: Sequence[tuple[Any, bool]], own: Tensor, weight: float) -> None:
        if self.scaler:
            self.scaler.scale(own[0].float())  # a scaler begins to be one with its first loss, which one stage has

        def on_output(number: int, output: Any, moved: Any, loss: Sum) -> Tensor:
            self._check_once(output, moved)
            live = parts[number][1]
            if live:
                own[0] += loss.value.detach()
                own[1] += loss.count
            value = loss.value * (weight if live else 0.0)
            self._check_has_gradient(value, batch)
            return self.scaler.scale(value) if self.scaler else value

        self._forward.through_stages(
            [part for part, _ in parts],
            on_output,
            has_backward=True,
            seed=functools.partial(self._seed_stage, batch),
            around=self._same_buffers,
        )
        self._checked = True  # in the stages that have no output too

    def _in_threads(self, batch: RankBatch, parts: Sequence[tuple[Any, bool]], own: Tensor, weight: float) -> None:
        def part(replica: nn.Module, number: int) -> Sum:
            output, moved, loss = self._forward(parts[number][0], replica)
            if number == 0:
                self._check_once(output, moved)
            self._backward(loss.value * weight, batch)
            return Sum(loss.value.detach(), loss.count)

        with self._same_buffers():
            for loss in self._each_in_a_thread(part, batch, len(parts)):
                own[0] += loss.value
                own[1] += loss.count

    def _each_in_a_thread(self, part: Callable[[nn.Module, int], T], batch: RankBatch, num: int) -> list[T]:
        """What `part` makes of each part of the batch, on a replica."""

        def told(replica: nn.Module, number: int) -> T:
            try:
                return part(replica, number)
            except Exception as error:
                ids = batch.sample_ids[slice(*split_evenly(0, batch.num_samples, num, number))]
                error.add_note(f"In replica {number + 1} of {num}, with the samples {', '.join(map(str, ids[:16]))}.")
                raise

        def seed(number: int) -> None:
            seed_everything(self._job.seed, "step", batch.step, number)  # as the data rank of that number would

        assert self._placement.threads is not None, "the layout has replicas in threads"
        return self._placement.threads.run(told, num, seed)

    def _seed_stage(self, batch: RankBatch, number: int, stage: int) -> None:
        """The random stream of a micro-batch: one for what all stages compute, one for each stage's own."""
        seed_everything(self._job.seed, "step", batch.step, self._world.data_rank, "micro", number, stage)

    @contextlib.contextmanager
    def _same_buffers(self) -> Iterator[None]:
        """Around the first forward of a run with several parts: a state that it moves would move once for each."""
        if self._checked or self._world.layout.num_parts == 1:
            yield
            return
        inside = tuple(f"{name}." for name in (*self._placement.local_norms, *self._placement.global_norms))
        before = {n: b.clone() for n, b in self._model.named_buffers() if not n.startswith(inside)}
        has_failed = False
        try:
            yield
        except Exception:
            has_failed = True
            raise
        finally:  # also where a stage of a pipeline has left the forward, its part done
            if not has_failed:
                self._compare_buffers(before)

    def _compare_buffers(self, before: Mapping[str, Tensor]) -> None:
        for name, buffer in self._model.named_buffers():
            if name in before and not torch.equal(buffer, before[name]):
                raise JobError(
                    f"the forward changes the buffer {name}, once for every micro-batch or replica, so "
                    f"{self._world.layout} would be another training. Drop micro= or the threads, or keep that state "
                    "out of the forward."
                )

    def _check_once(self, output: Any, batch: Any) -> None:
        """In a layout that cuts the batch, the first part shows whether the loss may be cut."""
        if self._checked:
            return
        self._checked = True
        if self._world.num_data * self._world.layout.num_parts > 1:
            what = f"{type(self._job).__name__}.loss()"
            check_additive(lambda o, b: {"loss": self._forward.loss(o, b)}, output, batch, what)

    @property
    def _num_calls(self) -> int:
        return 0 if self._world.calls is None else self._world.calls.ledger.num_calls

    def _start_totals(self, own: Tensor) -> tuple[Tensor, dist.Work | None]:
        sums = NO_SUMS if self._world.calls is None else self._world.calls.ledger.sums()
        totals = torch.cat([own, own.new_tensor(sums)])
        if self._world.kind != "real":
            return totals, None
        return totals, dist.all_reduce(totals, group=self._world.side_group, async_op=True)

    def _backward(self, value: Tensor, batch: RankBatch) -> None:
        self._check_has_gradient(value, batch)
        (self.scaler.scale(value) if self.scaler else value).backward()  # type: ignore[no-untyped-call]

    def _check_has_gradient(self, value: Tensor, batch: RankBatch) -> None:
        if not value.requires_grad:
            raise JobError(
                f"rank {self._world.rank}, step {batch.step + 1}: the loss depends on no trainable parameter. "
                "Is everything frozen, or was the output detached (.detach(), .item(), torch.no_grad())?"
            )

    def _update(self, batch: RankBatch, own: Tensor, totals: Tensor) -> StepResult:
        value, count, stop, step, samples, late, *sums = totals.unbind()
        if self.scaler:
            self.scaler.unscale_(self._optimizer)
        to_mean = batch.num_global * self._usual_count / count
        norm = grad_norm(self._named, self._parts, self._world).to(totals) * to_mean
        clip = self._job.clip_grad_norm
        factor = to_mean if clip is None else to_mean * clip_factor(norm, clip)
        lr = float(self._optimizer.param_groups[0]["lr"])
        if not math.isfinite(lr):
            raise JobError(f"the learning rate of step {batch.step + 1} is {lr}. No weight was changed by this step.")
        figures = self._world.read(torch.stack([value, count, norm, factor, stop, step, samples, late, *sums]))
        self._check_in_step(batch, figures)
        finite = figures is None or all(map(math.isfinite, figures))
        if finite:
            if figures is None or figures[3] != 1.0:
                scale_gradients(self._params, factor)
            self._advance()
        return StepResult(
            step=batch.step + 1,
            loss=value / count,
            count=count,
            grad_norm=norm,
            lr=lr,
            num_samples=batch.num_global,
            skipped="" if finite else self._not_finite(batch, own),
            stop=figures is not None and figures[4] > 0,
        )

    def _check_in_step(self, batch: RankBatch, figures: list[float] | None) -> None:
        """Every rank is in the same step, of the same global batch; else gradients of different steps were added."""
        size = self._world.size if self._world.kind == "real" else 1
        if figures is not None and figures[5:7] != [size * batch.step, size * batch.num_global]:
            raise WorldError(
                f"rank {self._world.rank} is in step {batch.step + 1} with a global batch of {batch.num_global} "
                "samples, but not every rank is. Did a rank catch an error and leave its step out, or does the data "
                "end elsewhere on some rank? Nothing of this step was kept."
            )
        if figures is not None and self._world.kind == "real":
            check_calls(self._world, figures[8:], batch.step + 1)
            self._has_late_calls = figures[7] > 0

    def _advance(self) -> None:
        if self.scaler:
            self.scaler.step(self._optimizer)
            self.scaler.update()
        else:
            self._optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _not_finite(self, batch: RankBatch, own: Tensor) -> str:
        """All ranks are here together: skip the update and say why, or stop."""
        if self.scaler:
            self._back_off(self.scaler)
            if self.scaler.get_scale() >= 1.0:
                return f"step {batch.step + 1} skipped: fp16 overflow; loss scale {self.scaler.get_scale():g}"
        culprits = self._blame(batch, own)
        if self._job.nonfinite == "skip":
            return f"step {batch.step + 1} skipped: {culprits}"
        raise NumericsError(
            f"step {batch.step + 1}: {culprits}. No weight was changed by this step. Look at these samples; lower "
            "the learning rate or clip the gradient (--set clip_grad_norm=1.0); or leave such steps out: "
            "--set nonfinite=skip"
        )

    @staticmethod
    def _back_off(scaler: torch.amp.GradScaler) -> None:
        """The scale of all ranks, also of those whose part of the gradient is finite."""
        before = scaler.state_dict()
        scaler.update()
        scaler.load_state_dict({**before, "scale": before["scale"] * before["backoff_factor"], "_growth_tracker": 0})

    def _blame(self, batch: RankBatch, own: Tensor) -> str:
        """Which rank, with which samples: the step once more, unreduced, so that gradients are each rank's own."""
        bad = [] if self._world.kind == "fake" else self._own_bad_gradients(batch)
        loss_is_finite = bool(own.isfinite().all())
        found = bool(batch.num_samples) and (bad or not loss_is_finite)
        told = {"ids": batch.sample_ids[:16], "bad": bad[:3], "loss": loss_is_finite} if found else {}
        rows = [json.loads(row) for row in self._world.gather_text(json.dumps(told))]
        return "; ".join(_verdict(rank, row) for rank, row in enumerate(rows) if row) or (
            "the loss counts nothing (its count is 0), or gradients that are finite on every rank overflow in the sum"
        )

    def _own_bad_gradients(self, batch: RankBatch) -> list[str]:
        """Parameters whose gradient is not finite on this rank alone. Every rank runs it: norms meet in there."""
        seed_everything(self._job.seed, "step", batch.step, self._world.data_rank)
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        self._optimizer.zero_grad(set_to_none=True)
        parts = [part for part, _ in rounds(batch, self._world)]
        with self._placement.accumulate():
            if self._placement.pipeline is not None:
                self._forward.through_stages(parts, lambda *made: made[-1].value, has_backward=True)
            elif self._placement.threads is not None:
                self._each_in_a_thread(
                    lambda replica, number: self._forward(parts[number], replica)[2].value.backward(),  # type: ignore[no-untyped-call]
                    batch,
                    len(parts),
                )
            else:
                for part in parts:
                    self._forward(part)[2].value.backward()  # type: ignore[no-untyped-call]
        own = self._placement.own_gradients()
        bad = [name for name, grad in own.items() if not bool(dense(grad).isfinite().all())]
        self._placement.forget()
        self._optimizer.zero_grad(set_to_none=True)
        self._put_back(buffers)
        return bad


def _verdict(rank: int, row: dict[str, Any]) -> str:
    what = f"the gradient of {', '.join(row['bad'])}" if row["loss"] else "the loss"
    return f"{what} is not finite on rank {rank} (samples {', '.join(map(str, row['ids']))})"
