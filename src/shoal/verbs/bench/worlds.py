"""The worlds of a comparison, all alive at once: each has a launch of its own, so that one that fails ends alone.

    shoal bench ─┬─ a process ─── rank 0                   lone
                 └─ a process ─┬─ rank 0                   dp2: if a rank fails, this launch ends its ranks,
                               └─ rank 1                   says why, and passes the turns that are left on

What a world has measured lies in a file after each of its turns, whatever happens in the next one.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.layout import Layout
from shoal.units import show_seconds
from shoal.verbs.bench.measured import Measured
from shoal.verbs.bench.turns import Turns
from shoal.world import Place, World

if TYPE_CHECKING:
    from shoal.job import Job
    from shoal.launch import Outcome
    from shoal.verbs.bench.arm import Plan

ENDED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))  # exit codes, on request
_LIMIT_MIN = 60.0  # for a collective: a world waits while the others have their turns
_GRACE_S = 2.0  # after SIGTERM: there is nothing to save
_MAX_WORDS = 400  # of an error that is no lesson


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the worlds have left.

    Attributes:
        logs: by name, of ranks that failed.
        stopped: the exit code where somebody ended it early: 130 after Ctrl-C, 143 after SIGTERM; else 0.
    """

    rows: list[Measured]
    logs: dict[str, str] = field(default_factory=dict)
    stopped: int = 0


@dataclass(frozen=True, kw_only=True)
class Worlds:
    """How worlds are started.

    Attributes:
        threads: of each rank.
        device: of all; None is what there is.
    """

    plan: "Plan"
    threads: int
    device: str | None
    quiet: bool

    def run(self, jobs: Sequence["Job"], layouts: Sequence[Layout]) -> Found:
        """All of them, in turns."""
        from shoal.launch import start

        turns = Turns(len(layouts), self.plan.turns)
        screen_fd = None if self.quiet else os.dup(2)
        with tempfile.TemporaryDirectory(prefix="shoal-bench") as name:
            arms = [
                _Arm(jobs[at], layouts[at], self, Path(name) / str(at), turns, at, screen_fd)
                for at in range(len(layouts))
            ]
            try:
                outcome = start(
                    lambda place: arms[place.rank].run(),
                    len(arms),
                    threads=1,
                    show="none",
                    grace_s=3 * _GRACE_S,
                    screen=_silent,
                )
            finally:
                turns.close()
                if screen_fd is not None:
                    os.close(screen_fd)
            if outcome.failures and outcome.exit_code not in ENDED:
                raise RuntimeError(f"bench itself failed: {outcome.failures[0].traceback or outcome.failures[0].error}")
            logs: dict[str, str] = {}
            for arm in arms:
                logs |= arm.logs()
            rows = [arm.found() for arm in arms]
        stopped = outcome.exit_code if outcome.exit_code in ENDED else 0
        return Found(rows=rows, logs=logs, stopped=stopped)

    def run_apart(self, jobs: Sequence["Job"], layouts: Sequence[Layout]) -> Found:
        """One at a time, made anew for each round."""
        alone = replace(self, plan=replace(self.plan, rounds=1))
        rows = [_blank(job, layout) for job, layout in zip(jobs, layouts, strict=True)]
        logs: dict[str, str] = {}
        for _ in range(self.plan.rounds):
            for at, (job, layout) in enumerate(zip(jobs, layouts, strict=True)):
                if rows[at].error:
                    continue
                found = alone.run([job], [layout])
                (row,) = found.rows
                if row.times_s or row.error:
                    rows[at] = replace(row, times_s=[*rows[at].times_s, *row.times_s])
                logs |= found.logs
                if found.stopped:
                    return Found(rows=rows, logs=logs, stopped=found.stopped)
        return Found(rows=rows, logs=logs)


@dataclass(frozen=True)
class _Arm:
    """One world: `run` in the process of its launch, and what is left of it afterwards."""

    job: "Job"
    layout: Layout
    worlds: Worlds
    folder: Path
    turns: Turns
    number: int
    screen_fd: int | None

    @property
    def measured(self) -> Path:
        return self.folder / "measured.json"

    @property
    def failed(self) -> Path:
        return self.folder / "failed.json"

    def run(self) -> int:
        """Start its ranks, and say how they ended."""
        from shoal.launch import start
        from shoal.launch.outcome import FAILED

        self.folder.mkdir()
        tempfile.tempdir = str(self.folder)  # what this process leaves when it is killed goes with it
        try:
            outcome = start(
                self._rank,
                self.layout.num_ranks,
                threads=self.worlds.threads,
                log_dir=self.folder / "logs",
                show="none",
                grace_s=_GRACE_S,
                screen=_silent,
            )
            if outcome.exit_code in ENDED:
                return FAILED  # unless all were asked to end, when nobody looks at it
            self._conclude(outcome)
        except ShoalError as error:  # too many ranks for this machine, say
            self._fail(f"{error}", log=None)
        self.turns.pass_on(self.number)
        return 0

    def found(self) -> Measured:
        """As far as it came."""
        row = _blank(self.job, self.layout)
        if self.measured.exists():
            row = Measured.of(json.loads(self.measured.read_text()))
        told = json.loads(self.failed.read_text()) if self.failed.exists() else {}
        return replace(row, **{name: told[name] for name in ("error", "log") if name in told})

    def logs(self) -> dict[str, str]:
        """That of the rank that failed first, by its name."""
        told = json.loads(self.failed.read_text()) if self.failed.exists() else {}
        if not told.get("log"):
            return {}
        return {told["log"]: Path(told["path"]).read_text("utf-8", errors="replace")}

    def _conclude(self, outcome: "Outcome") -> None:
        if outcome.failures:
            first = outcome.failures[0]
            has_begun = self.measured.exists()
            is_refused = first.is_lesson and not has_begun
            self._fail(first.message if is_refused else _in_one_line(outcome), log=None if is_refused else first.log)
        elif len(self.found().times_s) < self.worlds.plan.rounds:
            self._fail("its processes ended, as if all were done, before they were through", log=None)

    def _fail(self, error: str, *, log: Path | None) -> None:
        told: dict[str, Any] = {"error": error}
        if log is not None:
            told |= {"log": f"{_plain(self.layout)}_{log.name}", "path": str(log)}
        self.failed.write_text(json.dumps(told))
        self.show(f"{self.layout} {'failed' if log else 'is refused'}: {error}")

    def show(self, text: str) -> None:
        """While it goes on."""
        if self.screen_fd is not None:
            os.write(self.screen_fd, f"{text}\n".encode())

    def _rank(self, place: Place) -> None:
        from shoal.verbs.bench.arm import measure

        own = replace(place, source="shoal" if place.size > 1 else "lone")
        turns = _Counted(self, own.rank)
        try:
            with World.open(self.layout, place=own, device=self.worlds.device, timeout_min=_LIMIT_MIN) as world:
                measure(self.job, world, self.worlds.plan, turns, self._keep, turns.say)
        except SystemExit as stop:
            raise RuntimeError(f"the job's own code called sys.exit({stop.code})") from None

    def _keep(self, found: Measured) -> None:
        partial = self.measured.with_suffix(".tmp")
        partial.write_text(json.dumps(found.as_dict()))
        partial.replace(self.measured)


class _Counted:
    """The turns of one rank; the first one waits for its turn, and the others for the first."""

    def __init__(self, arm: _Arm, rank: int) -> None:
        self._arm, self._rank = arm, rank
        self._began, self._share = time.monotonic(), 0.0

    def __iter__(self) -> Iterator[int]:
        if self._rank:
            yield from range(self._arm.worlds.plan.turns)
            return
        for turn, share in self._arm.turns.taken(self._arm.number):
            self._share = share
            yield turn

    def say(self, text: str) -> None:
        """From the first rank, with the time that is left."""
        if self._rank == 0:
            share = self._share
            left = f"  {show_seconds((time.monotonic() - self._began) * (1 - share) / share)} left" if share else ""
            self._arm.show(f"{text}{left}")


def _blank(job: "Job", layout: Layout) -> Measured:
    num_devices = layout.num_ranks * layout.threads
    return Measured(layout=str(layout), num_devices=num_devices, batch_size=job.batch_size)


def _in_one_line(outcome: "Outcome") -> str:
    first = outcome.failures[0]
    what = first.error.strip().partition("\n")[0]
    what = what if len(what) <= _MAX_WORDS else f"{what[:_MAX_WORDS]}..."
    at = f", at {first.user_frame}" if first.user_frame else ""
    doing = f", {first.doing}" if first.doing else ""
    return f"{what} (rank {first.rank}{doing}{at})"


def _plain(layout: Layout) -> str:
    """For a name of a file."""
    return "".join(letter if letter.isalnum() or letter in ".=-" else "_" for letter in str(layout))


def _silent(_: str) -> None:
    """What a launch would show is in the report."""
