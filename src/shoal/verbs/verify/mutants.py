"""Known mistakes of parallel training, each silent in itself: the loss falls, the run ends well, the model is another.

Each is planted into real processes of a layout, while the reference is healthy.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal.data.reader
import shoal.job
import shoal.parallel.place
import shoal.step.step
from shoal.job import Sum
from shoal.parallel.parts import local_of
from shoal.parallel.replicate import Replica
from shoal.parallel.tensor import peers, split, styles
from shoal.run import Run
from shoal.step import Forward, Step
from shoal.verbs.verify.plant import ASSEMBLY, Mutant, Plant, Posing, after, local_norm, swapped
from shoal.verbs.verify.stage_mutants import STAGE_MUTANTS

# -- loss ------------------------------------------------------------------------------------------------------


def _loss(change: Callable[[Any, Sum], Sum]) -> Callable[[], Plant]:
    """The job's loss on each rank becomes another one."""
    return lambda: swapped(Forward, "loss", lambda old: lambda self, o, b: change(self, old(self, o, b)))


def _mean_of_means(_: Any, loss: Sum) -> Sum:
    return Sum(loss.value / loss.count, 1.0)


def _sum_not_mean(_: Any, loss: Sum) -> Sum:
    return Sum(loss.value, 1.0)


def _divided_twice(forward: Any, loss: Sum) -> Sum:
    return Sum(loss.value / forward._world.layout.micro, loss.count)


def _times_processes(_: Any, loss: Sum) -> Sum:
    return Sum(loss.value * dist.get_world_size(), loss.count)


def _world_for_data() -> Plant:
    def make(old: Any) -> Any:
        return lambda self, value, batch: old(self, value * (self._world.size / self._world.num_data), batch)

    return swapped(Step, "_backward", make)


# -- gradient --------------------------------------------------------------------------------------------------


def _not_reduced() -> Plant:
    def make(old: Any) -> Any:
        def before_forward(self: Any, *args: Any) -> Any:
            self._syncing = False
            return old(self, *args)

        return before_forward

    return swapped(Replica, "_before_forward", make)


def _reduced_twice() -> Plant:
    def add_up(placement: Any) -> None:
        for param in placement.model.parameters():
            if param.grad is not None:
                dist.all_reduce(local_of(param.grad), group=placement.world.data_group)

    return swapped(shoal.parallel.place.Placement, "settle", after(add_up))


def _last_micro_batch() -> Plant:
    def make(old: Any) -> Any:
        def backward(self: Any, value: Tensor, batch: Any) -> None:
            self._optimizer.zero_grad(set_to_none=True)
            old(self, value, batch)

        return backward

    return swapped(Step, "_backward", make)


def _tied_not_reduced() -> Plant:
    def make(old: Any) -> Any:
        def wrap(replica: Any) -> Any:
            leave_out: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            leave_out(replica._model, ["token.weight", "head.weight"])
            return old(replica)

        return wrap

    return swapped(Replica, "_wrap", make)


def _placed(sabotage: Callable[[nn.Module, Any], None]) -> Callable[[], Plant]:
    """After placement, which proves each tensor-parallel region before it takes it."""

    def make(old: Any) -> Any:
        def place(model: nn.Module, world: Any, **options: Any) -> nn.Module:
            placed: nn.Module = old(model, world, **options)
            sabotage(placed, world)
            return placed

        return place

    return lambda: swapped(ASSEMBLY, "place", make)


def _untie(model: nn.Module, world: Any) -> None:
    head = model.get_submodule("head")
    head.weight = nn.Parameter(model.get_parameter("head.weight").detach().clone())


def _norm_not_reduced() -> Plant:
    return swapped(split.Split, "settle", lambda _: lambda self: None)


def _bias_on_every_rank(model: nn.Module, world: Any) -> None:
    def forward(layer: Any, x: Tensor) -> Tensor:
        _, group = layer.__dict__["_shoal_cut"]
        out: Tensor = group.leave(F.linear(x, layer.weight, layer.bias))
        return out

    for module in model.modules():
        if isinstance(module, styles._Row):
            module.forward = forward.__get__(module)


def _heads_scaled_by_rank() -> Plant:
    """The scale comes from the width of all heads of the rank instead of one head's."""

    def attention(before: Any) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            out: Tensor = before(q, k, v, scale=(q.shape[1] * q.shape[-1]) ** -0.5, **options)
            return out

        return attend

    return _in_steps(lambda: swapped(F, "scaled_dot_product_attention", attention))


def _in_steps(plant: Callable[[], Plant]) -> Plant:
    """Not while the model is placed: each tensor-parallel region is proved before it is taken."""

    def make(old: Any) -> Any:
        def step(self: Any, *args: Any, **options: Any) -> Any:
            with plant():
                return old(self, *args, **options)

        return step

    return swapped(Step, "__call__", make)


def _no_sum_in_backward() -> Plant:
    """Megatron's f without its all-reduce."""
    alone = staticmethod(lambda ctx, grad: (grad.clone(), None))
    return _in_steps(lambda: swapped(peers._Enter, "backward", lambda _: alone))


def _replicas_counted() -> Plant:
    def make(old: Any) -> Any:
        def norm(params: Any, parts: Any, world: Any) -> Tensor:
            own = [local_of(p.grad) for p in params.values() if p.grad is not None]
            square = torch.nn.utils.get_total_norm(own).square()
            dist.all_reduce(square, group=world.side_group)
            return square.sqrt()

        return norm

    return swapped(shoal.step.step, "grad_norm", make)


def _own_batch_norm() -> Plant:
    return swapped(shoal.parallel.place, "globalise_batch_norm", lambda old: lambda model, group: old(model, None))


def _shards_summed() -> Plant:
    def double(_: Any, *, output_tensor: Tensor, **options: Any) -> None:
        output_tensor *= 2

    return swapped(_direct().DirectReduce, "__call__", after(double))


def _stale_weights() -> Plant:
    """A gather that brings the weights of the first step for ever."""
    kept: dict[int, tuple[Any, Tensor]] = {}

    def make(old: Any) -> Any:
        def gather(self: Any, *, output_tensor: Tensor, **options: Any) -> None:
            old(self, output_tensor=output_tensor, **options)
            output_tensor.copy_(kept.setdefault(id(self), (self, output_tensor.clone()))[1])

        return gather

    return swapped(_direct().DirectGather, "__call__", make)


def _direct() -> Any:
    return import_module("shoal.parallel.direct")  # it needs the inside of torch, which other runs need not load


# -- data --------------------------------------------------------------------------------------------------------


def _same_shard() -> Plant:
    def make(old: Any) -> Any:
        return lambda data, world, **options: old(data, Posing(world, data_rank=0), **options)

    return swapped(ASSEMBLY, "share", make)


def _forgotten_epoch() -> Plant:
    def make(old: Any) -> Any:
        return lambda num, seed, epoch, start, stop, **how: old(num, seed, 0, start, stop, **how)

    return swapped(shoal.data.reader, "sample_order", make)


@contextlib.contextmanager
def _dropped_tail() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for room in ("shoal.data.plan", "shoal.data.share"):  # as an attribute, `shoal.data.share` is the function
            stack.enter_context(swapped(sys.modules[room], "count_steps", lambda _: lambda num, size: num // size))
        yield


# -- state -------------------------------------------------------------------------------------------------------


def _early_optimizer() -> Plant:
    """It updates the tensors that the model had before it was placed."""

    def make(old: Any) -> Any:
        def advance(self: Any) -> None:
            groups = self._optimizer.param_groups
            live = [group["params"] for group in groups]
            for group in groups:
                group["params"] = [_stale(param) for param in group["params"]]
            old(self)
            for group, params in zip(groups, live, strict=True):
                group["params"] = params
            self._optimizer.state.clear()

        return advance

    return swapped(Step, "_advance", make)


def _stale(param: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(local_of(param.detach()).clone())
    copy.grad = None if param.grad is None else local_of(param.grad).clone()
    return copy


def _stale_schedule() -> Plant:
    def forget(step: Any, *_: Any, **__: Any) -> None:
        step.scheduler = None

    return swapped(Step, "__init__", after(forget))


def _schedule_not_restored() -> Plant:
    def start_anew(run: Any, *_: Any) -> None:
        fresh = run.job.scheduler(run.job.optimizer(shoal.job.Params({"x": nn.Parameter(torch.zeros(1))})))
        if fresh is not None:
            lr = fresh.optimizer.param_groups[0]["lr"]
            for group in run.optimizer.param_groups:
                group["lr"] = lr

    return swapped(Run, "_resume", after(start_anew))


def _moments_not_restored() -> Plant:
    return swapped(Run, "_resume", after(lambda run, *_: run.optimizer.state.clear()))


def _randomness_not_restored() -> Plant:
    """The streams count steps from the start of the process."""
    first: list[int] = []

    def begin(_: Any, *__: Any, **___: Any) -> None:
        first.clear()

    def seed(old: Any) -> Any:
        def seeded(*parts: Any) -> None:
            if parts[1:2] == ("step",):
                first.append(parts[2])
                parts = (parts[0], "step", parts[2] - first[0], *parts[3:])
            old(*parts)

        return seeded

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with swapped(Step, "__init__", after(begin)), swapped(shoal.step.step, "seed_everything", seed):
            yield

    return both()


def _same_dropout() -> Plant:
    def make(old: Any) -> Any:
        return lambda *parts: old(*parts[:-1], 0) if parts[1:2] == ("step",) else old(*parts)

    return swapped(shoal.step.step, "seed_everything", make)


def _one_rank_changes() -> Plant:
    def nudge(step: Any) -> None:
        if step._world.rank == 1:
            with torch.no_grad():
                local_of(step._params[0]).add_(1e-6)

    return swapped(Step, "_advance", after(nudge))


MUTANTS = (
    # loss
    Mutant("mean of means over ragged ranks", _loss(_mean_of_means), "mean of the ranks' means"),
    Mutant("sum of the losses where a mean belongs", _loss(_sum_not_mean), "mean of the ranks' sums"),
    Mutant("divided by the micro-batches twice", _loss(_divided_twice), "number of micro-batches", "dp2:micro=2"),
    Mutant("loss times the number of processes", _loss(_times_processes), "twice the reference"),
    Mutant("world size for the size of the data axes", _world_for_data, "number of processes", "dp2.tp2"),
    # gradient
    Mutant("gradients not reduced", _not_reduced, "a mean over dp is missing"),
    Mutant("gradients reduced twice", _reduced_twice, "summed over dp once too often"),
    Mutant("gradient of the last micro-batch alone", _last_micro_batch, "micro-batch 2 of 2 alone", "dp2:micro=2"),
    Mutant("tied weight not reduced", _tied_not_reduced, "token.weight on rank 0"),
    Mutant("tied weights come apart", _placed(_untie), "head.weight, which is the same parameter"),
    Mutant("norm in a split region not reduced", _norm_not_reduced, "a sum over tp is missing", "tp2"),
    Mutant("row-parallel bias on every rank", _placed(_bias_on_every_rank), "its bias is added 2 times", "tp2"),
    Mutant("heads scaled by the rank's width", _heads_scaled_by_rank, "the output of blocks.0.attention", "tp2"),
    Mutant("no sum in backward before a split", _no_sum_in_backward, "the gradient of", "tp2"),
    Mutant("clipped by a local norm", local_norm, "each rank takes the norm of what it holds", "tp2"),
    Mutant("clipped by the norm of a shard", local_norm, "each rank takes the norm of what it holds", "fsdp2"),
    Mutant("norm counts replicas", _replicas_counted, "counted 2 times"),
    Mutant("norm counts replicas beside parts", _replicas_counted, "replicated over tp is counted 2 times", "tp2"),
    Mutant("gradients of shards summed", _shards_summed, "summed over fsdp once too often", "fsdp2"),
    Mutant("weights gathered once for ever", _stale_weights, "in step 2", "fsdp2"),
    Mutant("BatchNorm not synchronised", _own_batch_norm, "each rank normalises its own samples", job="pixels"),
    # data
    Mutant("the same shard on all ranks", _same_shard, "ranks share samples"),
    Mutant("forgotten epoch", _forgotten_epoch, "of another step"),
    Mutant("dropped tail", _dropped_tail, "are of another step"),
    # state
    Mutant("optimizer built before placement", _early_optimizer, "it holds other tensors than the model", "fsdp2"),
    Mutant("schedule never advanced", _stale_schedule, "the schedule was not advanced"),
    Mutant("schedule not restored", _schedule_not_restored, "or not restored"),
    Mutant("optimizer state not restored", _moments_not_restored, "the optimizer's exp_avg"),
    Mutant("random streams not restored", _randomness_not_restored, "draws another random stream"),
    Mutant("the same dropout on all replicas", _same_dropout, "the random stream of another data rank"),
    Mutant("one rank changes a parameter", _one_rank_changes, "changed on rank 1 alone"),
    # pipelines
    Mutant("copies of a tied weight come apart", _one_rank_changes, "changed on rank 1 alone", "pp2"),
    Mutant("random streams of stages not restored", _randomness_not_restored, "after the resume", "pp2"),
    *STAGE_MUTANTS,
)
