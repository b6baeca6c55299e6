"""A training on disk, for a comparison with another one.

    runs/a/  start/rank_0.json  start/rank_0.safetensors      the weights it starts from
             step_000001/rank_0.json ...                      loss, gradients, optimizer state, weights after step 1
             step_000001/rank_1.safetensors                   of other ranks: what differs from rank 0, and outputs

What every rank holds alike is written once, so that a file of another rank is a finding in itself.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.data.digest import digest
from shoal.verbs.verify.command import VerifyError
from shoal.verbs.verify.watch import Seen, Watch
from shoal.world import World

START = "start"
_OWN = "outputs/"  # of each rank's own samples


class Recording:
    """Writes down a training as it goes by: a loop of your own, or any other.

        recording = Recording("runs/a", model, optimizer, world=world)
        for batch in data.batches():
            ...
            optimizer.step()
            recording.step(loss)        # after the update, on every rank
        recording.close()

    Then `shoal verify --runs runs/a runs/b`. Gradients are those that the optimizer was given.

    Args:
        folder: new or empty.
        optimizers: one or more.
        world: of a placed model; without it the model is taken to be whole in this one process.
        outputs: in so many first steps, what each module returns, too.
        streams: the random stream that each step begins with, too; for a loop that seeds every step.
    """

    def __init__(
        self,
        folder: Path | str,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer,
        world: World | None = None,
        outputs: int = 0,
        streams: bool = False,
        first_step: int = 1,
    ) -> None:
        self._folder, self._world = Path(folder), world
        self._rank = 0 if world is None else world.rank
        self._next = first_step
        self._check_empty() if world is None else world.decide(self._check_empty)
        self._watch = Watch(model, optimizers, world=world, outputs=outputs, streams=streams)
        self._write(START, self._watch.start())

    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        grad_norm: Tensor | float | None = None,
        clip: float | None = None,
        sample_ids: Sequence[int] = (),
        **facts: Any,
    ) -> None:
        """Write down the step that was just made; collective.

        Args:
            loss: over the global batch, so that it is the same on every rank; leave it out otherwise.
            clip: the factor of clipping; gradients are written down as they were before.
            sample_ids: of this rank, in order.
            facts: what else JSON holds.
        """
        seen = self._watch.step(clip)
        given: dict[str, Any] = {"loss": _number(loss), "grad_norm": _number(grad_norm), "clip": clip}
        given["sample_ids"] = list(map(int, sample_ids))
        seen.facts |= given | facts
        self._write(name_of(self._next), seen)
        self._next += 1

    def _check_empty(self) -> str:
        if any(self._folder.glob("*")):
            raise VerifyError(f"{self._folder} is not empty. Record into a folder of its own.")
        return ""

    def close(self) -> None:
        """Let go of the model and the optimizer."""
        self._watch.close()

    def _write(self, moment: str, seen: Seen) -> None:
        folder = self._folder / moment
        write_facts(folder, self._rank, seen.facts)
        held = self._held(seen.tensors)
        if held:
            save_file(held, folder / f"rank_{self._rank}.safetensors")

    def _held(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this rank writes: all, or what differs from rank 0."""
        stored = {key: _storable(tensor) for key, tensor in tensors.items()}
        if self._world is None or self._world.kind != "real":
            return stored
        shared = {key: digest(tensor) for key, tensor in stored.items() if not key.startswith(_OWN)}
        first = json.loads(self._world.broadcast_text(json.dumps(shared)))
        return {k: t for k, t in stored.items() if self._rank == 0 or k not in shared or first.get(k) != shared[k]}


def write_facts(folder: Path, rank: int, facts: dict[str, Any]) -> None:
    """What a rank says of a moment, besides tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{rank}.json").write_text(json.dumps(facts))


def _number(value: Tensor | float | None) -> float | None:
    return None if value is None else float(value.detach() if isinstance(value, Tensor) else value)


def _storable(tensor: Tensor) -> Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous()


def name_of(step: int) -> str:
    """The folder of a step, counted from 1."""
    return f"step_{step:06d}"


class Recorded:
    """A recording to read; tensors are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._facts: dict[tuple[str, int], dict[str, Any]] = {}
        self._files: dict[tuple[str, int], Any] = {}
        self._keys: dict[tuple[str, int], dict[str, None]] = {}

    @cached_property
    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step_")) for path in self.folder.glob("step_*"))

    @cached_property
    def num_ranks(self) -> int:
        return len(list((self.folder / START).glob("rank_*.json")))

    def facts(self, moment: str, rank: int = 0) -> dict[str, Any]:
        """What a rank said of a moment, besides tensors."""
        if (moment, rank) not in self._facts:
            text = (self.folder / moment / f"rank_{rank}.json").read_text()
            self._facts[moment, rank] = json.loads(text)
        return self._facts[moment, rank]

    def keys(self, moment: str, kind: str) -> list[str]:
        """Of tensors that any rank holds of a kind, in the order of the model, without the kind."""
        found: dict[str, None] = {}
        for rank in range(self.num_ranks):
            found |= self._own_keys(moment, rank)
        return [key.removeprefix(f"{kind}/") for key in found if key.startswith(f"{kind}/")]

    def versions(self, moment: str, key: str) -> dict[int, Tensor]:
        """By rank: that of rank 0 (which all hold that are not named), and those that differ from it."""
        return {r: self.tensor(moment, key, r) for r in range(self.num_ranks) if key in self._own_keys(moment, r)}

    def tensor(self, moment: str, key: str, rank: int = 0) -> Tensor:
        """As this rank holds it."""
        holder = rank if key in self._own_keys(moment, rank) else 0
        return self._file(moment, holder).get_tensor(key)  # type: ignore[no-any-return]  # untyped in safetensors

    def has(self, moment: str, key: str, rank: int = 0) -> bool:
        """Whether this rank holds it."""
        if key in self._own_keys(moment, rank):
            return True
        kind, _, name = key.partition("/")
        without = self.facts(moment, rank).get("without", ()) if kind == "gradients" else ()
        return name not in without and key in self._own_keys(moment, 0)

    def _own_keys(self, moment: str, rank: int) -> dict[str, None]:
        """In the order of the file; read once, since every tensor is looked up in them several times."""
        if (moment, rank) not in self._keys:
            file = self._file(moment, rank)
            self._keys[moment, rank] = {} if file is None else dict.fromkeys(file.keys())
        return self._keys[moment, rank]

    def _file(self, moment: str, rank: int) -> Any:
        if (moment, rank) not in self._files:
            path = self.folder / moment / f"rank_{rank}.safetensors"
            self._files[moment, rank] = safe_open(path, framework="pt") if path.is_file() else None
        return self._files[moment, rank]
