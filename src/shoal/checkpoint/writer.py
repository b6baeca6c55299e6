"""Save a running training without stopping it: copy, hand over to a thread, keep the newest few."""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.read import looks_complete
from shoal.checkpoint.shelf import list_checkpoints, remove_checkpoint
from shoal.checkpoint.snapshot import HostBuffer, Image
from shoal.checkpoint.write import commit, failure, new_header, open_folder, reason
from shoal.errors import CheckpointError

_NICENESS = 10  # of the writing thread, where the steps compete with it for cores


@dataclass(frozen=True)
class Saved:
    """One committed checkpoint; `blocked_s` is what the training loop paid, `write_s` what the thread did."""

    step: int
    path: Path
    num_bytes: int
    blocked_s: float
    write_s: float


class Writer:
    """Saves a running training: `submit` copies the state and returns, a thread does the rest.

    At most one save is in flight; the next `submit` waits for it. A disk that is full or fails never stops
    the training: the failure is told to `on_event` (from the thread) and kept in `events`. One writer per
    folder: a second process is refused. After each commit, all but the newest `keep` complete checkpoints up
    to this step are deleted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least the newest checkpoint is kept, so keep is 1 or more.")
        self.folder = folder
        self.saved: list[Saved] = []
        self.events: list[str] = []
        self._keep = keep
        self._on_event = on_event
        self._buffer = HostBuffer()
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None
        self._succeeded = True
        self._lock = open_folder(folder)

    def submit(self, tree: object, *, step: int, job: Mapping[str, Any], layout: str) -> None:
        """Take the state of `step` and save it in the background; the tree may change once this returns.

        A step that this writer has committed last is not written again. `job` is the identity that a resume
        compares; it holds plain values.

        Raises:
            CheckpointError: a value that cannot be stored (never a trouble of the disk).
        """
        started = time.perf_counter()
        self.wait()
        if self.saved and self.saved[-1].step == step:
            return
        try:
            image = self._buffer.take(tree)
        except OSError as error:
            self._fail(step, error)
            return
        header = new_header(step, job, layout)
        blocked_s = time.perf_counter() - started
        # Not a daemon: an interpreter that ends waits for it. One thread per save: none idles at a fork.
        self._thread = threading.Thread(
            target=self._run, args=(image, header, blocked_s), name=f"shoal-checkpoint-{step}"
        )
        self._thread.start()

    def wait(self) -> bool:
        """Wait for the save in flight; whether the last save was committed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug
        return self._succeeded

    def close(self) -> None:
        """Finish the save in flight and let another writer in."""
        try:
            self.wait()
        finally:
            self._lock.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, image: Image, header: Manifest, blocked_s: float) -> None:
        started = time.perf_counter()
        if sys.platform == "linux":  # there a thread has a niceness of its own: the steps go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            path = commit(self.folder, image, header)
            write_s = time.perf_counter() - started
            self.saved.append(Saved(header.step, path, image.num_bytes, blocked_s, write_s))
            self._succeeded = True
            self._retain(header.step)
        except OSError as error:
            self._fail(header.step, error)
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

    def _fail(self, step: int, error: OSError) -> None:
        self._succeeded = False
        self._tell(f"{failure(self.folder, step, error)}; training goes on")

    def _tell(self, event: str) -> None:
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)
