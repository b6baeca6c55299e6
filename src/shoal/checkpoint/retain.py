"""Make room in a run's folder by hand: what a run in progress does by itself with `keep`."""

from dataclasses import dataclass, field
from pathlib import Path

from shoal.checkpoint.read import verify
from shoal.checkpoint.shelf import FolderLock, leftovers, list_checkpoints, remove_checkpoint, remove_leftovers
from shoal.errors import CheckpointError


@dataclass(kw_only=True)
class Collected:
    """What went, or would go; what stays."""

    removed: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    num_bytes: int = 0  # of what went


def collect(folder: Path, keep: int, *, dry_run: bool = False) -> Collected:
    """Delete all but the newest `keep` good checkpoints, and what killed writers left.

    Args:
        folder: a run's folder, or that of its checkpoints.
        dry_run: say what would go.

    Raises:
        CheckpointError: a run writes here now, no such folder, or none of its checkpoints is good.
    """
    if keep < 1:
        raise CheckpointError(f"keep={keep}: at least the newest good checkpoint is kept, so keep is 1 or more.")
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if not folder.is_dir():
        raise CheckpointError(f"no run folder {folder}.")
    lock = FolderLock(folder)
    try:
        found = _chosen(folder, keep)
        if not dry_run:
            for path in found.removed:
                if path.exists():
                    remove_checkpoint(path)
            remove_leftovers(folder)
        return found
    finally:
        lock.close()


def _chosen(folder: Path, keep: int) -> Collected:
    found = Collected()
    damaged: list[Path] = []
    for checkpoint in list_checkpoints(folder):
        good = not checkpoint.is_replaced and len(found.kept) < keep and not verify(checkpoint.path)
        target = found.kept if good else found.removed if len(found.kept) >= keep else damaged
        target.append(checkpoint.path)
    if not found.kept and damaged:
        raise CheckpointError(
            f"none of the {len(damaged)} checkpoints in {folder} is good, so none is deleted: something may be saved "
            f"of them. Look: shoal checkpoint verify {folder}"
        )
    found.removed += damaged
    found.num_bytes = sum(
        file.stat().st_size for path in (*found.removed, *leftovers(folder)) for file in path.iterdir()
    )
    return found
