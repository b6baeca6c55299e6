"""A run's folder on disk: who owns it, what lies in it.

runs/digits/  run.json  metrics.jsonl  logs/rank_0.log  checkpoints/step_000500/
"""

import fcntl
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError


def to_json(value: Any, *, indent: int | None = None) -> str:
    """As any reader takes it: a number that is not finite is null, and what JSON does not know is its text."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_finite(key) if isinstance(key, float) else key: _finite(of) for key, of in value.items()}
    return [_finite(of) for of in value] if isinstance(value, list | tuple) else value


def new_folder(base: Path) -> Path:
    """Create `base`, or `base-2`, `base-3`, ...: mkdir is atomic, so two runs at once get two folders."""
    number = 1
    while True:
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def missing(path: Path) -> list[Path]:
    """What must be made for a folder to be there, the innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _folders(parent: Path) -> list[Path]:
    return sorted(parent.iterdir()) if parent.is_dir() else []


def newest_folder(base: Path) -> Path | None:
    """The folder of the latest run of that name (`base`, `base-2`, ...) that has a checkpoint."""
    numbered = re.compile(re.escape(base.name) + r"-[0-9]+")
    family = [base, *(path for path in _folders(base.parent) if numbered.fullmatch(path.name))]
    found = [path for path in family if any(path.glob("checkpoints/step_*"))]
    return max(found, key=lambda path: (path / "checkpoints").stat().st_mtime, default=None)


def is_in_use(folder: Path) -> bool:
    """Whether a process writes here now: two runs may have been given one folder."""
    try:
        with (folder / "checkpoints" / ".lock").open("r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run; the writer of its checkpoints holds it, one run at a time."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def make(self) -> None:
        """Create what is missing of it.

        Raises:
            CheckpointError: it cannot be written to.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot write to the run folder {self.path}: {error.strerror}.") from None

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write run.json, at once or not at all."""
        partial = self.path / "run.json.tmp"
        partial.write_text(to_json(facts, indent=2) + "\n")
        partial.replace(self.path / "run.json")
