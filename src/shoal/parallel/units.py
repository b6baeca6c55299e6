"""What shoal must know of the inside of torch's fully_shard, in one place.

fully_shard gathers and reduces when the hooks of its modules fire. Here the hooks only say what they need, and the
order (order.py) says when it is done. All else is torch's: buffers, streams, the sharded and the whole parameters.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shoal.errors import JobError, WorldError
from shoal.parallel.order import Order

_KNOWN = "2.9 to 2.13"

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
except ImportError as error:
    raise WorldError(
        f"torch {torch.__version__} keeps the inside of fully_shard elsewhere ({error}). fsdp runs with torch "
        f"{_KNOWN}; take one of those, or a layout without fsdp."
    ) from error

_USED = {
    FSDPParamGroup: "unshard wait_for_unshard pre_forward pre_backward post_backward use_training_state _to_sharded",
    FSDPState: "_register_pre_backward_hook _root_post_backward_final_callback",
    FSDPParam: "to_sharded unsharded_param accumulate_unsharded_grad_if_needed",
}


class Unit(FSDPParamGroup):
    """The parameters that are gathered and reduced together: those of a block, or of all that is outside of blocks."""

    order: Order
    number: int  # in the order
    names: list[str]  # of its parameters, from the root
    unused: set[int]  # positions of parameters that had no gradient on this rank, now or from an earlier backward

    # -- what torch's hooks call --------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of one call. torch passes inputs with gradient through a node that tells when its backward is over."""
        if self.order.is_held:
            return args, kwargs
        passed, named = super().pre_forward(module, args, kwargs)
        if torch.is_grad_enabled():
            self.order.called(self.number, tells=passed is not args or named is not kwargs)
        return passed, named

    def post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        """After one call."""
        return output if self.order.is_held else super().post_forward(module, input, output)

    def unshard(self, async_op: bool = False) -> None:
        """Make it whole, in its turn."""
        if self.is_whole:
            return
        if self._training_state is TrainingState.FORWARD:
            self.order.need_forward(self.number)
        elif self._training_state is TrainingState.PRE_BACKWARD:
            raise JobError(self.order.out_of_order(self.number))
        else:  # asked for by hand
            super().unshard(async_op)

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        """Before the backward of one call; the order takes the place of torch's prefetch."""
        begins = self._training_state is not TrainingState.PRE_BACKWARD
        if begins:
            self.order.need_backward(self.number)
        super().pre_backward(False, *unused)
        if begins:
            self.order.look_ahead(self.number)

    def post_backward(self, *unused: Any) -> None:
        """After the backward of one call."""
        self._training_state = TrainingState.POST_BACKWARD
        if self.order.over(self.number) and self.gradients():
            raise JobError(self.order.out_of_order(self.number))

    # -- what the order calls -----------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Gathered, or on the way."""
        return self._all_gather_result is not None or bool(self.is_unsharded)

    def gather(self) -> None:
        """Begin to make it whole; collective."""
        if not self.is_whole:
            with self.use_training_state(TrainingState.FORWARD):  # on the streams of a gather
                super().unshard(self.unshard_async_op)

    def hold(self) -> None:
        """Make it whole, before its first forward too; collective."""
        self.lazy_init()  # type: ignore[no-untyped-call]  # untyped in torch
        super().unshard()
        self.wait_for_unshard()

    def release(self) -> None:
        """Drop the whole parameters; their gradients stay."""
        self.wait_for_unshard()
        self._to_sharded()  # type: ignore[no-untyped-call]  # untyped in torch

    def fill(self) -> None:
        """Zeros for parameters that this rank has not used: every rank sends as many gradients."""
        gradients = self.gradients()
        for place, param in enumerate(self.fsdp_params):
            if param.sharded_param.requires_grad and place not in gradients:
                param.unsharded_accumulated_grad = torch.zeros_like(param.unsharded_param)
                if param.sharded_param.grad is None:
                    self.unused.add(place)

    def reduce(self) -> None:
        """Reduce the gradients, and drop the whole parameters; collective."""
        self.wait_for_unshard()
        super().post_backward()

    def reshard(self) -> None:
        """Drop the whole parameters; after a forward, when the order says so."""
        if self._training_state is not TrainingState.FORWARD:
            super().reshard()
        elif not self.order.is_held:
            self.order.ran(self.number)

    # -- what shard.py asks -------------------------------------------------------------------------------

    def params(self) -> list[nn.Parameter]:
        """Its parameters, cut."""
        return [param.sharded_param for param in self.fsdp_params]

    def take_used(self) -> list[bool]:
        """Which of them had a gradient on this rank in the last reduction, or need none."""
        unused, self.unused = self.unused, set()
        return [place not in unused for place in range(len(self.fsdp_params))]

    def gradients(self) -> dict[int, Tensor]:
        """This rank's gradients that are not reduced yet, by position; whole."""
        found = {}
        for place, param in enumerate(self.fsdp_params):
            if not hasattr(param, "_unsharded_param"):  # torch makes it with the first gather
                continue
            grads = [g for g in (param.unsharded_accumulated_grad, param.unsharded_param.grad) if g is not None]
            if grads:
                found[place] = grads[0]
        return found

    def forget(self) -> None:
        """Drop these gradients, and the whole parameters."""
        for place in self.gradients():
            self.fsdp_params[place].unsharded_accumulated_grad = self.fsdp_params[place].unsharded_param.grad = None
        self.release()


class UnitState(FSDPState):
    """The hooks around one module of fully_shard."""

    is_outermost: bool
    is_held: Callable[[], bool]  # all is whole, and nothing is to be done around a forward or a backward
    on_end: Callable[[Callable[[], None]], None]  # given what torch does when the backward is over

    def _register_pre_backward_hook(self, output: Any) -> Any:
        """A view would lose its hook if the caller changed it in place; where that matters, it is copied."""
        if not torch.is_grad_enabled() or self.is_held():
            return output
        if not self.is_outermost:
            output = tree_map_only(Tensor, _own, output)
            return super()._register_pre_backward_hook(output)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the root is whole, hook or not, and `settle` ends its backward
            return super()._register_pre_backward_hook(output)

    def finish(self) -> None:
        """What torch does at the end of a backward, and nothing of ours."""
        super()._root_post_backward_final_callback()

    def _root_post_backward_final_callback(self) -> None:
        self.on_end(super()._root_post_backward_final_callback)


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor


def adopt(module: nn.Module, order: Order, number: int, names: Mapping[int, str]) -> tuple[Unit | None, UnitState]:
    """Put what fully_shard made for a module under an order; no Unit where it has no parameters of its own.

    Args:
        names: of the cut parameters, by id.

    Raises:
        WorldError: this torch's fully_shard is made otherwise.
    """
    missing = [
        f"{cls.__name__}.{name}" for cls, names in _USED.items() for name in names.split() if not hasattr(cls, name)
    ]
    if missing:
        raise WorldError(
            f"fully_shard of torch {torch.__version__} is made otherwise (no {', '.join(missing)}). fsdp runs with "
            f"torch {_KNOWN}; take one of those, or a layout without fsdp."
        )
    state: Any = module._get_fsdp_state()  # type: ignore[operator]  # an FSDPModule now
    state.__class__ = UnitState
    state.is_outermost, state.is_held = number == 0, lambda: order.is_held
    unit = state._fsdp_param_group
    if unit is not None:
        unit.__class__ = Unit
        unit.order, unit.number, unit.unused = order, number, set()
        unit.names = [names[id(param)] for param in unit.params()]
    return unit, state
