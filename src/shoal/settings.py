"""Which value holds, and who said so: defaults < `--config` file < environment < flags.

A config file is TOML and spells the names as the flags do, with dashes or underscores; the fields of the job
stand in `[set]`:

    layout = "dp2"
    save-every = 100
    [set]
    lr = 3e-4
"""

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import ShoalError, expected, nearest

PREFIX = "SHOAL_"


class SettingsError(ShoalError):
    """A value given by a config file, the environment or a flag."""


class TrainSettings(BaseModel):
    """What `shoal train` can be told. None leaves the choice to the job or to the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: str = "lone"
    steps: int | None = Field(default=None, ge=1)
    run: str | None = None
    resume: str = "never"
    save_every: int = Field(default=500, ge=1)
    log_every: int | None = Field(default=None, ge=1)
    keep: int = Field(default=3, ge=1)
    device: str | None = None
    timeout_min: float = Field(default=10, gt=0, le=1_000_000, allow_inf_nan=False)
    threads: int | None = Field(default=None, ge=1, le=1024)
    nproc_per_node: int | None = Field(default=None, ge=1)
    tensorboard: bool = False
    trace: int | None = Field(default=None, ge=1)
    weights: str | None = None
    preset: str | None = None
    max_restarts: int = Field(default=0, ge=0)
    memory_copies: str = Field(default="auto", pattern="^(auto|off|[1-9][0-9]{0,8})$", coerce_numbers_to_str=True)
    elastic: str | None = None
    set: dict[str, str] = Field(default_factory=dict)


Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Settings(Generic[Schema]):
    """Resolved values, and for each name where it comes from.

    An origin is `default`, the file's name, the variable or the flag; a job field `x` has the name `set.x`.
    """

    values: Schema
    origin: Mapping[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and origin of every setting as text, in the order of the schema."""
        rows = []
        for name, value in self.values:
            if name == "set":
                rows += [(f"set.{key}", text, self.origin[f"set.{key}"]) for key, text in value.items()]
            else:
                rows.append((name.replace("_", "-"), _show(value), self.origin[name]))
        return rows

    def table(self) -> str:
        """The rows in columns, for people."""
        rows = self.rows()
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{wide[0]}}  {value:<{wide[1]}}  {origin}" for name, value, origin in rows)


def resolve(
    schema: type[Schema],
    *,
    config: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings[Schema]:
    """Settle every name of `schema` by precedence; `set` is merged key by key.

    Args:
        config: a TOML file.
        environment: the variables, `SHOAL_STEPS` for `steps`; `SHOAL_SET` holds `lr=3e-4,width=64`. An empty
            one is not given, and a foreign `SHOAL_` name is left alone unless it looks like a slip.
        flags: values by name; None, or an empty `set`, is not given. `set` is a mapping or lines `key=value`.

    Raises:
        SettingsError: for an unknown name, with the nearest, or a value of the wrong kind, with its origin.
    """
    given: dict[str, Any] = {}
    origin = dict.fromkeys(schema.model_fields, "default")
    for name, value, source in [
        *_from_config(schema, config),
        *_from_environment(schema, environment or {}),
        *_from_flags(schema, flags or {}),
    ]:
        origin[name] = source
        if name == "set":
            fields = _job_fields(value, source)
            given["set"] = given.get("set", {}) | fields
            origin |= dict.fromkeys((f"set.{key}" for key in fields), source)
        else:
            given[name] = value
    return Settings(values=_validated(schema, given, origin), origin=origin)


Given = tuple[str, Any, str]  # name, value, where it was said


def of_host(fields: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The fields of the job on a host: those for all, and over them those for it alone, `data_dir@a`.

    Args:
        names: what the host is called, the strongest first.
    """
    found = {key: text for key, text in fields.items() if "@" not in key}
    for name in reversed(names):
        found |= {key.partition("@")[0]: text for key, text in fields.items() if key.partition("@")[2] == name}
    return found


def with_preset(settings: Settings[TrainSettings], fields: Mapping[str, Any]) -> Settings[TrainSettings]:
    """The settings with what a preset says of the job, where nothing else says it."""
    said = settings.values.set
    more = {name: _show(value) for name, value in fields.items() if name not in said}
    origin = {f"set.{name}": f"preset {settings.values.preset}" for name in more}
    values = settings.values.model_copy(update={"set": {**more, **said}})
    return Settings(values=values, origin={**settings.origin, **origin})


def _from_config(schema: type[BaseModel], path: Path | None) -> list[Given]:
    if path is None:
        return []
    seen: dict[str, str] = {}
    rows: list[Given] = []
    for spelled, value in _read_toml(path).items():
        name = _known(spelled, schema, f"{path.name}: there is no setting {spelled!r}.")
        if name in seen:
            raise SettingsError(f"{path.name}: {seen[name]} and {spelled} are the same setting. Keep one.")
        seen[name] = spelled
        rows.append((name, value, path.name))
    return rows


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"the config file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the config file {path} is not TOML: {error}.") from error


def _from_environment(schema: type[BaseModel], environment: Mapping[str, str]) -> list[Given]:
    variables = {PREFIX + name.upper(): name for name in schema.model_fields}
    for variable in environment:
        slip = difflib.get_close_matches(variable, variables, n=1, cutoff=0.87)
        if slip and variable not in variables:
            raise SettingsError(f"the variable {variable} is no setting. Did you mean {slip[0]}?")
    return [(name, environment[var], var) for var, name in variables.items() if environment.get(var)]


def _from_flags(schema: type[BaseModel], flags: Mapping[str, Any]) -> list[Given]:
    rows = []
    for spelled, value in flags.items():
        name = _known(spelled, schema, f"there is no flag --{spelled.replace('_', '-')}.")
        if value is not None and not (name == "set" and not value):
            rows.append((name, value, "--" + name.replace("_", "-")))
    return rows


def _known(spelled: str, schema: type[BaseModel], problem: str) -> str:
    name = spelled.replace("-", "_")
    if name not in schema.model_fields:
        raise SettingsError(problem + nearest(name, schema.model_fields))
    return name


def _job_fields(value: Any, source: str) -> dict[str, str]:
    """Fields of the job as text: the job knows their types, so it reads them."""
    if isinstance(value, Mapping):
        for key, field in value.items():
            if not isinstance(field, str | int | float | bool):
                raise SettingsError(f"{source}: the job field {key} is {field!r}; write a number or a text.")
        return {key: _show(field) for key, field in value.items()}
    pairs = value.split(",") if isinstance(value, str) else value
    if not isinstance(pairs, Sequence) or not all(isinstance(pair, str) for pair in pairs):
        raise SettingsError(f"{source}: set is {value!r}. It holds the fields of the job, such as lr=3e-4.")
    fields: dict[str, str] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"{source}: {pair!r} is no job field. Write name=value, such as lr=3e-4.")
        if key.strip() in fields:
            raise SettingsError(f"{source}: the job field {key.strip()} is given twice. Keep one.")
        fields[key.strip()] = text.strip()
    return fields


def _validated(schema: type[Schema], given: Mapping[str, Any], origin: Mapping[str, str]) -> Schema:
    for name, value in given.items():
        if isinstance(value, bool) and schema.model_fields[name].annotation is not bool:
            raise SettingsError(f"{origin[name]}: {name} is {_show(value)}; it is no yes-or-no setting.")
    try:
        return schema.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        bound = _BOUNDS.get(first["type"], "").format(**first.get("ctx", {}))
        rule = bound or _kind(schema.model_fields[name].annotation)
        raise SettingsError(f"{origin[name]}: {name} is {given[name]!r}; it must be {rule}.") from error


_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "finite_number": "finite",
    "string_pattern_mismatch": "auto, off, or a number of steps",
}


def _kind(annotation: Any) -> str:
    """What fits a setting; that it may be left out (`int | None`) is no value that a person writes."""
    kinds = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
    return expected(kinds[0] if kinds else annotation)


def _show(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
