"""shoal checkpoint: look at checkpoints, and hand weights to plain PyTorch."""

from pathlib import Path
from typing import Any

from shoal.checkpoint import export as export_weights
from shoal.checkpoint import list_checkpoints, verify
from shoal.errors import CheckpointError
from shoal.units import show_bytes


def export(source: Path, to: Path, *, force: bool = False) -> dict[str, Any]:
    """Write the weights of a run's newest good checkpoint, or of one checkpoint."""
    done = export_weights(source, to, force=force)
    lines = [f"left out: {why}" for why in done.skipped]
    lines.append(f"{done.num_tensors} tensors of step {done.step} ({show_bytes(done.num_bytes)}) are in {done.path}")
    return {
        "path": str(done.path),
        "step": done.step,
        "num_tensors": done.num_tensors,
        "text": "\n".join(lines),
    }


def listing(source: Path) -> list[dict[str, Any]]:
    """Every checkpoint of a run, newest first, with the first problem of each."""
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    if not folder.is_dir():
        raise CheckpointError(f"no run folder {source}.")
    rows = []
    for found in list_checkpoints(folder):
        problems = verify(found.path)
        num_bytes = sum(file.stat().st_size for file in found.path.iterdir())
        rows.append(
            {
                "step": found.step,
                "path": str(found.path),
                "size": show_bytes(num_bytes),
                "state": f"damaged: {problems[0]}" if problems else "good",
            }
        )
    return rows
