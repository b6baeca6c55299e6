"""What the command line asks: one of the three ways to verify."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import LayoutError
from shoal.settings import TrainSettings, resolve, with_preset
from shoal.verbs.verify.command import VerifyError, command

if TYPE_CHECKING:
    from shoal.verbs.verify.report import Report
    from shoal.verbs.verify.selftest import SelfTest


def answer(
    job: str | None,
    layout: str | None,
    fields: Sequence[str] = (),
    *,
    steps: int = 3,
    runs: tuple[Path, Path] | None = None,
    self_test: bool = False,
    preset: str | None = None,
    quiet: bool = False,
) -> "Report | SelfTest":
    """Verify a job in a layout, compare two runs, or test the judge itself.

    Raises:
        ShoalError: more than one of the three, or none; what the one that was asked for refuses.
    """
    asked = [what for what, is_asked in (("JOB", job), ("--runs", runs), ("--self-test", self_test)) if is_asked]
    if len(asked) != 1:
        raise VerifyError(
            f"verify takes one of JOB, --runs A B and --self-test, and got {' and '.join(asked) or 'none'}. "
            "Such as: shoal verify gpt --layout dp2 --set width=64"
        )
    if runs is not None:
        from shoal.verbs.verify.runs import compare_runs

        return compare_runs(*runs)
    if self_test:
        from shoal.verbs.verify.selftest import self_test as test_itself

        return test_itself(show=_say_nothing if quiet else _say)
    if layout is None:
        raise LayoutError(f"verify compares a layout with one process: shoal verify {job} --layout dp2")
    settings = resolve(TrainSettings, flags={"layout": layout, "set": list(fields), "preset": preset})
    assert job is not None
    if preset is not None:
        from shoal.job import preset_of

        settings = with_preset(settings, preset_of(job, preset))
    values = settings.values
    return command(job, values.layout, fields=values.set, steps=steps)


def _say(text: str) -> None:
    print(text, flush=True)


def _say_nothing(_: str) -> None:
    pass
