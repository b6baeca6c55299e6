"""Sharded data parallelism: each rank keeps a part of every parameter, gradient and optimizer state.

torch's fully_shard cuts, gathers and reduces, a block at a time:

    rank 0   rows 0-1 of w ─┐                                     ┌─ rows 0-1 of the mean gradient
                            ├─ gather ─ w, forward, backward ─ reduce
    rank 1   rows 2-3 of w ─┘                                     └─ rows 2-3

The order in which this happens is the matter of order.py; what is inside of torch, that of units.py. The modules stay
the user's, and the parameters keep their names; each is a DTensor, and whole only while its block runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.errors import JobError, LayoutError, WorldError
from shoal.parallel.grouping import Grouping
from shoal.parallel.order import ROOT, Order
from shoal.parallel.outside import explain_reads
from shoal.parallel.replicate import check_output
from shoal.parallel.uncut import Uncut
from shoal.world import World

if TYPE_CHECKING:
    from shoal.parallel.units import Unit, UnitState


class Shards:
    """The shards of one module.

    Invariant: after the backward that reduces, the gradient of a parameter is the mean over the data ranks of each
    rank's, in the rows that this rank keeps. A parameter that no rank used keeps `None`; where only some used it, the
    others count as zero.

    Attributes:
        rows: what this rank keeps of dim 0 of each tensor that is cut: (start, stop), by every name that it has.
        replicated: names of the parameters that every rank keeps whole.

    Raises:
        JobError: the model has a table with sparse gradients.
        LayoutError: the layout asks for zero=1 on an axis that cuts the parameters too.
        WorldError: fully_shard of this torch is made otherwise than shoal knows.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        _check(model, world)
        grouping = Grouping.of(model)
        stays_whole = world.layout.reshard is False or world.layout.zero == 2
        mesh = world.device_mesh(*(("dp", "fsdp") if world.layout.dp > 1 else ("fsdp",)))
        self._world = world
        self._crew = _Crew(world)
        self._order = Order(["the model", *grouping.blocks], self._crew, keep_all=stays_whole)
        explain_reads(
            model, {f"{name}.{n}": name for name, b in grouping.blocks.items() for n, _ in b.named_parameters()}
        )
        with _kept_attributes(model):
            self._root = self._cut(model, grouping, mesh)
            self._uncut = Uncut(model, grouping.whole, mesh)
        self._unused = _Unused(world, self._crew.units, self._uncut)
        self._crew.on_last = self._unused.count
        self._is_closed = self._seen_output = False
        uncut = set(self._uncut.shown())
        self.replicated = list(grouping.whole)
        self.rows = {
            name: _rows(param, world)
            for name, param in model.named_parameters(remove_duplicate=False)
            if param not in uncut
        }
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.register_forward_hook(self._after_forward)
        world.at_close(self._close)

    def _cut(self, model: nn.Module, grouping: Grouping, mesh: DeviceMesh) -> "UnitState":
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

        from shoal.parallel.direct import DirectGather, DirectReduce  # these need the inside of torch,
        from shoal.parallel.units import adopt  # which a run without shards need not load

        to_host = CPUOffloadPolicy(pin_memory=self._world.device.type == "cuda")
        options: dict[str, Any] = {
            "mesh": mesh,
            "offload_policy": to_host if self._world.layout.offload == "cpu" else OffloadPolicy(),
            "reshard_after_forward": False,  # the order drops what is to be dropped
        }
        uncut = set(grouping.whole.values())
        for block in grouping.blocks.values():
            fully_shard(block, ignored_params=uncut | grouping.with_root, **options)
        fully_shard(model, ignored_params=uncut, **options)
        names = {id(param): name for name, param in model.named_parameters()}
        for number, module in enumerate([model, *grouping.blocks.values()]):
            unit, state = adopt(module, self._order, number, names)
            state.on_end = self._end_backward
            module.__dict__["__deepcopy__"] = _no_copy  # not setattr: it is no part of the module
            if self._world.backend == "gloo":
                cast(FSDPModule, module).set_custom_all_gather(DirectGather())
                cast(FSDPModule, module).set_custom_reduce_scatter(DirectReduce())
            if unit is not None:
                self._crew.units[number] = unit
            if number == ROOT:
                root = state
        return root

    def _close(self) -> None:
        self._is_closed = True

    # -- what a step calls --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within: gradients add up on this rank, whole, and are not reduced."""
        self._order.reduces = False
        try:
            yield
        finally:
            self._order.reduces = True

    def hold(self) -> None:
        """For a step of a pipeline: gather all, once; gradients add up on this rank until `settle`. Collective."""
        if not self._order.is_held:
            self._gather_all()

    def _gather_all(self) -> None:
        for unit in self._crew.units.values():
            unit.hold()
        self._uncut.run()
        self._order.is_held = True

    def _reduce_all(self) -> None:
        self._order.is_held = False
        for number in sorted({ROOT, *self._crew.units}, reverse=True):
            self._crew.reduce(number)
        self._root.finish()
        self._uncut.average(self._world)
        self._uncut.rest()
        self._unused.settle()

    def settle(self) -> None:
        """After the last backward: reduce what was held back; or end it, where nothing of the model took part."""
        if self._order.is_held:
            self._reduce_all()
        elif self._order.awaits_backward:
            self._root._root_post_backward_final_callback()

    def own_gradients(self) -> dict[str, Tensor]:
        """This rank's gradients, whole, that `accumulate` has kept from being reduced."""
        found = self._uncut.gradients()
        for unit in self._crew.units.values():
            found |= {unit.names[place]: grad for place, grad in unit.gradients().items()}
        return found

    def forget(self) -> None:
        """Drop these gradients, as though their backward had not been."""
        self._order.forget()
        self._order.is_held = False
        for unit in self._crew.units.values():
            unit.forget()
        self._uncut.forget()
        self._uncut.rest()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within: every rank holds all parameters, and may call the model alone, without gradient; collective."""
        self._gather_all()
        try:
            with torch.no_grad():
                yield
        finally:
            self._order.is_held = False
            self._uncut.rest()
            for unit in self._crew.units.values():
                unit.release()

    # -- around forward and backward ----------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._is_closed:
            raise WorldError(
                "this model lies in shards over the ranks of a world that is closed. Use it within `with World.open("
                "...)`, or load its checkpoint into a new model."
            )
        self._uncut.run()
        self._order.begin_forward((module.training, torch.is_grad_enabled()))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not self._seen_output:
            self._seen_output = True
            check_output(output)
        self._order.end_forward(has_gradient=torch.is_grad_enabled())
        if not self._order.awaits_backward and not self._order.is_held:
            self._uncut.rest()

    def _end_backward(self, torch_ends: Callable[[], None]) -> None:
        reduced = self._order.reduces
        self._order.end_backward()
        torch_ends()
        if reduced:
            self._uncut.average(self._world)
        self._uncut.rest()
        if reduced:
            self._unused.settle()


def _check(model: nn.Module, world: World) -> None:
    if world.layout.zero == 1:
        raise LayoutError(
            f"{world.layout}: zero=1 cuts the optimizer's state alone, and fsdp{world.layout.fsdp} cuts parameters and "
            f"gradients too. Write dp{world.num_data}:zero=1, or drop zero."
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise JobError(
                f"{name} has sparse gradients (sparse=True), and shards are reduced as dense rows. Take dpN, which "
                "adds up sparse gradients, or sparse=False."
            )
    for param in model.parameters():
        if not param.is_contiguous():
            param.data = param.data.contiguous()  # rows are cut from memory that lies row by row


def _rows(param: Tensor, world: World) -> tuple[int, int]:
    """As torch cuts: chunks of one size, rounded up; the last ranks may have fewer, or none."""
    num_rows, size = param.shape[0], world.mesh.sizes["fsdp"]
    chunk = -(-num_rows // size)
    start = min(num_rows, world.mesh.coordinate(world.rank, "fsdp") * chunk)
    return start, min(num_rows, start + chunk)


@contextlib.contextmanager
def _kept_attributes(model: nn.Module) -> Iterator[None]:
    """Parameters are replaced within; what users wrote on them (`param.no_decay = True`) goes over to the new ones."""
    written = {name: dict(vars(param)) for name, param in model.named_parameters()}
    yield
    for name, param in model.named_parameters():
        vars(param).update(written[name])


def _no_copy(memo: dict[int, Any]) -> NoReturn:
    raise JobError(
        "a model in shards cannot be copied: its parameters are parts, gathered while it runs. Copy it before it is "
        "placed; or, for an average of the weights, keep `{name: param.detach().clone()}` of the parts, and lerp_ them."
    )


class _Unused:
    """Parameters without a gradient on some ranks: `None` where they have none on any."""

    def __init__(self, world: World, units: "dict[int, Unit]", uncut: Uncut) -> None:
        self._world, self._units, self._uncut = world, units, uncut
        self._used: list[bool] = []
        self._counts = torch.empty(0)
        self._work: dist.Work | None = None

    def count(self) -> None:
        """Begin to add up how many ranks have used each parameter; small, so it runs beside a reduction."""
        self._used = [used for unit in self._units.values() for used in unit.take_used()] + self._uncut.used()
        self._counts = torch.tensor(self._used, dtype=torch.int32, device=self._world.device)
        group = self._world.data_side_group
        self._work = None if group is None else dist.all_reduce(self._counts, group=group, async_op=True)

    def settle(self) -> None:
        """After the reductions. Only a rank that has not used all of them need look what the others did."""
        if self._work is not None:
            self._work.wait()
        if all(self._used):
            return
        params = [param for unit in self._units.values() for param in unit.params()] + self._uncut.shown()
        for param, count in zip(params, self._world.read(self._counts) or self._used, strict=True):
            if not count:
                param.grad = None


class _Crew:
    """Does what the order says, to the units that have parameters."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.units: dict[int, Unit] = {}
        self.on_last: Callable[[], None] = lambda: None  # before the last reduction of a backward

    def agree(self, need: int) -> list[int]:
        """What each data rank needs next."""
        group = self._world.data_side_group
        if group is None:
            return [need]
        own = torch.tensor([need], device=self._world.device)
        rows = own.new_empty(dist.get_world_size(group), 1)
        dist.all_gather(list(rows), own, group=group)
        return [int(row) for row in rows]

    def is_whole(self, unit: int) -> bool:
        """Whether it is gathered, or has nothing to gather."""
        return unit not in self.units or self.units[unit].is_whole

    def gather(self, unit: int) -> None:
        """Begin to make it whole; collective."""
        if unit in self.units:
            self.units[unit].gather()

    def wait(self, unit: int) -> None:
        """Until it is whole."""
        if unit in self.units:
            self.units[unit].wait_for_unshard()

    def release(self, unit: int) -> None:
        """Drop what was gathered."""
        if unit in self.units:
            self.units[unit].release()

    def reduce(self, unit: int) -> None:
        """Reduce its gradient, and drop what was gathered; collective."""
        if unit in self.units:
            self.units[unit].fill()
        if unit == ROOT:
            self.on_last()
        if unit in self.units:
            self.units[unit].reduce()
