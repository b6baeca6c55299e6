"""Random numbers in a pipeline: each stage and micro-batch has its own."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Seed = Callable[[int, int], None]  # (micro-batch, stage; -1: what all stages share) -> torch's generator is seeded


def no_seed(number: int, stage: int) -> None:
    """Where nothing is drawn."""


class ByHand:
    """Seeds the calls of a model outside of steps, by their number: generators of ranks part where one alone draws.

    Args:
        data_rank: other samples, other draws.
    """

    def __init__(self, data_rank: int, device: torch.device) -> None:
        self._data_rank, self._devices = data_rank, [device] if device.type == "cuda" else []
        self._num_calls = 0

    @contextlib.contextmanager
    def next(self) -> Iterator[Seed]:
        """Of the next call; afterwards torch's generators are as before."""
        call = self._num_calls = self._num_calls + 1

        def seed(number: int, stage: int) -> None:
            torch.manual_seed(random.Random(f"{self._data_rank} {call} {number} {stage}").getrandbits(63))

        with torch.random.fork_rng(self._devices):
            yield seed


class Streams:
    """Random numbers of a forward: those of the stage, but where all stages draw the same."""

    def __init__(self, seed: Seed, number: int, stage: int, device: torch.device) -> None:
        self._kind: Any = torch.cuda if device.type == "cuda" else torch
        self._common: Tensor | None = None
        self._is_on = seed is not no_seed
        if self._is_on:
            seed(number, stage)
            own = self._kind.get_rng_state()
            seed(number, -1)  # Python's and numpy's streams, too
            self._common = self._kind.get_rng_state()
            self._kind.set_rng_state(own)

    @contextlib.contextmanager
    def common(self) -> Iterator[None]:
        """Around what all stages draw."""
        if not self._is_on:
            yield
            return
        own = self._kind.get_rng_state()
        self._kind.set_rng_state(self._common)
        yield
        self._common = self._kind.get_rng_state()
        self._kind.set_rng_state(own)
