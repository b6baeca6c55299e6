"""shoal checkpoint: look at checkpoints, and hand weights to plain PyTorch."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.checkpoint import collect, compare, list_checkpoints, verify
from shoal.checkpoint import export as export_weights
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


def verified(source: Path) -> dict[str, Any]:
    """Every problem of one checkpoint, or of all of a run, by file and tensor; each byte is read."""
    single = (source / "manifest.json").exists()
    paths = [source] if single else [Path(row["path"]) for row in listing(source)]
    if not paths:
        raise CheckpointError(f"no checkpoint in {source}.")
    problems = {str(path): verify(path) for path in paths}
    lines = [f"{path}: {'; '.join(found) if found else 'good'}" for path, found in problems.items()]
    is_good = not any(problems.values())
    return {"exit_code": 0 if is_good else 1, "problems": problems, "text": "\n".join(lines)}


def difference(first: Path, second: Path, *, show: int = 20) -> dict[str, Any]:
    """What two checkpoints hold that is not the same."""
    found = compare(first, second)
    lines = [f"comparing {found.paths[0]} and {found.paths[1]}", *found.facts, *found.only]
    lines += [
        f"{tensor.name}: differs by {tensor.absolute:.3g}, {tensor.relative:.2g} of its largest value, at "
        f"{list(tensor.first)}"
        for tensor in found.tensors[:show]
    ]
    if len(found.tensors) > show:
        lines.append(f"... and {len(found.tensors) - show} more that differ less")
    same = "equal to the bit: all" if found.is_same else "equal to the bit:"
    lines.append(f"{same} {found.num_equal} tensors" if found.is_same else f"{same} {found.num_equal} other tensors")
    return {
        "exit_code": 0 if found.is_same else 1,
        "paths": [str(path) for path in found.paths],
        "facts": found.facts,
        "only": found.only,
        "differ": [asdict(tensor) for tensor in found.tensors],
        "num_equal": found.num_equal,
        "text": "\n".join(lines),
    }


def make_room(source: Path, keep: int, *, dry_run: bool) -> dict[str, Any]:
    """Delete old checkpoints and leftovers."""
    found = collect(source, keep, dry_run=dry_run)
    what = "would go" if dry_run else "went"
    lines = [f"kept       {path}" for path in found.kept] + [f"{what:<11}{path}" for path in found.removed]
    lines.append(f"{show_bytes(found.num_bytes)} {what}")
    return {
        "exit_code": 0,
        "kept": [str(path) for path in found.kept],
        "removed": [str(path) for path in found.removed],
        "num_bytes": found.num_bytes,
        "dry_run": dry_run,
        "text": "\n".join(lines),
    }
