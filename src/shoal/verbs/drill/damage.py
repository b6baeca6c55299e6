"""Damage to a checkpoint on the disk: it must be found, and the one before it taken."""

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from shoal.checkpoint import newest_good
from shoal.checkpoint.manifest import MANIFEST_NAME
from shoal.errors import CheckpointError
from shoal.verbs.drill.follow import Measured, SilentError
from shoal.verbs.drill.trial import TrialError

_PAGE = 4096


def run(name: str, folder: Path, reference: Path, seed: int) -> Measured:
    """Do it to the newest checkpoint of a copy.

    Raises:
        TrialError: what should follow did not.
    """
    shutil.copytree(reference / "checkpoints", folder / "checkpoints")
    *_, before, newest = sorted((folder / "checkpoints").glob("step_*"))
    DAMAGES[name](newest, random.Random(seed))
    began = time.monotonic()
    try:
        good, passed_over = newest_good(folder)
    except CheckpointError as error:
        raise TrialError(str(error)) from error
    if good is not None and good.path == newest:
        raise SilentError(f"{name} was not seen")
    if good is None or good.path != before:
        raise TrialError(f"the checkpoint before it was not taken, but {good}")
    if not any(newest.name in line for line in passed_over):
        raise TrialError(f"what is wrong was not said: {passed_over}")
    if (folder.parent / "outside").exists():
        raise SilentError("a file was written outside")
    return Measured(told_s=time.monotonic() - began)


def _some_file(folder: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(folder.iterdir()))


def _flip(folder: Path, chance: random.Random) -> None:
    path = _some_file(folder, chance)
    raw = bytearray(path.read_bytes())
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)


def _zero_a_page(folder: Path, chance: random.Random) -> None:
    path = _some_file(folder, chance)
    raw = bytearray(path.read_bytes())
    begin = chance.randrange(0, len(raw), _PAGE)
    raw[begin : begin + _PAGE] = bytes(len(raw[begin : begin + _PAGE]))
    path.write_bytes(raw)


def _truncate(folder: Path, chance: random.Random) -> None:
    path = _some_file(folder, chance)
    os.truncate(path, chance.randrange(path.stat().st_size))


def _swap(folder: Path, chance: random.Random) -> None:
    """Data of another step, as a restored backup would have it."""
    older = min(folder.parent.glob("step_*"))
    name = chance.choice([path.name for path in folder.iterdir()])
    shutil.copy2(older / name, folder / name)


def _remove(folder: Path, chance: random.Random) -> None:
    _some_file(folder, chance).unlink()


def _pickle(folder: Path, chance: random.Random) -> None:
    """One that makes a folder when it is read: os.mkdir, in the oldest protocol."""
    made = str(folder.parents[2] / "outside")
    _some_file(folder, chance).write_bytes(b"cos\nmkdir\n(V%s\ntR." % made.encode())


def _name_outside(folder: Path, chance: random.Random) -> None:
    """A manifest that is whole by its own checksum, and names a file above its folder."""
    data = next(path for path in folder.iterdir() if path.name != MANIFEST_NAME)
    _edit(folder, data.name, chance.choice(["../", "../../", "/"]) + data.name)


def _claim_much(folder: Path, chance: random.Random) -> None:
    """Sizes that no memory has."""
    fields = json.loads((folder / MANIFEST_NAME).read_bytes())
    shape = chance.choice([tensor["shape"] for tensor in fields["tensors"].values() if tensor["shape"]])
    _edit(folder, json.dumps(shape, separators=(",", ":")), f"[{2 ** chance.randint(40, 62)}]")


def _edit(folder: Path, old: str, new: str) -> None:
    path = folder / MANIFEST_NAME
    body, mark, _ = path.read_text().rpartition(',\n"sha256":')
    if not mark or old not in body:
        raise TrialError(f"the drill does not know this form of a manifest: no {old}")
    body = body.replace(old, new)
    path.write_text(f'{body}{mark}"{hashlib.sha256(body.encode()).hexdigest()}"}}\n')


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "a flipped bit": _flip,
    "a page of zeros": _zero_a_page,
    "cut short": _truncate,
    "a file of another step": _swap,
    "a missing file": _remove,
    "a pickle": _pickle,
    "a file name outside": _name_outside,
    "sizes that cannot be": _claim_much,
}
