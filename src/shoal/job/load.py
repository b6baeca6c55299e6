"""From a name to a job: `digits`, `jobs/gpt.py`, `jobs/gpt.py:GPTSmall`, `module:Name`."""

import importlib
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.errors import JobError, nearest
from shoal.job.fields import build
from shoal.job.job import Job, check_job

BUILT_IN = {"digits": "shoal.models.digits:Digits", "gpt": "shoal.models.gpt:GPT"}


def load_job(spec: str, settings: Mapping[str, Any] | None = None) -> Job:
    """The job that a command line names: `digits`, `jobs/gpt.py`, `jobs/gpt.py:GPTSmall`, `module:Name`.

    Args:
        settings: field -> text of its value (or a value), typed by the field's annotation.

    Raises:
        JobError: no such file, class or field (with the nearest), or a value of the wrong type.
    """
    job = build(_job_class(BUILT_IN.get(spec, spec)), settings or {})
    check_job(job)
    return job


def preset_of(job: Job | str, name: str) -> dict[str, Any]:
    """The values that a preset of a job (or of what a command line names) sets.

    Raises:
        JobError: the job has no preset of this name (with the nearest).
    """
    cls = _job_class(BUILT_IN.get(job, job)) if isinstance(job, str) else type(job)
    if name not in cls.presets:
        hint = nearest(name, cls.presets) if cls.presets else " It has none: give values by --set."
        raise JobError(f"{cls.__name__} has no preset {name!r}.{hint}")
    return dict(cls.presets[name])


def _job_class(spec: str) -> type[Job]:
    place, _, name = spec.partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, spec)
    jobs = {n: c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, Job) and c is not Job}
    own = [n for n, c in jobs.items() if c.__module__ == module.__name__]
    if name and name not in jobs:
        why = "is no subclass of shoal.Job" if hasattr(module, name) else "is not there"
        raise JobError(f"{place}: {name!r} {why}." + (nearest(name, jobs) if jobs else " The file holds no job."))
    finished = [n for n in own if not _missing_methods(jobs[n])]
    if not name and len(finished) != 1 and len(own) != 1:
        found = ", ".join(finished) or "none. A job is a subclass of shoal.Job with model, data, loss, optimizer"
        raise JobError(f"{place} must hold one job, or name it as {place}:Name. It holds: {found}.")
    cls = jobs[name or (finished or own)[0]]
    if missing := _missing_methods(cls):
        raise JobError(f"{cls.__name__} is not finished: it lacks {', '.join(missing)}.")
    return cls


def _missing_methods(cls: type[Job]) -> list[str]:
    return sorted(cls.__abstractmethods__)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        names = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = nearest(path.name, names) if names else f" Built-in jobs: {', '.join(BUILT_IN)}."
        raise JobError(f"no job file {path}.{hint}")
    path = path.resolve()
    name, text = _module_name(path), path.read_bytes()
    loaded = sys.modules.get(name)
    # Read again once it has changed: in a notebook the file is edited between two runs.
    if loaded is not None and _file_of(loaded) == path and getattr(loaded, "__text__", text) == text:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__text__"] = text
    # Registered before it runs, as import does: dataclasses and loader processes look the module up by name.
    sys.modules[name] = module
    _add_to_path(str(path.parent))
    try:
        # Not through the loader, whose cache takes an edit within one second for the old file.
        exec(compile(text, str(path), "exec"), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        _explain(str(path), error)
        raise
    return module


def _module_name(path: Path) -> str:
    """The file's own name, unless a real module has it: a job file `random.py` must not replace that."""
    name = re.sub(r"\W", "_", path.stem)
    for loaded in (name, f"job_{name}"):
        if loaded in sys.modules and _file_of(sys.modules[loaded]) == path:
            return loaded
    taken = sys.modules.get(name) or importlib.util.find_spec(name)
    is_free = taken is None or _file_of(taken) in (path, None)  # a mere folder of that name has no file
    return name if is_free else f"job_{name}"


def _file_of(module: Any) -> Path | None:
    """Where a module, or the spec of one, comes from; a built-in module comes from no path that exists."""
    file = module.origin if isinstance(module, ModuleSpec) else getattr(module, "__file__", None) or "built in"
    return Path(file).resolve() if file else None


def _load_module(place: str, spec: str) -> ModuleType:
    if ":" not in spec:
        file = f"{spec}.py"
        hint = f" Did you mean {file}?" if Path(file).is_file() else nearest(spec, BUILT_IN)
        raise JobError(f"no job {spec!r}.{hint} A job of your own is a file, jobs/mine.py:Mine, or module:Name.")
    if "" not in sys.path:
        _add_to_path(str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if not f"{place}.".startswith(f"{error.name}."):
            _explain(place, error)  # the job's module is there; something that it imports is not
        raise JobError(f"no module {place!r} (job {spec!r}): {error}.") from None
    except BaseException as error:
        _explain(place, error)
        raise


def _add_to_path(folder: str) -> None:
    """What lies beside a job can be imported, but never hides the standard library: after that, before packages."""
    if folder in sys.path:
        return
    standard = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib")]
    places = [i for i, entry in enumerate(sys.path) if entry.startswith(tuple(standard)) and "-packages" not in entry]
    sys.path.insert(max(places, default=-1) + 1, folder)


def _explain(place: str, error: BaseException) -> None:
    """Raise a JobError with the user's own traceback, for an error of the user's code."""
    if not isinstance(error, Exception | SystemExit):
        return  # Ctrl-C
    if "cannot inherit non-frozen dataclass from a frozen one" in str(error):
        raise JobError(f"{place}: a job is frozen. Write @dataclass(frozen=True, kw_only=True) above it.") from error
    told = traceback.TracebackException.from_exception(error)
    ours = (__file__, importlib.__file__, "<frozen importlib")
    while told.stack and told.stack[0].filename.startswith(ours):
        del told.stack[0]
    raise JobError(f"{place} cannot be imported:\n{''.join(told.format()).rstrip()}") from error
