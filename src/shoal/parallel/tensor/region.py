"""A region: the smallest module around layers that are cut together, and what is done to them."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from shoal.parallel.parts import Part, cut
from shoal.parallel.tensor.heads import Narrow, Rules
from shoal.parallel.tensor.peers import Peers
from shoal.parallel.tensor.styles import Cut, convert


@dataclass
class Region:
    """Layers of one module that are cut together.

    Attributes:
        name: of the module.
        cuts: by the name of the layer relative to it.
        rules: for sizes that its code spells out.
        partial: parameters inside, whole on every rank, of whose gradient each rank computes a part.
        draws: it draws random numbers in training (dropout), of which each rank needs its own.
    """

    name: str
    cuts: dict[str, Cut]
    rules: Rules | None = None
    partial: tuple[str, ...] = ()
    draws: bool = False

    def like(self, name: str) -> "Region":
        """The same of another module of the same structure."""
        return Region(name, self.cuts, self.rules, self.partial, self.draws)


Slices = dict[int, tuple[nn.Parameter, nn.Parameter]]  # by the id of the whole one, which is kept, so that it stays its


def cut_layers(module: nn.Module, cuts: Mapping[str, Cut], peers: Peers, done: Slices) -> dict[str, Part]:
    """Replace the tensors of the named layers by this rank's slices; returns what it holds, by name below `module`.

    Args:
        done: the slices made so far, so that shared parameters stay shared.
    """
    parts: dict[str, Part] = {}
    for name, layer_cut in cuts.items():
        layer = module.get_submodule(name)
        for path, (dim, units) in layer_cut.keeps.items():
            below, _, key = path.rpartition(".")
            owner = layer.get_submodule(below)
            tensor = getattr(owner, key)
            part = Part.whole(tensor.shape).take(dim, units.spans(peers.rank), "tp")
            parts[f"{name}.{path}" if name else path] = part
            if isinstance(tensor, nn.Parameter):
                if id(tensor) not in done:
                    slice_ = nn.Parameter(cut(tensor.detach(), part), requires_grad=tensor.requires_grad)
                    slice_.__dict__.update(tensor.__dict__)  # what a job wrote on it
                    done[id(tensor)] = (tensor, slice_)
                setattr(owner, key, done[id(tensor)][1])
            else:
                owner._buffers[key] = cut(tensor, part)
        convert(layer, layer_cut, peers)
    return parts


@contextlib.contextmanager
def narrowing(rules: Rules | None) -> Iterator[None]:
    """Around a forward of a region whose code spells sizes out."""
    with Narrow(rules) if rules is not None and rules.is_needed else contextlib.nullcontext():
        yield
