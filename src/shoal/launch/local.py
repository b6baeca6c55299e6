"""start and run_script: N processes on this machine, watched until they end."""

import contextlib
import functools
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from shoal.errors import LaunchError
from shoal.launch.crew import Crew, concluded
from shoal.launch.fork import fork_quietly
from shoal.launch.machine import default_threads, has_accelerator, most_ranks, num_cores, num_memory_kills
from shoal.launch.muster import meet, same_everywhere
from shoal.launch.named import Named, name_of, spec
from shoal.launch.nodes import Nodes
from shoal.launch.outcome import Outcome
from shoal.launch.output import Show
from shoal.launch.rank import Seat, Work, end_forked, run, take_forked_seat
from shoal.launch.screen import failure_screen, to_stderr
from shoal.launch.script import check_script, leftovers, meeting_point, ranks_variables, run_as_main, torchrun_variables
from shoal.launch.supervise import Rank, end_all, stop_requests, supervise
from shoal.launch.suspects import Patience
from shoal.launch.verdict import judge
from shoal.launch.vigil import Vigil
from shoal.launch.warm import check_may_fork, has_thread_pool, import_needed
from shoal.record import prepare
from shoal.world import Place

Screen = Callable[[str], None]


def start(
    work: Work,
    num_ranks: int,
    *,
    threads: int | None = None,
    log_dir: Path | None = None,
    show: Show = "rank0",
    grace_s: float = 30.0,
    fresh: bool = False,
    screen: Screen = to_stderr,
    nodes: Nodes | None = None,
    alike: Mapping[str, str] | None = None,
    incidents: Path | None = None,
    patience: Patience | None = None,
) -> Outcome:
    """Run `work(place)` in `num_ranks` processes on this machine, and return when all have ended.

    The processes are forked from this one, which imports torch once. The first rank that fails ends all within
    2 s and is shown. Ctrl-C ends all within 2 s (130); SIGTERM is passed on, and ranks get `grace_s` to save
    (143, also where all of them then end well). When this process dies, so do they.

    Args:
        work: returns None or an exit code.
        threads: CPU threads per rank; by default OMP_NUM_THREADS, or cores / ranks.
        log_dir: one `rank_N.log` each, appended; by default none is kept.
        show: whose output reaches the terminal. Rank 0 keeps the terminal itself, so a progress bar works.
        grace_s: seconds between SIGTERM and SIGKILL.
        fresh: new interpreters instead of forks, for CUDA. `work` must then be importable, or a functools.partial
            of an importable function with keyword arguments that JSON holds.
        screen: where the failure screen and notes go.
        nodes: the machines that start together; by default this one alone.
        alike: files by name that must be the same on each of them.
        incidents: a file; with it ranks that stand still and stragglers are shown, and kept there. For work that
            trains with `shoal.assemble`, whose progress can be read, and whose ranks are all on this machine.
        patience: when a rank is suspected to stand still.

    Raises:
        LaunchError: nothing can be started so, and why.
    """
    with _private_folder() as private, _met(nodes, num_ranks, alike or {}) as crew:
        plan = _Plan(
            work=work,
            num_ranks=num_ranks,
            threads=threads,
            log_dir=log_dir,
            private=private,
            show=show,
            fresh=fresh,
            rendezvous=f"file://{private / 'rendezvous'}" if crew is None else "env://",
            variables=ranks_variables if crew is None else _variables(crew),
            crew=crew,
            incidents=incidents,
            patience=patience or Patience(),
        )
        return _launch(plan, grace_s=grace_s, screen=screen)


@contextlib.contextmanager
def _met(nodes: Nodes | None, num_ranks: int, alike: Mapping[str, str]) -> Iterator[Crew | None]:
    """With the parents on the other machines, if there are any; the store is on node 0."""
    if nodes is None:
        yield None
        return
    import_needed()  # before the store's process is forked, or that one imports torch a second time
    with contextlib.ExitStack() as stack:
        store = functools.partial(stack.enter_context, meeting_point(nodes.address))
        yield stack.enter_context(meet(nodes, num_ranks, same_everywhere(alike), store))


def _variables(crew: Crew) -> Callable[[Place], dict[str, str]]:
    address, port, run_id = crew.nodes.address, crew.post.port, crew.nodes.run_id
    return lambda place: torchrun_variables(place, port, run_id, address)


def run_script(
    script: str | Path,
    args: Sequence[str] = (),
    num_ranks: int = 1,
    *,
    module: bool = False,
    threads: int | None = None,
    log_dir: Path | None = None,
    show: Show = "rank0",
    grace_s: float = 30.0,
    fresh: bool | None = None,
    screen: Screen = to_stderr,
    nodes: Nodes | None = None,
) -> Outcome:
    """Run a plain distributed script, unchanged, in `num_ranks` processes on this machine.

    Each runs it as `__main__` with torchrun's environment (env:// works) and no flag of ours. What other launchers
    left in the environment about single processes is set aside. The rest is as in `start`.

    Args:
        script: a path, or with `module` a name, as `python -m`.
        fresh: new interpreters; by default where there is a GPU.

    Raises:
        LaunchError: no such script, or nothing can be started so.
    """
    if not module:
        check_script(Path(script))
    work = functools.partial(run_as_main, target=str(script), arguments=list(args), is_module=module)
    run_id = uuid.uuid4().hex[:12]
    fresh = has_accelerator() if fresh is None else fresh
    if nodes is not None:
        alike = {} if module else {Path(script).name: str(script)}
        options = {"threads": threads, "log_dir": log_dir, "show": show, "fresh": fresh, "screen": screen}
        return start(work, num_ranks, grace_s=grace_s, nodes=nodes, alike=alike, **options)  # type: ignore[arg-type]
    if not fresh:
        import_needed()  # before the store's process is forked, or that one imports torch a second time
    with _private_folder() as private, meeting_point() as port:
        plan = _Plan(
            work=work,
            num_ranks=num_ranks,
            threads=threads,
            log_dir=log_dir,
            private=private,
            show=show,
            fresh=fresh,
            rendezvous="env://",
            variables=lambda place: torchrun_variables(place, port, run_id),
        )
        return _launch(plan, grace_s=grace_s, screen=screen)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    work: Work
    num_ranks: int
    threads: int | None
    log_dir: Path | None
    private: Path
    show: Show
    fresh: bool
    rendezvous: str
    variables: Callable[[Place], dict[str, str]]
    crew: Crew | None = None
    incidents: Path | None = None
    patience: Patience = field(default_factory=Patience)
    ranks: list[Rank] = field(default_factory=list)

    def check(self) -> None:
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

    def record(self, rank: int) -> Path:
        return self.private / f"rank_{rank}.record"

    def vigil(self, screen: Screen) -> Vigil | None:
        if self.incidents is None:
            return None
        return Vigil(self.ranks, patience=self.patience, screen=screen, incidents=self.incidents)

    def seat(self, rank: int, reports: int, threads: int) -> Seat:
        post = self.crew.post if self.crew is not None else None
        place = Place(
            rank=rank + (post.first if post else 0),
            size=post.size if post else self.num_ranks,
            local_rank=rank,
            local_size=self.num_ranks,
            node=self.crew.nodes.rank if self.crew else 0,
            num_nodes=self.crew.nodes.num if self.crew else 1,
            rendezvous=self.rendezvous,
            source="shoal",
            record=str(self.record(rank)),
        )
        return Seat(
            place=place,
            threads=threads,
            parent=os.getpid(),
            reports=reports,
            log=(self.log_dir or self.private).resolve() / f"rank_{place.rank}.log",
            show=self.show,
            set_variables=self.variables(place) | {"OMP_NUM_THREADS": str(threads)},
            drop_variables=leftovers(os.environ),
        )


def _launch(plan: _Plan, *, grace_s: float, screen: Screen) -> Outcome:
    plan.check()
    named = name_of(plan.work) if plan.fresh else None
    threads = _threads(plan, screen)
    if plan.log_dir is not None:  # nothing is refused any more: what is refused leaves no folder
        try:
            plan.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"cannot write logs to {plan.log_dir}: {error.strerror}.") from None
    kills = num_memory_kills()
    began = time.monotonic()
    with stop_requests() as asked, _frozen_heap():
        try:
            for rank in range(plan.num_ranks):
                if asked:
                    break  # Ctrl-C while ranks are still being made
                plan.ranks.append(_begin(plan, rank, threads, named))
            if plan.crew is not None:
                plan.crew.watch(functools.partial(plan.crew.pull, asked))
            supervise(plan.ranks, asked, grace_s=grace_s, watch=plan.vigil(screen))
        finally:
            end_all(plan.ranks)
    outcome = judge(
        plan.ranks,
        began=began,
        now=time.monotonic(),
        asked=asked if plan.crew is None or not plan.crew.pulled else [],
        num_memory_kills=num_memory_kills() - kills,
        keep_logs=plan.log_dir is not None,
    )
    if plan.crew is not None:
        outcome = concluded(plan.crew, outcome)
        asked = [] if plan.crew.pulled else asked
    _tell(outcome, plan.crew.post.size if plan.crew else plan.num_ranks, asked, screen)
    return outcome


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """What this process has imported is no garbage: ranks need not look through it, nor copy its pages by looking."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _tell(outcome: Outcome, num_ranks: int, asked: list[int], screen: Screen) -> None:
    if outcome.failures:
        screen(failure_screen(outcome, num_ranks))
    if asked:
        screen(f"\n{signal.Signals(asked[0]).name}: all {num_ranks} ranks have ended.")


def _threads(plan: _Plan, screen: Screen) -> int:
    """Threads per rank; imports what a forked rank needs."""
    threads = plan.threads or default_threads(plan.num_ranks)
    if plan.fresh:
        return threads
    import_needed()
    if threads > 1 and has_thread_pool():
        screen(
            f"1 thread per rank instead of {threads}: this process has run operations on several threads already, "
            "and forked ranks could not use theirs. Start earlier, or with fresh=True, to use more."
        )
        return 1
    return threads


def _begin(plan: _Plan, rank: int, threads: int, named: Named | None) -> Rank:
    read_end, write_end = os.pipe()
    seat = plan.seat(rank, write_end, threads)
    log_start = seat.log.stat().st_size if seat.log.exists() else 0
    prepare(plan.record(rank))
    try:
        if named is not None:
            pid, poll = _begin_fresh(seat, named)
        else:
            others = plan.crew.fds() if plan.crew is not None else ()
            closing = (read_end, *(earlier.reports for earlier in plan.ranks), *others)
            pid, poll = _fork(plan.work, seat, closing)
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
        record=plan.record(rank),
        log_start=log_start,
        keeps_log=plan.log_dir is not None,
    )


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
    take_forked_seat(seat, closing)
    code = run(work, seat)
    end_forked()
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


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    # Not TemporaryDirectory: its finalizer would be inherited by every fork.
    folder = Path(tempfile.mkdtemp(prefix="shoal-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
