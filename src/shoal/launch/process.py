"""A process as the kernel sees it: its state, its CPU time, and whether it can be asked for its stack."""

import os
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.rank import STACK_SIGNAL

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True)
class Kernel:
    """What it says; empty where it says nothing (another system, or a process that has gone)."""

    state: str = ""  # R running, S sleeping, D in the kernel, T stopped, t by a debugger, Z gone
    cpu_s: float = 0.0

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP, Ctrl-Z or a debugger."""
        return self.state in ("T", "t")


def ask_kernel(pid: int) -> Kernel:
    """Of a process, all its threads together."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Kernel()
    return Kernel(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)


def workers_of(pid: int) -> list[int]:
    """Children that were forked from a rank and write their stack when they are asked; others would die of it."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in children.read_text().split()]
        except OSError:
            continue  # that thread has ended
    return [child for child in found if _catches(child)]


def _catches(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)
