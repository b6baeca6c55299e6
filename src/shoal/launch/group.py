"""One generation on this machine: its ranks, made together, watched together, ended together."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from shoal.errors import LaunchError
from shoal.launch.afar import Afar, Reporter
from shoal.launch.again import Ended, Terms
from shoal.launch.desync import explained
from shoal.launch.fork import fork_quietly
from shoal.launch.incident import INCIDENTS
from shoal.launch.machine import most_ranks, num_cores, num_memory_kills
from shoal.launch.named import Named, name_of, spec
from shoal.launch.outcome import INTERRUPTED, ON_REQUEST, Outcome
from shoal.launch.output import Show
from shoal.launch.posts import Post
from shoal.launch.rank import Seat, Work, end_forked, run, take_forked_seat
from shoal.launch.script import leftovers, ranks_variables, torchrun_variables
from shoal.launch.supervise import Rank, end_all, supervise
from shoal.launch.suspects import Patience
from shoal.launch.verdict import judge
from shoal.launch.vigil import Vigil
from shoal.launch.warm import check_may_fork
from shoal.record import look, prepare
from shoal.world import Place

Screen = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `start` was told: the same in every generation."""

    work: Work
    num_ranks: int  # on this machine, at first
    private: Path
    threads: int | None = None
    log_dir: Path | None = None
    show: Show = "rank0"
    fresh: bool = False
    grace_s: float = 30.0
    screen: Screen
    incidents: Path | None = None
    patience: Patience = field(default_factory=Patience)
    terms: Terms = field(default_factory=Terms)
    memory: Path | None = None
    run_id: str = ""
    claim: Callable[[str, int], int] | None = None
    folder: str = ""

    def check(self) -> None:
        """Refuse what cannot be started so.

        Raises:
            LaunchError: and why.
        """
        if self.num_ranks < 1:
            raise LaunchError(f"{self.num_ranks} processes: at least 1 must run.")
        most = most_ranks()
        if self.num_ranks > most:
            raise LaunchError(
                f"{self.num_ranks} processes on {num_cores()} cores would bring this machine down; at most {most} "
                "start here. Spread the layout over more machines with torchrun, srun or mpirun."
            )
        if self.threads is not None and self.threads < 1:
            raise LaunchError(f"threads={self.threads}: each process needs at least 1.")
        if self.show not in get_args(Show):
            raise LaunchError(f"show={self.show!r} is none of {', '.join(get_args(Show))}.")
        if not self.fresh:
            check_may_fork()

    def named(self) -> Named | None:
        """What fresh processes are told."""
        return name_of(self.work) if self.fresh else None


class Group:
    """The ranks of one generation."""

    def __init__(
        self, plan: Plan, post: Post, *, threads: int, others: tuple[int, ...] = (), afar: Afar | None = None
    ) -> None:
        self.post = post
        self.ranks: list[Rank] = []
        self.began = time.monotonic()
        self._plan, self._threads, self._others, self._afar = plan, threads, others, afar
        self._folder = plan.private / f"generation_{post.generation}"
        self._folder.mkdir()
        self._kills = num_memory_kills()
        self._watching: Vigil | Reporter | None = None

    def begin(self, asked: list[int]) -> None:
        """Make the ranks; fewer where somebody asks for the end meanwhile."""
        named = self._plan.named()
        for number in range(self.post.num):
            if asked:
                return
            self.ranks.append(self._begin(number, named))

    def run(self, asked: list[int], watch: Callable[[float], None] | None = None) -> None:
        """Until all have ended."""
        vigil = self._watching = self._watch()

        def look_at_all(now: float) -> None:
            for each in (vigil, watch):
                if each is not None:
                    each(now)

        supervise(self.ranks, asked, grace_s=self._plan.grace_s, watch=look_at_all)

    def end(self) -> None:
        """Whatever happened, nobody is left."""
        end_all(self.ranks)

    def judge(self, asked: list[int]) -> Outcome:
        """How its ranks ended, and why."""
        outcome = judge(
            self.ranks,
            began=self.began,
            now=time.monotonic(),
            asked=asked,
            num_memory_kills=num_memory_kills() - self._kills,
            keep_logs=self._plan.log_dir is not None,
        )
        return explained(outcome, self.ranks, self._watching.parted if isinstance(self._watching, Vigil) else None)

    def ended(self, outcome: Outcome, asked: list[int]) -> Ended:
        """The same, as far as it says what may follow."""
        seen = [look(rank.record) for rank in self.ranks]
        first = outcome.failures[0] if outcome.failures else None
        has_words = first is not None and bool(first.type) and not first.is_echo
        return Ended(
            exit_code=outcome.exit_code,
            size=self.post.size,
            error=f"{first.error}\n{first.user_frame}" if first is not None and has_words else "",
            step=first.step if first is not None else 0,
            done=max((one.done for one in seen), default=0),
            has_stepped=any(one.steps_here for one in seen),
            is_lesson=first is not None and first.is_lesson,
            is_asked=bool(asked) or (first is None and outcome.exit_code in ON_REQUEST),
        )

    @property
    def incidents(self) -> Path | None:
        """The file for what happens in this generation: that of the run, whichever machine leads it."""
        return Path(self.post.folder) / INCIDENTS if self.post.folder else self._plan.incidents

    def _watch(self) -> Vigil | Reporter | None:
        plan, incidents = self._plan, self.incidents
        if incidents is None:
            return None
        if self._afar is not None and self.post.node:
            return self._afar.watch_from(self.ranks, plan.patience)
        return Vigil(
            self.ranks,
            size=self.post.size,
            patience=plan.patience,
            screen=plan.screen,
            incidents=incidents,
            afar=self._afar,
        )

    def _begin(self, number: int, named: Named | None) -> Rank:
        read_end, write_end = os.pipe()
        seat = self._seat(number, write_end)
        record = Path(seat.place.record)
        log_start = seat.log.stat().st_size if seat.log.exists() else 0
        prepare(record)
        try:
            if named is not None:
                pid, poll = _begin_fresh(seat, named)
            else:
                closing = (read_end, *(earlier.reports for earlier in self.ranks), *self._others)
                pid, poll = _fork(self._plan.work, seat, closing)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        return Rank(
            rank=seat.place.rank,
            pid=pid,
            poll=poll,
            reports=read_end,
            log=seat.log,
            record=record,
            log_start=log_start,
            keeps_log=self._plan.log_dir is not None,
        )

    def _seat(self, number: int, reports: int) -> Seat:
        plan, post = self._plan, self.post
        place = Place(
            rank=post.first + number,
            size=post.size,
            local_rank=number,
            local_size=post.num,
            node=post.node,
            num_nodes=post.num_nodes,
            rendezvous="env://" if post.port else f"file://{self._folder / 'rendezvous'}",
            source="shoal",
            record=str(self._folder / f"rank_{number}.record"),
            generation=post.generation,
            memory="" if plan.memory is None else str(plan.memory),
            fence=post.fence,
            folder=post.folder,
        )
        return Seat(
            place=place,
            threads=self._threads,
            parent=os.getpid(),
            reports=reports,
            log=(plan.log_dir or plan.private).resolve() / f"rank_{place.rank}.log",
            show=plan.show,
            set_variables=self._variables(place) | {"OMP_NUM_THREADS": str(self._threads)},
            drop_variables=leftovers(os.environ),
        )

    def _variables(self, place: Place) -> dict[str, str]:
        if not self.post.port:
            return ranks_variables(place)
        most = self._plan.terms.max_restarts
        return torchrun_variables(place, self.post.port, self._plan.run_id, self.post.address, max_restarts=most)


def _fork(work: Work, seat: Seat, closing: tuple[int, ...]) -> tuple[int, Callable[[], int | None]]:
    # multiprocessing knows what a forked child must forget of its parent's; with fork it pickles nothing.
    process = multiprocessing.get_context("fork").Process(target=_forked, args=(work, seat, closing))
    fork_quietly(process)
    assert process.pid is not None

    def collect() -> int | None:
        code = process.exitcode
        if code is not None:
            process.close()  # its pipes would else stay open until it is garbage
        return code

    return process.pid, collect


def _forked(work: Work, seat: Seat, closing: tuple[int, ...]) -> None:
    try:
        take_forked_seat(seat, closing)
        code = run(work, seat)
        end_forked()
    except KeyboardInterrupt:  # before the work has begun, or after its end
        code = INTERRUPTED
    sys.exit(code)


def _begin_fresh(seat: Seat, named: Named) -> tuple[int, Callable[[], int | None]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.launch.child", spec(seat, named)],
        stdin=subprocess.DEVNULL,
        pass_fds=(seat.reports,),
        start_new_session=True,
        env=os.environ | dict(seat.set_variables),  # OpenMP reads its variable when torch is imported
    )
    return process.pid, process.poll
