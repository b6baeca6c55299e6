"""start and run_script: N processes on this machine, watched until they end, and started again where allowed."""

import contextlib
import functools
import gc
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from shoal.errors import LaunchError
from shoal.launch.afar import Afar
from shoal.launch.again import Ended, History, Terms, decide
from shoal.launch.group import Group, Plan, Screen
from shoal.launch.machine import default_threads, has_accelerator
from shoal.launch.memory import shared_folder
from shoal.launch.muster import meet, same_everywhere
from shoal.launch.nodes import Nodes
from shoal.launch.outcome import Outcome
from shoal.launch.output import Show
from shoal.launch.posts import Claim, Post
from shoal.launch.rank import Work
from shoal.launch.restarted import Restarted, cause_of
from shoal.launch.screen import failure_screen, to_stderr
from shoal.launch.script import LOOPBACK, check_script, meeting_point, run_as_main
from shoal.launch.supervise import Rank, stop_requests
from shoal.launch.suspects import Patience
from shoal.launch.warm import has_thread_pool, import_needed


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
    terms: Terms | None = None,
    keeps_memory: bool = False,
    claim: Claim | None = None,
    folder: str = "",
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
        terms: when ranks that failed are started again; by default never. `work` sees in `place.generation` how
            often that was.
        keeps_memory: give ranks a folder in shared memory (`place.memory`) that outlives them.
        claim: takes a number in the run's folder, so that of two parts of a torn network one goes on.
        folder: the run's, which node 0 tells the other machines (`place.folder`).

    Raises:
        LaunchError: nothing can be started so, and why.
    """
    with _private_folder() as private, shared_folder(is_wanted=keeps_memory) as memory:
        plan = Plan(
            work=work,
            num_ranks=num_ranks,
            private=private,
            threads=threads,
            log_dir=log_dir,
            show=show,
            fresh=fresh,
            grace_s=grace_s,
            screen=screen,
            incidents=incidents,
            patience=patience or Patience(),
            terms=terms or Terms(),
            memory=memory,
            run_id=nodes.run_id if nodes is not None else "",
            claim=claim,
            folder=folder,
        )
        return _launch(plan, nodes, alike or {})


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
    max_restarts: int = 0,
) -> Outcome:
    """Run a plain distributed script, unchanged, in `num_ranks` processes on this machine.

    Each runs it as `__main__` with torchrun's environment (env:// works) and no flag of ours. What other launchers
    left in the environment about single processes is set aside. The rest is as in `start`.

    Args:
        script: a path, or with `module` a name, as `python -m`.
        fresh: new interpreters; by default where there is a GPU.
        max_restarts: as torchrun's: how often all ranks are started again after one has failed, in all.

    Raises:
        LaunchError: no such script, or nothing can be started so.
    """
    if not module:
        check_script(Path(script))
    with _private_folder() as private:
        plan = Plan(
            work=functools.partial(run_as_main, target=str(script), arguments=list(args), is_module=module),
            num_ranks=num_ranks,
            private=private,
            threads=threads,
            log_dir=log_dir,
            show=show,
            fresh=has_accelerator() if fresh is None else fresh,
            grace_s=grace_s,
            screen=screen,
            terms=Terms(max_restarts=max_restarts, counts_all=True),
            run_id=nodes.run_id if nodes is not None else uuid.uuid4().hex[:12],
        )
        return _launch(plan, nodes, {} if module else {Path(script).name: str(script)})


class _Machines(Protocol):
    """Those of a run: this one, or this one among others."""

    @property
    def post(self) -> Post:
        """In the generation that is next, or runs."""

    @property
    def fds(self) -> tuple[int, ...]:
        """What no rank may hold open."""

    @property
    def afar(self) -> Afar | None:
        """The other machines' ranks, for those who watch; None: there are none."""

    @property
    def troubled_at_s(self) -> float:
        """When it was seen last that a machine has to end for another one, on the monotonic clock."""

    def watch(self, asked: list[int]) -> None:
        """From now on the ranks run: end them, by `asked`, when the other machines say so."""

    def tick(self, ranks: Sequence[Rank]) -> None:
        """Now and then, while they run."""

    def carrying(self, memory: Path | None, say: Screen) -> contextlib.AbstractContextManager[None]:
        """While they run, copies in this folder go on to another machine's."""

    def own(self, asked: list[int]) -> list[int]:
        """What was asked for here, and not by another machine."""

    def settle(self, outcome: Outcome, ended: Ended, asked: list[int]) -> tuple[Outcome, Post | None, str]:
        """How all ended, where this machine stands in the next generation (None: there is none), and why not."""


class _Alone:
    """One machine."""

    def __init__(self, plan: Plan) -> None:
        self._terms, self._history, self._has_store = plan.terms, History(), bool(plan.run_id)
        self._slots, self._store = plan.num_ranks, contextlib.ExitStack()
        self.fds: tuple[int, ...] = ()
        self.afar: Afar | None = None
        self.troubled_at_s = 0.0
        self.post = self._open(plan.num_ranks)

    def __enter__(self) -> "_Alone":
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def _open(self, size: int) -> Post:
        self._store.close()  # that of a generation before
        port = self._store.enter_context(meeting_point()) if self._has_store else 0
        return Post(generation=self._history.generation, num=size, size=size, address=LOOPBACK, port=port)

    def watch(self, asked: list[int]) -> None:
        """Nobody else says anything."""

    def tick(self, ranks: Sequence[Rank]) -> None:
        """Nobody comes."""

    def carrying(self, memory: Path | None, say: Screen) -> contextlib.AbstractContextManager[None]:
        """Nobody takes them."""
        return contextlib.nullcontext()

    def own(self, asked: list[int]) -> list[int]:
        return asked

    def settle(self, outcome: Outcome, ended: Ended, asked: list[int]) -> tuple[Outcome, Post | None, str]:
        decision = decide(self._terms, self._history, ended, self._slots)
        self._history = decision.history
        if decision.size:
            self.post = self._open(decision.size)
        return outcome, self.post if decision.size else None, decision.why


@contextlib.contextmanager
def _gathered(plan: Plan, nodes: Nodes | None, alike: Mapping[str, str]) -> Iterator[_Machines]:
    """The machines of the run; the store is on node 0."""
    if not plan.fresh:
        import_needed()  # before the store's process is forked, or that one imports torch a second time
    if nodes is None:
        with _Alone(plan) as alone:
            yield alone
        return
    with contextlib.ExitStack() as store:

        def open_store(address: str) -> int:
            store.close()  # that of a generation before
            return store.enter_context(meeting_point(address))

        facts = same_everywhere(alike)
        more = {"terms": plan.terms, "claim": plan.claim, "folder": plan.folder}
        with meet(nodes, plan.num_ranks, facts, open_store, **more) as crew:  # type: ignore[arg-type]
            yield crew


def _launch(plan: Plan, nodes: Nodes | None, alike: Mapping[str, str]) -> Outcome:
    plan.check()
    plan.named()  # what fresh processes cannot find is said before any machine waits
    with _gathered(plan, nodes, alike) as machines:
        threads = _threads(plan)
        if plan.log_dir is not None:  # nothing is refused any more: what is refused leaves no folder
            try:
                plan.log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"cannot write logs to {plan.log_dir}: {error.strerror}.") from None
        with stop_requests() as asked, _frozen_heap():
            return _generations(plan, machines, threads, asked)


def _generations(plan: Plan, machines: _Machines, threads: int, asked: list[int]) -> Outcome:
    """One after the other, until one is the last."""
    began, cause = time.monotonic(), None
    while True:
        group = Group(plan, machines.post, threads=threads, others=machines.fds, afar=machines.afar)
        told = None
        try:
            group.begin(asked)
            machines.watch(asked)
            if cause is not None:
                told = Restarted(cause, group, plan)
            with machines.carrying(plan.memory, plan.screen):
                group.run(asked, functools.partial(_look, machines, group, told))
        finally:
            group.end()
        if told is not None:
            told.close()
        outcome = group.judge(machines.own(asked))
        ended = group.ended(outcome, machines.own(asked))
        outcome, post, why = machines.settle(outcome, ended, asked)
        if post is None:
            _tell(outcome, group.post.size, asked, plan.screen, why)
            return replace(outcome, seconds=time.monotonic() - began)
        done = ended.done if ended.has_stepped or cause is None else max(ended.done, cause.done)
        cause = cause_of(outcome, group.began, done, lost_at_s=machines.troubled_at_s)


def _look(machines: _Machines, group: Group, told: Restarted | None, now: float) -> None:
    machines.tick(group.ranks)
    if told is not None:
        told(now)


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """What this process has imported is no garbage: ranks need not look through it, nor copy its pages by looking."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _tell(outcome: Outcome, num_ranks: int, asked: list[int], screen: Screen, why: str) -> None:
    if outcome.failures:
        screen(failure_screen(outcome, num_ranks))
        if why:
            screen(f"{why}.")
    if asked:
        screen(f"\n{signal.Signals(asked[0]).name}: all {num_ranks} ranks have ended.")


def _threads(plan: Plan) -> int:
    """Threads per rank."""
    threads = plan.threads or default_threads(plan.num_ranks)
    if threads > 1 and not plan.fresh and has_thread_pool():
        plan.screen(
            f"1 thread per rank instead of {threads}: this process has run operations on several threads already, "
            "and forked ranks could not use theirs. Start earlier, or with fresh=True, to use more."
        )
        return 1
    return threads


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    # Not TemporaryDirectory: its finalizer would be inherited by every fork.
    folder = Path(tempfile.mkdtemp(prefix="shoal-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
