"""A run's folder on disk: who owns it, what lies in it.

runs/digits/  run.json  metrics.jsonl  logs/rank_0.log  checkpoints/step_000500/
"""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from shoal.errors import CheckpointError
from shoal.world import World


def new_folder(base: Path) -> Path:
    """Create `base`, or `base-2`, `base-3`, ...: mkdir is atomic, so two runs at once get two folders."""
    base.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def newest_folder(base: Path) -> Path | None:
    """The folder of the latest run of that name (`base`, `base-2`, ...) that has a checkpoint."""
    family = [base, *base.parent.glob(f"{base.name}-*")]
    found = [path for path in family if any(path.glob("checkpoints/step_*"))]
    return max(found, key=lambda path: (path / "checkpoints").stat().st_mtime, default=None)


@dataclass(kw_only=True)
class RunFolder:
    """The folder of one run, held by one run at a time."""

    path: Path
    _lock: IO[str] | None = field(default=None, repr=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @staticmethod
    def open(path: Path, world: World) -> "RunFolder":
        """Create or enter a folder; collective.

        Raises:
            CheckpointError: another process writes to it now (WorldError on the other ranks).
        """
        folder = RunFolder(path=path)
        world.decide(folder._take)
        return folder

    def _take(self) -> str:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a+")
        except OSError as error:
            raise CheckpointError(f"cannot write to the run folder {self.path}: {error}.") from None
        try:
            # Released by the kernel when the holder dies, however it dies.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise CheckpointError(
                f"{self.path} is being written by {holder}. Wait for it, or choose another folder: --run runs/other"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()}")
        lock.flush()
        self._lock = lock
        return ""

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write run.json, at once or not at all."""
        partial = self.path / "run.json.tmp"
        partial.write_text(json.dumps(facts, indent=2, default=str) + "\n")
        partial.replace(self.path / "run.json")

    def close(self) -> None:
        """Let another run have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
