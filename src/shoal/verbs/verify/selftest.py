"""shoal verify --self-test: known mistakes are planted into real runs, and healthy runs are left alone.

A judge that finds nothing wrong is worth as much as what it would have found.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.layout import Layout
from shoal.units import show_seconds
from shoal.verbs.verify.command import VerifyError, failed, prepared, record, verify

# Job, layout, seed: where nothing was planted, nothing may be found.
HEALTHY = (
    *(("words", layout, seed) for layout in ("dp2", "fsdp2", "tp2", "dp2.tp2", "fsdp2.tp2") for seed in (0, 1)),
    *(("words", layout, 2) for layout in ("dp3", "dp2:micro=2", "lone:micro=3", "fsdp3", "dp2.fsdp2", "fsdp2:micro=2")),
    ("words", "dp2:zero=1", 2),
    *(("pixels", layout, 0) for layout in ("dp2", "dp4", "fsdp2", "tp2")),
    *(
        ("words", layout, 0)
        for layout in ("pp2", "pp2:micro=5,schedule=zbv", "pp2.dp2", "pp2.tp2", "pp2.fsdp2:micro=2")
    ),
    *(("words", layout, 2) for layout in ("pp2:micro=2", "pp3:micro=8")),
    ("pixels", "pp2", 0),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run: what was planted (empty: nothing), and what was found."""

    planted: str
    where: str
    verdict: str
    sentence: str
    explained: bool
    seconds: float

    @property
    def passed(self) -> bool:
        return self.verdict == ("wrong" if self.planted else "same")

    def __str__(self) -> str:
        if not self.planted:
            word = "same   " if self.passed else "ALARM  "
            return f"{word} {self.where}" + ("" if self.passed else f"\n         {self.sentence}")
        return f"{'caught ' if self.passed else 'MISSED '} {self.planted}  ({self.where})\n         {self.sentence}"


@dataclass(kw_only=True)
class SelfTest:
    """All trials."""

    trials: list[Trial] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return 0 if self.trials and all(trial.passed for trial in self.trials) else 1

    def count(self, *, planted: bool) -> tuple[int, int]:
        """(passed, all) of the runs with a mistake, or of those without."""
        kind = [trial for trial in self.trials if bool(trial.planted) is planted]
        return sum(trial.passed for trial in kind), len(kind)

    def as_dict(self) -> dict[str, Any]:
        caught, planted = self.count(planted=True)
        quiet, healthy = self.count(planted=False)
        told = {"caught": caught, "planted": planted, "false_alarms": healthy - quiet, "healthy": healthy}
        return told | {
            "exit_code": self.exit_code,
            "seconds": self.seconds,
            "trials": [asdict(trial) | {"passed": trial.passed} for trial in self.trials],
        }

    def __str__(self) -> str:
        told = self.as_dict()
        explained = sum(trial.explained for trial in self.trials if trial.planted)
        return (
            f"{told['caught']} of {told['planted']} planted mistakes caught, {explained} of them explained; "
            f"{told['false_alarms']} false alarms in {told['healthy']} healthy runs  ({show_seconds(self.seconds)})"
        )


def self_test(
    *, show: Callable[[str], None] = print, only: Sequence[str] = (), healthy: Sequence[tuple[str, str, int]] = HEALTHY
) -> SelfTest:
    """Plant every mistake into a run of its own, then run healthy ones.

    Args:
        show: where each trial goes as it ends.
        only: names of mistakes; by default all.
        healthy: job, layout and seed of the runs into which nothing is planted.
    """
    began = time.perf_counter()
    done = SelfTest()
    with prepared("shoal.verbs.verify.probes:Words", {}), tempfile.TemporaryDirectory(prefix="shoal-verify") as name:
        from shoal.verbs.verify.mutants import MUTANTS

        bench = Bench(Path(name))
        for mutant in MUTANTS:
            if not only or mutant.name in only:
                done.trials.append(bench.plant(mutant))
                show(str(done.trials[-1]))
        for job, layout, seed in healthy:
            done.trials.append(bench.leave_alone(job, layout, seed))
            show(str(done.trials[-1]))
    done.seconds = time.perf_counter() - began
    return done


class Bench:
    """Runs trials; what one process computes is recorded once for each job and seed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[tuple[str, int], tuple[Any, Path]] = {}
        self._number = 0

    def plant(self, mutant: Any) -> Trial:
        return self._run(mutant.job, mutant.layout, 0, mutant)

    def leave_alone(self, job: str, layout: str, seed: int) -> Trial:
        return self._run(job, layout, seed, None)

    def _run(self, job: str, layout: str, seed: int, mutant: Any) -> Trial:
        began = time.perf_counter()
        plan, reference = self._reference(job, seed)
        self._number += 1
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            options = {"patch": mutant.planted} if mutant else {}
            report = verify(plan, Layout.parse(layout), reference, Path(name), quiet=True, **options)
        return Trial(
            planted=mutant.name if mutant else "",
            where=f"{job}, {layout}, seed {seed}",
            verdict=report.verdict,
            sentence=report.sentence,
            explained=report.verdict == "wrong" and mutant is not None and mutant.says in report.sentence,
            seconds=time.perf_counter() - began,
        )

    def _reference(self, job: str, seed: int) -> tuple[Any, Path]:
        if (job, seed) not in self._references:
            from shoal.verbs.verify.passes import Plan
            from shoal.verbs.verify.probes import Pixels, Words

            plan = Plan(job={"words": Words, "pixels": Pixels}[job](seed=seed), real=False)
            folder = self._folder / f"{job}-{seed}"
            problem = failed(record(plan, "lone", folder), job, "in one process")
            if problem is not None:
                raise VerifyError(f"the self-test has no reference: {problem.sentence}")
            self._references[job, seed] = (plan, folder)
        return self._references[job, seed]
