"""Parameters that every rank of a sharded model keeps whole: scalars, complex ones, those of another dtype.

At rest they are DTensors as all the others are, since optimizers and loss scalers take no mixed lists. While the model
runs, the plain tensors inside stand in their places, and their gradients add up there.
"""

from collections import defaultdict
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shoal.parallel.parts import local_of
from shoal.world import World


class Uncut:
    """The uncut parameters of a model: `shown` at rest, `plain` while it runs; both are one memory."""

    def __init__(self, model: nn.Module, names: Collection[str], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._at_rest = True
        self._plain = {name: model.get_parameter(name) for name in names}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names}
        name_of = {param: name for name, param in self._plain.items()}
        for path, param in model.named_parameters(remove_duplicate=False):
            if param in name_of:
                owner, _, key = path.rpartition(".")
                self._places[name_of[param]].append((model.get_submodule(owner), key))
        self._shown = {
            name: nn.Parameter(self._spread(param.detach()), requires_grad=param.requires_grad)
            for name, param in self._plain.items()
        }
        self._put(self._shown)

    def shown(self) -> list[nn.Parameter]:
        """As they are at rest; looked up, since `Module.to` may replace them."""
        if self._at_rest:
            self._shown = {name: getattr(*places[0]) for name, places in self._places.items()}
        return list(self._shown.values())

    def gradients(self) -> dict[str, Tensor]:
        """Of this rank, not reduced yet."""
        return {name: param.grad for name, param in self._plain.items() if param.grad is not None}

    def used(self) -> list[bool]:
        """Which had a gradient on this rank, now or from an earlier backward, or need none."""
        pairs = zip(self._plain.values(), self.shown(), strict=True)
        return [not shown.requires_grad or plain.grad is not None or shown.grad is not None for plain, shown in pairs]

    def run(self) -> None:
        """The model runs: plain tensors stand in their places."""
        if not self._at_rest:
            return
        for name, shown in zip(self._plain, self.shown(), strict=True):
            inside = local_of(shown.detach())
            if (self._plain[name].device, self._plain[name].data_ptr()) != (inside.device, inside.data_ptr()):
                self._plain[name] = nn.Parameter(inside)  # it was moved, or made on `meta`
            self._plain[name].requires_grad_(shown.requires_grad)
        self._put(self._plain)
        self._at_rest = False

    def rest(self) -> None:
        """It has run: the DTensors are back."""
        if not self._at_rest:
            self._put(self._shown)
        self._at_rest = True

    def forget(self) -> None:
        """Drop the gradients of this rank."""
        for param in self._plain.values():
            param.grad = None

    def average(self, world: World) -> None:
        """The mean of the gradients over the data ranks, missing ones taken as zero, goes to those at rest."""
        kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for param in self._plain.values():
            if param.requires_grad:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                kinds[param.dtype].append(torch.view_as_real(param.grad) if param.is_complex() else param.grad)
        for grads in kinds.values() if world.data_group is not None else ():
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=world.data_group)
            flat /= world.num_data
            for grad, mean in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))
        for param, shown in zip(self._plain.values(), self.shown(), strict=True):
            if param.grad is not None:
                grad = self._spread(param.grad)
                shown.grad, param.grad = grad if shown.grad is None else shown.grad + grad, None

    def _spread(self, tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)

    def _put(self, params: dict[str, nn.Parameter]) -> None:
        for name, param in params.items():
            for module, key in self._places[name]:
                setattr(module, key, param)
