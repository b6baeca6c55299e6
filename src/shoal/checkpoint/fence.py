"""At most one start of a run commits: each claims the next number in the folder, and only the newest may rename.

checkpoints/
    .generation_000007      this start of the group; made with O_EXCL, so of two that want it one gets it
"""

import errno
import os
import re
import socket
from pathlib import Path

from shoal.errors import CheckpointError

_NAME = re.compile(r"\.generation_(\d{6,})")


class Fence:
    """The number of one start, and whether it is still the newest."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self.number = folder, number

    @staticmethod
    def claim(folder: Path, number: int = 0) -> "Fence":
        """Take a number; the ones before it are void from now on.

        Args:
            number: this very one; 0: the next that is free.

        Raises:
            CheckpointError: another start has it, or a later one.
            OSError: whatever the disk says.
        """
        wanted = number or newest(folder) + 1
        while True:
            try:
                descriptor = os.open(folder / f".generation_{wanted:06d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                break
            except FileExistsError:
                if number:
                    raise CheckpointError(_taken(folder, wanted)) from None
                wanted += 1
        with os.fdopen(descriptor, "w") as file:
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        if newest(folder) != wanted:
            raise CheckpointError(_taken(folder, wanted))
        for path in folder.glob(".generation_*"):
            if _number(path.name) < wanted:
                path.unlink(missing_ok=True)
        return Fence(folder, wanted)

    def check(self) -> None:
        """Right before a commit.

        Raises:
            OSError: another start goes on with this run, so this one may not write any more.
        """
        if newest(self._folder) != self.number:
            raise OSError(errno.ESTALE, "another start of this run has taken over, and writes instead")


def newest(folder: Path) -> int:
    """The newest number that was claimed; 0 where none was."""
    return max((_number(path.name) for path in folder.glob(".generation_*")), default=0)


def _number(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


def _taken(folder: Path, number: int) -> str:
    path = folder / f".generation_{max(number, newest(folder)):06d}"
    try:
        holder = path.read_text().strip()
    except OSError:
        holder = "unknown"
    return f"{folder}: another start of this run has taken over ({holder}), and writes instead."
