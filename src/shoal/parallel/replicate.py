"""Data parallelism: every rank holds the whole model; torch's DDP adds the gradients while backward runs.

DDP is used from the outside: its reducer is driven by two hooks on the user's own module, so that module stays
what it is, with its own parameter names, and is what a checkpoint, an optimizer and a debugger see.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from shoal.errors import JobError
from shoal.world import World
from shoal.world.messages import group_label

# gloo's threads share the cores with backward, so few large buckets win there (measured: 25 MB costs 5 % more
# than 200 MB on 105 MB of gradients); NCCL overlaps for free and wants to start early.
_BUCKET_MB = {"gloo": 200, "nccl": 25}


class Replica:
    """The reduction around one module.

    Invariant: the gradients of a training forward/backward are summed over the data ranks and divided by their
    number, in the last backward of an optimizer step and nowhere else. A parameter that no rank used keeps
    `None`; one that only some ranks used gets the sum of theirs (`find_unused_parameters`; its cost, a walk
    over the graph, was lost in the noise when measured, so there is no faster, unsafe mode).
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model: nn.Module | None = model
        self._world = world
        self._params = list(model.parameters())
        self._sparse = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
        self._trainable: tuple[bool, ...] = ()
        self._seen_output = False
        self._ddp: DistributedDataParallel | None = None
        self._syncing = True
        self._num_waits = 0
        ranks = world.mesh.group(world.rank, ("dp", "fsdp"))
        self._sums = b"all_reduce", world.mesh.axis_of(world.rank, ranks).encode(), group_label(ranks, "ddp")
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward)
        world.at_close(self._release)

    def _release(self) -> None:
        """The world closes: from here on the model is a plain module."""
        self._model = self._ddp = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replica":
        copy = object.__new__(Replica)
        copy._model = None  # a copy of the model (an average of weights, say) is a plain module
        return copy

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within: backward adds up locally; nothing is sent."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def settle(self) -> None:
        """After the backward that reduces: a table in which no rank looked anything up has no gradient."""
        for param in self._sparse:
            if param.grad is not None and param.grad.is_sparse and param.grad._nnz() == 0:
                param.grad = None

    def exposed_s(self) -> float:
        """Seconds that the backward of the step before the last one waited for sums, its own work done.

        0 in the first call, from which on DDP keeps the times of every step.
        """
        if self._ddp is None:
            return 0.0
        self._ddp._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]  # of torch
        told = self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        waited_ns = told.get("backward_comm_time", 0) - told.get("backward_compute_comm_overlap_time", 0)
        return float(max(0, waited_ns)) / 1e9

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._trains():
            return None
        self._rewrap_if_changed()
        if self._ddp is None:
            return None
        self._ddp.require_backward_grad_sync = self._syncing
        for param in self._sparse if self._syncing else ():
            if param.grad is None and param.requires_grad:
                # DDP asks every rank for rows, also one that had none to look up.
                param.grad = _no_rows(param)
        return self._ddp._pre_forward(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._trains() or self._ddp is None:
            return output
        if self._syncing and self._world.record.is_read:
            self._note_wait(output)
        if self._syncing and self._world.calls is not None and self._world.data_group is not None:
            self._world.calls.gradients(self._world.data_group)
        if not self._seen_output:
            self._seen_output = True
            check_output(output)
            with native_silence():
                return self._prepared(self._ddp, output)
        return self._prepared(self._ddp, output)

    def _note_wait(self, output: Any) -> None:
        """Have this process's record say when backward has done its own part and waits for the sums.

        That wait is in C++, in a callback which the reducer queues when its last bucket is on the way. One that is
        queued earlier runs just before it, and one that is queued by that one after it.
        """
        made = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
        first = next(made, None)  # not a parameter that is handed on: its hooks would stay
        if first is not None:
            first.register_hook(self._on_backward)  # type: ignore[no-untyped-call]  # of torch

    def _on_backward(self, grad: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._on_own_part_done)

    def _on_own_part_done(self) -> None:
        record = self._world.record
        self._num_waits += 1
        record.enter((*self._sums, self._num_waits))
        torch.autograd.Variable._execution_engine.queue_callback(record.leave)

    @staticmethod
    def _prepared(ddp: DistributedDataParallel, output: Any) -> Any:
        """As DDP does after a forward; without its copy of an output that is one tensor, which is used or nothing is.

        Of several outputs some may be unused, and DDP's own node tells their gradients from zeros.
        """
        if not isinstance(output, Tensor):
            return ddp._post_forward(output)  # type: ignore[no-untyped-call]
        ddp.require_forward_param_sync = ddp.require_backward_grad_sync
        if ddp.require_backward_grad_sync:
            ddp.reducer.prepare_for_backward([output])
        return output

    def _trains(self) -> bool:
        # Evaluation, and a look at gradients on one rank alone, must never wait for the others.
        return self._model is not None and self._model.training and torch.is_grad_enabled()

    def _rewrap_if_changed(self) -> None:
        """DDP registers the trainable parameters once; one that is un-frozen later would drift in silence."""
        trainable = tuple(p.requires_grad for p in self._params)
        if trainable == self._trainable:
            return
        self._trainable = trainable
        self._ddp = self._wrap() if any(trainable) else None

    def _wrap(self) -> DistributedDataParallel:
        with warnings.catch_warnings():
            # torch warns of float64 and of frozen parts; both are what the job asked for.
            warnings.simplefilter("ignore")
            ddp = DistributedDataParallel(
                self._model,
                process_group=self._world.data_group,
                broadcast_buffers=False,  # buffers are equal by construction, or the run is refused
                init_sync=False,  # weights are equal by seed, and `assemble` has compared them
                find_unused_parameters=True,
                gradient_as_bucket_view=True,
                bucket_cap_mb=_BUCKET_MB.get(self._world.backend or "", 25),
            )
        if self._world.kind == "fake":
            ddp.register_comm_hook(None, _keep)
        return ddp


class DryReplica:
    """The same reduction of shapes, which DDP, in C++, cannot add up: as much memory, as many bytes."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        # As DDP does: gradients lie in buckets, from the start on.
        self.buckets = {id(param): torch.empty_like(param) for param in model.parameters() if param.requires_grad}
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._into_bucket)  # type: ignore[no-untyped-call]  # of torch

    def _into_bucket(self, param: Tensor) -> None:
        bucket = self.buckets[id(param)]
        if param.grad is not bucket:
            assert param.grad is not None, "the hook runs when there is one"
            bucket.copy_(param.grad)
            param.grad = bucket

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Within: nothing is sent."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """After the last backward: all of them are added up."""
        for bucket in self.buckets.values():
            dist.all_reduce(bucket, group=self._world.data_group)


@contextlib.contextmanager
def native_silence() -> Iterator[None]:
    """Within: what torch's C++ writes to stderr is lost.

    In the first forward, the reducer's warning that it looks for unused parameters, which it is told to do; where the
    profiler begins and ends, its notes of that.
    """
    kept = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(sink)
        os.close(kept)


def _no_rows(table: Tensor) -> Tensor:
    """The gradient of a table (rows, width) in which nothing was looked up, of the kind that a look-up makes."""
    nowhere = torch.zeros(1, 0, dtype=torch.int64, device=table.device)
    return torch.sparse_coo_tensor(nowhere, table.new_zeros(0, table.shape[1]), table.shape, check_invariants=False)


def _keep(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported from C++
) -> torch.futures.Future[torch.Tensor]:
    """In a fake world there is nobody to add up with, and no result to ask for."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def check_output(output: Any) -> None:
    """Refuse an output in which the tensors cannot be found: from them the used parameters are told.

    Raises:
        JobError: an object of a class of one's own, or a parameter that is handed out as it is.
    """
    for leaf in tree_leaves(output):
        if isinstance(leaf, nn.Parameter):
            raise JobError(
                f"the model hands out a parameter of shape {tuple(leaf.shape)} as it is, and the loss uses it outside "
                "of the forward, where data parallelism does not see it. Use it inside, or return `param * 1`."
            )
        if not isinstance(leaf, Tensor) and not dataclasses.is_dataclass(leaf) and hasattr(leaf, "__dict__"):
            held = [name for name, value in vars(leaf).items() if isinstance(value, Tensor)]
            if held:
                raise JobError(
                    f"the model returns a {type(leaf).__qualname__}, whose tensors ({', '.join(held[:3])}) nobody can "
                    "find. Return a tensor, tuple, list, dict or dataclass."
                )


def check_no_hooks(model: nn.Module) -> None:
    """Refuse gradient hooks on parameters where ranks or micro-batches see parts of the gradient.

    Raises:
        JobError: naming the parameter.
    """
    for name, param in model.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):  # absent before torch 2.1
            raise JobError(
                f"{name} has a gradient hook. It would see the gradient of one rank's (or micro-batch's) part, before "
                "it is added up, and so do something else in every layout. Clip with clip_grad_norm in the job, or "
                "change gradients in the optimizer's own step."
            )


def check_replicable(model: nn.Module) -> None:
    """Refuse what cannot be copied to every rank.

    Raises:
        JobError: a lazy module that has not seen an input yet, so that its parameters do not exist.
    """
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise JobError(
                f"parameter {name} has no shape yet (a lazy module). Run one sample through the model at the end "
                "of Job.model(), so that every parameter exists before the optimizer is built."
            )
