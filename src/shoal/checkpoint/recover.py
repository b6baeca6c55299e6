"""From copies in shared memory to a checkpoint: the newest step of which every part is left, on whichever host.

On one host the files become a checkpoint where they lie. Ranks on several cannot read each other's memory: they write
the parts into the run's folder, as a save does, and each then reads what it needs.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.fence import Fence
from shoal.checkpoint.manifest import MANIFEST_NAME, Manifest, join
from shoal.checkpoint.memory import Seal, checksum
from shoal.checkpoint.shelf import Found, list_checkpoints, name_of, publish, sync_folder, write_file
from shoal.checkpoint.snapshot import Image
from shoal.checkpoint.tensorfile import header_bytes
from shoal.checkpoint.together import Slot, open_slot
from shoal.checkpoint.write import own_manifest, versions, write_own
from shoal.errors import CheckpointError
from shoal.sealed import all_seals
from shoal.world import World


@dataclass(frozen=True)
class Part:
    """What one rank of an earlier start has sealed, and on which host it lies."""

    generation: int
    number: int
    step: int
    layout: str
    size: int
    rank: int
    node: int
    path: str

    @property
    def of(self) -> tuple[int, int, int, str, int]:
        """What all parts of a copy have in common, the newest copy last in order."""
        return self.step, self.generation, self.number, self.layout, self.size


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Where copies are, and where a checkpoint may be made of them.

    Attributes:
        folder: in shared memory, each host's own.
        checkpoints: of the run, which all hosts see.
        fence: on rank 0, its right to commit there.
    """

    folder: Path
    checkpoints: Path
    fence: Fence | None = None


def recover(memory: Memory, world: World, job: Mapping[str, Any], *, least: int = 0) -> Found | None:
    """The newest copy that is whole, as a checkpoint; collective. The ranks share out the work, whatever their number.

    Args:
        job: the identity of the run, as in its checkpoints.
        least: the step that it must be of, or of a later one.
    """
    is_alone = world.place.num_nodes == 1
    made = _made_before(memory, world, least) if is_alone else None
    least = least if made is None else made.step + 1
    parts = _all_parts(memory.folder, world)
    torn: set[tuple[int, str]] = set()
    while chosen := [part for part in choose(parts, torn) if part.step >= least]:
        making = _Making(memory, world, job, chosen)
        found = making.make()
        if found is not None or not making.torn:
            return found or made
        torn |= making.torn
    return made


def choose(parts: Sequence[Part], torn: set[tuple[int, str]]) -> list[Part]:
    """The parts of the newest copy that is whole, in order of rank; none where no copy is.

    Args:
        torn: parts, by host and path, that are of no use.
    """
    copies: dict[tuple[int, int, int, str, int], dict[int, Part]] = {}
    for part in parts:
        if (part.node, part.path) not in torn and part.rank < part.size:
            copies.setdefault(part.of, {}).setdefault(part.rank, part)
    whole = [of for of, by_rank in copies.items() if len(by_rank) == of[-1]]
    return [part for _, part in sorted(copies[max(whole)].items())] if whole else []


def _made_before(memory: Memory, world: World, least: int) -> Found | None:
    """A checkpoint in memory that a start before this one has made already."""
    newest = world.decide(
        lambda: str(next((found.path for found in list_checkpoints(memory.folder) if found.step >= least), ""))
    )
    return Found(int(Path(newest).name.removeprefix("step_")), Path(newest)) if newest else None


def _all_parts(folder: Path, world: World) -> list[Part]:
    """What is sealed on any host; the same on every rank."""
    own = []
    if world.place.local_rank == 0:
        for generation, rank, path in all_seals(folder):
            if (seal := Seal.read(path)) is not None:
                told = seal.number, seal.step, seal.layout, seal.size
                own.append(Part(generation, *told, rank, world.place.node, str(path)))
    rows = world.gather_text(json.dumps([list(vars(part).values()) for part in own]))
    return [Part(*row) for text in rows for row in json.loads(text)]


@dataclass
class _Making:
    """One try to make a checkpoint of one copy; every rank has the same."""

    memory: Memory
    world: World
    job: Mapping[str, Any]
    parts: list[Part]
    torn: set[tuple[int, str]] = field(default_factory=set)

    @property
    def _is_alone(self) -> bool:
        return self.world.place.num_nodes == 1

    def make(self) -> Found | None:
        """The checkpoint; None where a part is torn (then it is in `torn`), or the disk refuses."""
        step = self.parts[0].step
        slot = self._open(step)
        if slot is None:
            return None
        told: dict[int, Any] = {number: self._as_file(slot, number) for number in self._own()}
        rows = {int(k): row for text in self.world.gather_text(json.dumps(told)) for k, row in json.loads(text).items()}
        manifests = [rows[number] for number in sorted(rows)]
        self.torn = {(p.node, p.path) for p, text in zip(self.parts, manifests, strict=True) if text == ""}
        is_made = self.world.decide(lambda: self._commit(slot, manifests))
        return Found(step, slot.final) if is_made else None

    def _open(self, step: int) -> Slot | None:
        def choose_slot() -> str:
            try:
                if not self._is_alone:
                    return str(open_slot(self.memory.checkpoints, step).temporary)
                temporary = self.memory.folder / f"{name_of(step)}.part"
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                return str(temporary)
            except OSError:
                return ""

        temporary = self.world.decide(choose_slot)
        above = self.memory.folder if self._is_alone else self.memory.checkpoints
        return Slot(Path(temporary), above / name_of(step)) if temporary else None

    def _own(self) -> list[int]:
        """The parts that this rank makes a file of: its share of those on its host."""
        place = self.world.place
        here = [number for number, part in enumerate(self.parts) if part.node == place.node]
        return here[place.local_rank :: place.local_size]

    def _as_file(self, slot: Slot, number: int) -> str | None:
        """A part as a file of the checkpoint, on one host without a copy.

        Returns its manifest; nothing where it is torn, None where the disk refuses.
        """
        path = Path(self.parts[number].path)
        seal = Seal.read(path)
        image = None if seal is None else _checked(seal, path)
        if seal is None or image is None:
            return ""
        header = Manifest(step=seal.step, layout=seal.layout, job=dict(self.job), versions=versions())
        try:
            if not self._is_alone:
                return write_own(slot, number, image, header).to_bytes().decode()
            if image.spans:
                os.link(path, slot.path_of(number, ".safetensors"))
            return own_manifest(header, number, image).to_bytes().decode()
        except OSError:
            return None

    def _commit(self, slot: Slot, manifests: list[str | None]) -> str:
        """On rank 0; nothing where a part is torn, or could not be written."""
        try:
            if not all(manifests):
                raise CheckpointError("a part is missing.")
            whole = join([Manifest.from_bytes(text.encode(), whole=False) for text in manifests if text])
            write_file(slot.temporary / MANIFEST_NAME, [memoryview(whole.to_bytes())])
            if self._is_alone:
                os.rename(slot.temporary, slot.final)
            else:
                sync_folder(slot.temporary)
                publish(slot.temporary, slot.final, self.memory.fence)
        except (CheckpointError, OSError):  # what is on the disk stands
            shutil.rmtree(slot.temporary, ignore_errors=True)
            return ""
        return "made"


def _checked(seal: Seal, path: Path) -> Image | None:
    """A sealed file, whose bytes are those that were sealed; None where they are not."""
    image = seal.image(torch.empty(0, dtype=torch.uint8, device="cpu"))
    if not image.spans:
        return None if seal.checksum else image
    start, size = header_bytes(image.spans), path.stat().st_size
    if size < len(start):
        return None
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    image = seal.image(raw[len(start) :])
    is_same = bytes(raw[: len(start)].numpy()) == start and checksum(image.data) == seal.checksum
    return image if is_same else None
