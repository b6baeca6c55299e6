"""Save a running training without stopping it: copy, hand over to a thread, keep the newest few."""

import errno
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.fence import Fence
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.read import looks_complete
from shoal.checkpoint.shelf import list_checkpoints, name_of, reason, remove_checkpoint
from shoal.checkpoint.snapshot import HostBuffer, Image
from shoal.checkpoint.together import Patience, Slot, discard, inode_of, open_slot, wait_for_name
from shoal.checkpoint.write import commit, failure, hand_over, new_header, open_folder
from shoal.errors import CheckpointError
from shoal.world import World

_NICENESS = 10  # of the writing thread, where the steps compete with it for cores
_HURRY_S = 5.0


@dataclass(frozen=True)
class Saved:
    """One committed checkpoint; `blocked_s` is what the training loop paid, `write_s` what the thread did.

    `num_bytes` is what this rank wrote of it.
    """

    step: int
    path: Path
    num_bytes: int
    blocked_s: float
    write_s: float


@dataclass(kw_only=True)
class _Save:
    """A save in flight, as one rank sees it."""

    slot: Slot
    inode: int
    header: Manifest
    image: Image
    others: list[int]  # ranks besides 0 that take part
    blocked_s: float = 0.0
    write_s: float = 0.0

    def saved(self) -> Saved:
        return Saved(self.header.step, self.slot.final, self.image.num_bytes, self.blocked_s, self.write_s)


class Writer:
    """Saves a running training: `submit` copies the state and returns, a thread does the rest.

    Of a world of several ranks every one has a writer, and writes what it holds; rank 0 joins it to one checkpoint.
    At most one save is in flight; the next `submit` waits for it. A disk that is full or fails, on any rank, never
    stops the training: each rank tells `on_event` (perhaps from the thread) and keeps it in `events`. One run per
    folder: a second one is refused. After each commit, all but the newest `keep` complete checkpoints up
    to this step are deleted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        on_event: Callable[[str], None] | None = None,
        world: World | None = None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least the newest checkpoint is kept, so keep is 1 or more.")
        self.folder = folder
        self.saved: list[Saved] = []
        self.events: list[str] = []
        self._keep = keep
        self._on_event = on_event
        self._world = world if world is not None and world.kind == "real" else None
        self._rank = self._world.rank if self._world else 0
        self._buffer = HostBuffer()
        self._patience = Patience()
        self._thread: threading.Thread | None = None
        self._pending: _Save | None = None  # handed over: rank 0 will say whether it has become a checkpoint
        self._others: list[int] = []  # of the last save
        self._bug: BaseException | None = None
        self._trouble = ""  # of the last save
        place = world.place if world is not None else None
        is_later = place is not None and place.generation > 0
        self._lock = open_folder(folder, wants_lock=not is_later) if self._rank == 0 else None
        self.fence = _claim(folder, place.fence if place else 0) if self._rank == 0 else None

    def prepare(self, tree: object) -> None:
        """Make room, in the background, for the copies of states like this one, so that the first save is as short as
        the later ones. Where there is no memory, nothing is said: a save will say it.

        Raises:
            CheckpointError: a value that cannot be stored.
        """
        if self._thread is None:
            room = self._buffer.room_for(tree, None if self._world is None else self._world.mesh, self._rank)
            self._thread = threading.Thread(target=self._make, args=(room,), name="shoal-checkpoint-room")
            self._thread.start()

    def submit(self, tree: object, *, step: int, job: Mapping[str, Any], layout: str) -> None:
        """Take the state of `step` and save it in the background; the tree may change once this returns.

        Called on every rank of the world. A step that was committed last is not written again. `job` is the
        identity that a resume compares; it holds plain values.

        Raises:
            CheckpointError: a value that cannot be stored (never a trouble of the disk), on all ranks together.
        """
        started = time.perf_counter()
        self._finish_writing()
        header = new_header(step, job, layout)
        slot = self._open(step)
        save = None if slot is None else self._take(slot, tree, header)
        if save is None:
            return
        save.blocked_s = time.perf_counter() - started
        self._others = save.others
        self._pending = save if self._rank else None
        self._patience.begun.clear()
        if self._rank in [0, *save.others]:
            # Not a daemon: an interpreter that ends waits for it. One thread per save: none idles at a fork.
            self._thread = threading.Thread(target=self._run, args=(save,), name=f"shoal-checkpoint-{step}")
            self._thread.start()

    def wait(self) -> bool:
        """Wait for the save in flight; whether the last save was committed."""
        self._join()
        save, self._pending = self._pending, None
        if save is not None:
            try:
                wait_for_name(save.slot, save.inode, self._patience)
                self._succeed(save)
            except OSError as error:
                self._fail(save.header.step, error)
        return not self._trouble

    def close(self, *, hurry: bool = False) -> None:
        """Finish the save in flight and let another writer in.

        Args:
            hurry: another rank may be gone (the training has failed), so wait for the others a few seconds only.
        """
        if hurry:
            self._patience.limit_s = _HURRY_S
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(hurry=kind is not None)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug

    def _finish_writing(self) -> None:
        """Until no rank is writing. A rank that has died meanwhile ends this at once, as it ends any collective."""
        if self._world is not None and self._others:
            if self._rank:
                self._join()
            else:
                self._patience.until_begun(self._thread)
            self._world.barrier()
        self._join()

    def _open(self, step: int) -> Slot | None:
        """The folder that rank 0 has made for this save; None where there is none, and it was told why.

        In the same breath rank 0 says what came of the save before.
        """
        told = {"before": self._trouble, "name": "", "failed": ""}
        if self._rank == 0 and not (self.saved and self.saved[-1].step == step):
            try:
                told["name"] = open_slot(self.folder, step).temporary.name
            except OSError as error:
                told["failed"] = reason(error)
        if self._world is not None:
            told = json.loads(self._world.broadcast_text(json.dumps(told)))
        save, self._pending = self._pending, None
        if save is not None and told["before"]:
            self._fail(save.header.step, OSError(errno.EIO, told["before"]))
        elif save is not None:
            self._succeed(save)
        if told["failed"]:
            self._fail(step, OSError(errno.EIO, told["failed"]))
        return Slot(self.folder / told["name"], self.folder / name_of(step)) if told["name"] else None

    def _take(self, slot: Slot, tree: object, header: Manifest) -> _Save | None:
        """Copy what this rank writes; None where any rank could not, and it was told why."""
        image, told, refused = self._snapshot(slot, tree)
        rows = self._gather(told)
        wrong = [rank for rank, row in enumerate(rows) if row["failed"] or row["refused"]]
        if not wrong and image is not None:
            # A rank that knows of more than rank 0 (optimizer state of its own) tells it, though it write no tensor.
            others = [r for r, row in enumerate(rows) if r and (row["writes"] or row["tree"] != rows[0]["tree"])]
            return _Save(slot=slot, inode=told["inode"], header=header, image=image, others=others)
        if self._rank == 0:
            discard(slot)
        by, row = f"rank {wrong[0]}: " if self._world else "", rows[wrong[0]]
        if row["refused"]:
            raise refused or CheckpointError(f"{by}{row['refused']}")
        self._fail(header.step, OSError(errno.EIO, f"{by}{row['failed']}"))
        return None

    def _snapshot(self, slot: Slot, tree: object) -> tuple[Image | None, dict[str, Any], CheckpointError | None]:
        """The copy, what the other ranks must know of it, and what cannot be stored."""
        told: dict[str, Any] = {"failed": "", "refused": "", "tree": "", "writes": False, "inode": 0}
        try:
            told["inode"] = inode_of(slot)
            image = self._buffer.take(tree, None if self._world is None else self._world.mesh, self._rank)
            told["tree"] = hashlib.sha256(json.dumps(image.skeleton).encode()).hexdigest()
            told["writes"] = bool(image.spans)
        except OSError as error:
            told["failed"] = reason(error)
        except CheckpointError as error:
            told["refused"] = str(error)
            return None, told, error
        else:
            return image, told, None
        return None, told, None

    def _gather(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        if self._world is None:
            return [told]
        return [json.loads(row) for row in self._world.gather_text(json.dumps(told))]

    def _make(self, room: Callable[[], object]) -> None:
        _let_steps_go_first()
        try:
            room()
        except OSError:
            return
        except BaseException as bug:
            self._bug = bug

    def _run(self, save: _Save) -> None:
        started = time.perf_counter()
        _let_steps_go_first()
        try:
            if self._rank == 0:
                commit(save.slot, save.image, save.header, save.others, self._patience, self.fence)
            else:
                hand_over(save.slot, self._rank, save.image, save.header)
            save.write_s = time.perf_counter() - started
            if self._rank == 0:
                self._succeed(save)
                self._retain(save.header.step)
        except OSError as error:
            self._pending = None
            self._fail(save.header.step, error)
        except BaseException as bug:
            self._bug = bug  # the next wait() raises it in the training's own thread

    def _retain(self, step: int) -> None:
        """Delete what is older than the newest `keep` complete ones; a damaged one does not count as kept."""
        complete = 0
        for found in list_checkpoints(self.folder):
            if found.step > step:
                continue  # of another, longer run: not ours to judge
            if complete < self._keep:
                complete += looks_complete(found.path)
                continue
            try:
                remove_checkpoint(found.path)
            except OSError as error:
                self._tell(f"the old checkpoint {found.path} was not deleted: {reason(error)}; training goes on")

    def _succeed(self, save: _Save) -> None:
        self._trouble = ""
        self.saved.append(save.saved())

    def _fail(self, step: int, error: OSError) -> None:
        self._trouble = reason(error)
        self._tell(f"{failure(self.folder, step, error)}; training goes on")

    def _tell(self, event: str) -> None:
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)


def _let_steps_go_first() -> None:
    if sys.platform == "linux":  # there a thread has a niceness of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _claim(folder: Path, number: int) -> Fence:
    """The number that the launcher has claimed for this start, or the next one."""
    try:
        return Fence(folder, number) if number else Fence.claim(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {reason(error)}") from error
