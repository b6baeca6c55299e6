"""Random numbers of a rank's own, for as long as ranks hold different slices.

Outside of a region all peers hold the same activation, so they must draw the same mask; inside, different ones:

    x -> column layer -> [ own: attention weights, hidden units ] -> row layer -> [ common: dropout of the sum ] -> y
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DROPS = re.compile("(feature_)?(alpha_)?dropout(_|[123]d)?")


class OwnStream:
    """Switches the global generator of torch to this rank's numbers, and back; between them the common one rests."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: Tensor | None = None
        self._cuda = False

    def begin(self, like: Tensor) -> None:
        """From here on, the rank's own: another seed at every call, the same again when a block is run again."""
        if self._common is not None:
            return
        seed = int(torch.randint(2**62, ()))  # the common stream moves on by one draw
        self._cuda = like.is_cuda
        self._common = self._kind().get_rng_state()
        self._kind().manual_seed(seed + self._rank)

    def end(self) -> None:
        """The common one again."""
        if self._common is not None:
            self._kind().set_rng_state(self._common)
            self._common = None

    def _kind(self) -> Any:
        return torch.cuda if self._cuda else torch


class Undropped(TorchFunctionMode):
    """Within: torch's functions drop nothing. A module that draws otherwise is proved in evaluation mode alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            args, kwargs = (), named | kwargs | {"dropout_p": 0.0}
        elif _DROPS.fullmatch(getattr(func, "__name__", "")):  # which descriptors of attributes lack
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)
