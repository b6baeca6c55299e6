"""Where a run begins: its folder, the checkpoint that it goes on from, the weights that it is given."""

from pathlib import Path

from torch import nn

from shoal.checkpoint import Found, Writer, list_checkpoints, load_weights, newest_good
from shoal.checkpoint.recover import Memory, recover
from shoal.errors import CheckpointError
from shoal.run.run import Run
from shoal.world import World


def enter_folder(run: Run, resume: str | Path, keep: int) -> Path | None:
    """Take the run's folder, and find the checkpoint to go on from; every rank calls it, and all get the same."""
    world = run.world
    folder = None
    if run.folder is not None:
        folder = run.folder.checkpoints
        world.decide(lambda: _take_folder(run, keep))
        if world.rank != 0:
            run._writer = Writer(folder, keep=keep, world=world)
    if world.place.generation and folder is not None:
        left = _left_by_earlier(run, folder)
        if left is not None:
            return left.path
    if resume == "never":
        world.decide(lambda: _check_fresh(folder))
        return None
    if resume == "auto":
        if folder is None:
            raise CheckpointError("resume='auto' needs a run folder to look in: assemble(..., folder='runs/mine').")
        found, skipped = newest_good(folder, world)
    else:
        found, skipped = newest_good(Path(resume), world)
        if found is None:
            raise CheckpointError(f"no good checkpoint in {resume}." + "".join(f"\n  {why}" for why in skipped))
    for why in skipped:
        run.say(f"left out: {why}")
    return None if found is None else found.path


def _left_by_earlier(run: Run, folder: Path) -> Found | None:
    """What the generations before this one have left: in memory or on the disk, the newer one."""
    world = run.world
    newest = int(world.decide(lambda: str(max((found.step for found in list_checkpoints(folder)), default=-1))))
    # Of the same step, memory is read sooner; from several hosts it would have to be written first.
    made = _from_memory(run, folder, least=newest + (world.place.num_nodes > 1))
    if made is not None:
        return made
    found, skipped = newest_good(folder, world)
    for why in skipped:
        run.say(f"left out: {why}")
    if found is not None and found.step >= newest:
        return found
    return _from_memory(run, folder, least=0 if found is None else found.step + 1) or found


def _from_memory(run: Run, folder: Path, *, least: int) -> Found | None:
    place = run.world.place
    if not place.memory:
        return None
    fence = run._writer.fence if run._writer is not None else None
    memory = Memory(folder=Path(place.memory), checkpoints=folder, fence=fence)
    found = recover(memory, run.world, run.identity, least=least)
    if found is not None and place.num_nodes > 1:
        run.say(f"memory  step {found.step} was left in the memory of {place.num_nodes} hosts: written to {found.path}")
    return found


def _take_folder(run: Run, keep: int) -> str:
    """On rank 0, which alone holds the lock."""
    assert run.folder is not None
    run.folder.make()
    run._writer = Writer(run.folder.checkpoints, keep=keep, world=run.world)
    return ""


def _check_fresh(folder: Path | None) -> str:
    if folder is not None and any(folder.glob("step_*")):
        raise CheckpointError(
            f"{folder} already holds checkpoints, which a fresh run would mix with its own. Go on with "
            "--resume auto, or choose another folder: --run runs/other"
        )
    return ""


def take_weights(path: Path, model: nn.Module, world: World) -> str:
    """Fill a placed model from a file or folder, each rank what it holds, or stop all ranks; returns what was taken."""
    loaded, why = "", ""
    try:
        loaded = str(load_weights(path, model, world))
    except (CheckpointError, OSError) as error:
        why = str(error) or repr(error)
    problems = {rank: text for rank, text in enumerate(world.gather_text(why)) if text}
    if problems:
        rank, text = next(iter(problems.items()))
        raise CheckpointError(text if world.size == 1 else f"rank {rank}: {text}")
    return f"weights {loaded}"
