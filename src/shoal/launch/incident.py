"""What stands still, in words: one screen for a person, one JSON object for `incidents.jsonl`."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.calls import Difference
from shoal.frames import is_users
from shoal.launch.process import Kernel
from shoal.launch.screen import RULE, WIDTH
from shoal.launch.suspects import Standing, is_desync
from shoal.launch.trace import crash_frames, innermost
from shoal.record import Seen
from shoal.units import show_seconds

INCIDENTS = "incidents.jsonl"  # in a run's folder
_IDLE = 0.2  # cores; on a busy machine a loop does not get a whole one
_STARVED = 0.5  # cores
_SHOWN_RANKS = 4
_TRACE_LINES = 16
# Where a rank stands that waits for messages in torch's own native code.
_WAITING_IN = re.compile(r"/torch/(distributed|nn/parallel)/|/torch/autograd/(graph|__init__)\.py")
_READS = re.compile(r"/shoal/world/world\.py\", line \d+ in read$")  # a figure from a GPU, which may wait for others
_NOTES = re.compile(r'^  File ".+/shoal/world/messages\.py", .*\n', re.MULTILINE)  # not where, only how we know
_COMPILING = re.compile(r"/torch/(_inductor/|_dynamo/convert_frame\.py)")


@dataclass(frozen=True, kw_only=True)
class Witness:
    """One rank, looked at closely."""

    seen: Seen
    kernel: Kernel
    cores: float = 0.0  # that it uses
    dump: str = ""  # its stack, as faulthandler writes it
    workers: str = ""  # the stacks of its loader workers

    @property
    def waits(self) -> bool:
        """For a message, in native code that cannot note it."""
        inner = innermost(self.dump)
        return bool(_READS.search(inner)) or (not self.runs and bool(_WAITING_IN.search(inner)))

    @property
    def runs(self) -> bool:
        """It computes."""
        return self.cores > _IDLE or self.kernel.state == "R"

    @property
    def is_starved(self) -> bool:
        """It would compute, and others have the cores."""
        return self.kernel.state == "R" and self.cores < _STARVED

    @property
    def compiles(self) -> bool:
        """torch makes a kernel, which takes its time."""
        return bool(_COMPILING.search(self.dump))

    @property
    def frame(self) -> str:
        """`train.py:12 in forward:  while True:`; of a rank that waits for its loader's workers, where one is."""
        _, place, line = crash_frames(_NOTES.sub("", self.workers or self.dump))
        return place + (f":  {line[:WIDTH]}" if place and line else "")

    @property
    def is_users(self) -> bool:
        """Whether that frame is the user's own."""
        return is_users(self.frame.partition(" in ")[0].rpartition(":")[0])

    @property
    def state(self) -> str:
        """Of the process, in words."""
        if self.kernel.is_stopped:
            return "stopped (SIGSTOP, Ctrl-Z or a debugger)"
        if self.runs:
            return f"running, {100 * self.cores:.0f} % CPU: a loop, or one long operation"
        return f"sleeping, {100 * self.cores:.0f} % CPU" if self.kernel.state else ""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Ranks that stand still, and what each of all was seen to do."""

    standing: Standing
    witnesses: Mapping[int, Witness]
    pids: Mapping[int, int]
    at_s: float  # on the monotonic clock
    changed: Mapping[int, float] = field(default_factory=dict)  # of each that stands: when it last noted anything
    hosts: Mapping[int, str] = field(default_factory=dict)  # of ranks on other machines
    parted: Difference | None = None  # the first call that was not the same on all

    @property
    def kind(self) -> str:
        """`standing`, `link` or `desync`."""
        if not self.standing.is_circle:
            return "standing"
        seen = {rank: witness.seen for rank, witness in self.witnesses.items()}
        is_sure = self.parted is not None and self.parted.is_sure
        return "desync" if is_sure or is_desync(seen) else "link"

    @property
    def since_s(self) -> float:
        """When they began to stand: of several, the first."""
        return min(self.witnesses[rank].seen.since_s for rank in self.standing.ranks)

    def screen(self) -> str:
        """The one that is shown."""
        if self.standing.is_circle:
            parts = [self._circle()]
        else:
            ranks = sorted(self.standing.ranks)
            parts = [self._stands(rank) for rank in ranks[:_SHOWN_RANKS]]
            if len(ranks) > _SHOWN_RANKS:
                parts.append(f"and {len(ranks) - _SHOWN_RANKS} ranks more")
            parts.append("\n".join(self._waits(rank) for rank in sorted(self.standing.waiting)))
        parts.append("Nothing was ended: training goes on if they do, or ends when a collective's time is over.")
        return "\n".join(["", RULE, "\n\n".join(part for part in parts if part), RULE])

    def as_dict(self) -> dict[str, Any]:
        """For `incidents.jsonl`."""
        return {
            "kind": self.kind,
            "ranks": [self._row(rank) for rank in sorted(self.standing.ranks)],
            "others": [self._row(rank) for rank in sorted(set(self.witnesses) - self.standing.ranks)],
            "parted": str(self.parted) if self.parted is not None and self.kind == "desync" else "",
        }

    def _row(self, rank: int) -> dict[str, Any]:
        witness = self.witnesses[rank]
        seen = witness.seen
        return {
            "rank": rank,
            "host": self.hosts.get(rank, ""),
            "step": seen.step,
            "phase": seen.phase.label,
            "since_s": round(self.at_s - seen.since_s, 3),
            "message": str(seen.message) if seen.message else None,
            "number": seen.message.number if seen.message else None,
            "inside": seen.is_inside,
            "state": witness.state,
            "frame": witness.frame,
        }

    def _stands(self, rank: int) -> str:
        witness = self.witnesses[rank]
        seen = witness.seen
        spent = seen.spent.get(seen.phase)
        usual = f" (usually {show_seconds(spent.usual_s)})" if spent and spent.count else ""
        lines = [
            f"rank {rank} of {len(self.witnesses)}{self._on(rank)} stands still: "
            f"{show_seconds(self.at_s - seen.since_s)} in {seen.doing}{usual}",
            "",
        ]
        if witness.kernel.is_stopped:
            there = ", there," if rank in self.hosts else ""
            lines.append(f"  {witness.state}; kill -CONT {self.pids[rank]}{there} lets it go on")
            lines.append("  it cannot show its stack: where it is above is what it noted last")
        elif witness.state:
            lines.append(f"  {witness.state}")
        if witness.frame:
            lines.append(f"  at {witness.frame}")
        for name, dump in (("stack", witness.dump), ("stack of a loader worker", witness.workers)):
            excerpt, _, _ = crash_frames(_NOTES.sub("", dump))
            if excerpt and not (name == "stack" and witness.kernel.is_stopped):
                shown = [line[:WIDTH] for line in excerpt.rstrip().splitlines()[-_TRACE_LINES:]]
                lines += ["", f"{name} (your frames and the last):", *shown]
        return "\n".join(lines)

    def _on(self, rank: int) -> str:
        return f" on {self.hosts[rank]}" if rank in self.hosts else ""

    def _waits(self, rank: int) -> str:
        witness = self.witnesses[rank]
        message = witness.seen.message
        what = str(message) if message is not None and witness.seen.is_inside else "a message"
        if message is not None and message.number and self.kind == "desync":
            what += f" (number {message.number} of group {message.group.partition(' ')[2]})"
        at = f", at {witness.frame}" if witness.frame and (self.standing.is_circle or witness.is_users) else ""
        return f"rank {rank}{self._on(rank)}: waits in {what}, {witness.seen.where}{at}"[:WIDTH]

    def _circle(self) -> str:
        since = show_seconds(self.at_s - self.since_s)
        ranks = sorted(self.witnesses)
        if self.kind == "desync":
            head = f"the ranks are in different collectives, and none of these can end (for {since}):"
            lines = [f"  {self._waits(rank)}" for rank in ranks]
            tail = "Every rank must call the same collectives in the same order: look for one in an if on the rank."
            return "\n".join([head, "", *lines, "", str(self.parted) if self.parted is not None else tail])
        calls = {str(self.witnesses[rank].seen.message) for rank in ranks}
        what = f"the same {calls.pop()}" if len(calls) == 1 else "messages"
        head = f"all {len(ranks)} ranks wait in {what}, and none has got on for {since}:"
        between = f" between {' and '.join(('this machine', *sorted(set(self.hosts.values()))))}" if self.hosts else ""
        tail = f"No rank is behind: the link{between or ' between them'} or the backend stands, not a rank."
        return "\n".join([head, "", *(f"  {self._waits(rank)}" for rank in ranks), "", tail])


def append(path: Path, event: Mapping[str, Any]) -> None:
    """One line of `incidents.jsonl`; a full disk costs the line."""
    try:
        with path.open("ab", buffering=0) as file:
            file.write((json.dumps(event) + "\n").encode())
    except OSError:
        return  # what happened was shown; the run must not end because of a note


def read(path: Path) -> list[dict[str, Any]]:
    """The incidents of a run; a line that was cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # a kill came in the middle of it
    return rows


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
