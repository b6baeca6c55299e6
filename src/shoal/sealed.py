"""Where copies of the state lie in shared memory, and the seal of each: for the ranks and for their launcher.

/dev/shm/shoal-memory-../
    generation_0/
        rank_00000.even             what rank 0 writes of the state: the safetensors file of a checkpoint, mapped
        rank_00000.even.seal        of which copy and step it is, and its checksum; gone while the data change
        rank_00000.odd, ...         the copy before, or after: one of the two is always whole
        kept_0/, kept_1/            of this host's ranks, the copies that another host has too (launch/courier.py)
        near_0/, near_1/            of another host's ranks, the same
    step_000123/                    a copy that all ranks had sealed, made a checkpoint when ranks start again
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

SLOTS = ("even", "odd")
_NUMBER = re.compile(rb'\{"number":(\d{1,18}),')  # a seal begins so


def generation_folder(memory: Path, generation: int) -> Path:
    """Where the copies of one start of the group lie."""
    return memory / f"generation_{generation}"


def file_of(folder: Path, rank: int, slot: str) -> Path:
    """`rank_00003.even`"""
    return folder / f"rank_{rank:05d}.{slot}"


def seal_of(path: Path) -> Path:
    """`rank_00003.even.seal`"""
    return path.with_name(f"{path.name}.seal")


def number_of(path: Path) -> int:
    """Which copy of its generation a sealed file holds, from 1 on; 0 for one that has no seal."""
    try:
        with seal_of(path).open("rb") as file:
            found = _NUMBER.match(file.read(32))
    except OSError:
        return 0
    return int(found[1]) if found else 0


def write_whole(path: Path, text: bytes) -> None:
    """A small file that is never seen half-written."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_bytes(text)
    os.rename(partial, path)


def all_seals(memory: Path) -> Iterator[tuple[int, int, Path]]:
    """Generation, rank and file of whatever is sealed, a rank's own copies first."""
    for pattern in ("generation_*/rank_*.seal", "generation_*/*_?/rank_*.seal"):
        for seal in sorted(memory.glob(pattern)):
            generation = next(part for part in seal.parts if part.startswith("generation_"))
            numbers = generation.removeprefix("generation_"), seal.name.split(".")[0].removeprefix("rank_")
            if all(number.isdecimal() for number in numbers):
                yield int(numbers[0]), int(numbers[1]), seal.with_name(seal.name.removesuffix(".seal"))
