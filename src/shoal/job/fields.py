"""From text to the fields of a job: `--set lr=3e-4`, typed by the annotation of the class."""

import contextlib
import dataclasses
import inspect
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from typing import Any

from shoal.errors import JobError, expected, nearest
from shoal.job.job import Job, check_job


def build(cls: type[Job], settings: Mapping[str, Any]) -> Job:
    """A job of a class, from settings in text or in values.

    Raises:
        JobError: an unknown field, a value that does not fit, none where one is needed; a class that is no dataclass.
    """
    _check_dataclass(cls)
    values = _values(cls, settings)
    required = [f.name for f in dataclasses.fields(cls) if f.init and f.default is f.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        sets = " ".join(f"--set {name}=..." for name in missing)
        raise JobError(f"{cls.__name__} has no value for {', '.join(missing)}. Give a default in the class, or {sets}")
    return cls(**values)


def with_fields(job: Job, settings: Mapping[str, Any]) -> Job:
    """A copy of a job with some fields set, from values or from text."""
    changed = dataclasses.replace(job, **_values(type(job), settings))
    check_job(changed)
    return changed


def _check_dataclass(cls: type[Job]) -> None:
    inherited = {f.name for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for f in dataclasses.fields(base)}
    own, annotated = vars(cls), inspect.get_annotations(cls)
    if "__dataclass_fields__" not in own and annotated:
        raise JobError(f"put @dataclass(frozen=True, kw_only=True) above class {cls.__name__}(Job).")
    for name in sorted(inherited & set(own) - set(annotated)):
        value = own[name]
        raise JobError(
            f"{cls.__name__}.{name} has no type, so it is no field: {name}: {type(value).__name__} = {value!r}"
        )


def _values(cls: type[Job], settings: Mapping[str, Any]) -> dict[str, Any]:
    fields = {f.name for f in dataclasses.fields(cls) if f.init}
    for name in settings:
        if name not in fields:
            raise JobError(f"{cls.__name__} has no field {name!r}.{nearest(name, fields)}")
    if not settings:
        return {}
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise JobError(
            f"{cls.__name__}: the type of a field cannot be looked up ({error}). Import it outside `if TYPE_CHECKING`."
        ) from None
    return {name: _typed(f"{cls.__name__}.{name}", hints[name], value) for name, value in settings.items()}


def _typed(field: str, hint: Any, value: Any) -> Any:
    """A value of a field's type; a text is read as TOML, as None, or as it stands, whatever fits first."""
    from pydantic import ValidationError

    adapter = _adapter(hint)
    for reading in _readings(hint, value):
        with contextlib.suppress(ValidationError):
            return adapter.validate_python(reading)
    raise JobError(f"{field} is {value!r}; it must be {expected(hint)}.")


def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a type with a configuration of its own
        return TypeAdapter(hint)


def _readings(hint: Any, value: Any) -> Iterator[Any]:
    """What a value may mean, the likeliest first. Python takes True for the number 1; a job does not."""
    args = typing.get_args(hint)
    takes_bool = hint is Any or bool in (hint, *args) or any(isinstance(arg, bool) for arg in args)
    if not isinstance(value, str):
        if takes_bool or not isinstance(value, bool):
            yield value
        return
    if hint is not str:
        if value.lower() == "none":
            yield None
        toml = _toml_value(value)
        if not isinstance(toml, str) and (takes_bool or not isinstance(toml, bool)):
            yield toml
        if isinstance(toml, bool) and not takes_bool and str not in args:
            return
    yield value


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
