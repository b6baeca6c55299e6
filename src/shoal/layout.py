"""How a job is spread over processes: degrees joined by dots, then options after a colon.

    lone
    dp4
    fsdp4.tp2
    pp2.dp2.tp2:micro=8,schedule=1f1b,recompute=block
    threads2                    one process, replicas in threads

A layout never changes what is trained. Axes go from the outermost to the innermost, in no other order: with
`fsdp4.tp2` tp stays inside a node. Options come in any order. A degree of 1 and an option at its default may
be spelled; they are not printed.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from shoal.errors import LayoutError, nearest

AXES = ("pp", "dp", "fsdp", "cp", "tp", "ep", "threads")
"""Outermost first. Neither `ep` (carved from dp x fsdp) nor `threads` (inside one process) adds ranks."""

RANK_AXES = AXES[:5]
V_SHAPED = ("zbv", "dualpipev")  # rank r holds the stages r and 2 pp - 1 - r
SPLIT_BACKWARD = ("zb", "zbv", "dualpipev")  # input and weight gradients apart: torch cannot compile those
CHOICES = {
    "schedule": (None, "gpipe", "1f1b", "interleaved", "looped-bfs", "zb", "zbv", "dualpipev"),
    "recompute": ("none", "block", "selective"),
    "compile": ("none", "block"),
    "offload": ("none", "cpu"),
    "zero": (None, 1, 2, 3),
    "reshard": (None, True, False),
    "sequence": (False, True),
}
MAX_COUNT = 2**20  # a degree beyond a million ranks is a slip of the finger


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism per axis, and how each rank works off its part.

    `micro` counts the micro-batches of one rank in one optimizer step, `virtual` the pipeline stages per rank
    (two in V-shaped schedules, without being told), `workers` the data-loader processes per rank. `split` is
    the indices of the blocks that begin a new stage, written `split=4/8`. `None`: the engine chooses.

    Raises:
        LayoutError: for a value out of range, an option without its axis, or a broken rule of a schedule.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    threads: int = 1
    micro: int = 1
    schedule: str | None = None
    virtual: int = 1
    split: tuple[int, ...] = ()
    recompute: str = "none"
    compile: str = "none"
    reshard: bool | None = None
    zero: int | None = None
    offload: str = "none"
    sequence: bool = False
    workers: int = 0

    def __post_init__(self) -> None:
        if self.schedule in V_SHAPED and self.virtual == 1:
            object.__setattr__(self, "virtual", 2)
        _check_values(self)
        for problem in _problems(self):
            raise LayoutError(f"{self}: {problem}")

    @staticmethod
    def parse(text: str) -> "Layout":
        """The layout that `text` spells; `Layout.parse(str(x)) == x`.

        Raises:
            LayoutError: naming the part that does not fit the grammar, and the nearest that does.
        """
        return _parse(text)

    def __str__(self) -> str:
        degrees = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) != 1]
        options = [f"{name}={_spell(getattr(self, name))}" for name in OPTIONS if not _is_default(self, name)]
        return ".".join(degrees or ["lone"]) + (":" if options else "") + ",".join(options)

    @property
    def num_ranks(self) -> int:
        """Processes of the whole world."""
        return math.prod(getattr(self, axis) for axis in RANK_AXES)

    @property
    def num_data(self) -> int:
        """The degree of data parallelism that loss and data see: dp x fsdp."""
        return self.dp * self.fsdp

    @property
    def num_parts(self) -> int:
        """Parts of one rank's batch: micro-batches, one after the other, of replicas in threads, side by side."""
        return self.micro * self.threads

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.pp * self.virtual

    def require_available(self) -> None:
        """Refuse what this version of shoal parses but cannot run yet."""
        missing = [axis for axis in ("cp", "ep") if getattr(self, axis) > 1]
        if missing:
            raise LayoutError(
                f"{self}: not available yet in this version: {', '.join(missing)}. "
                "Available: lone, pp, dp, fsdp, tp and their products, threads, and every option."
            )


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Layout)}
OPTIONS = tuple(name for name in DEFAULTS if name not in AXES)


def _check_values(layout: Layout) -> None:
    for name in DEFAULTS:
        value = getattr(layout, name)
        if name in CHOICES:
            _check_choice(name, value)
        elif name == "split":
            _check_split(value)
        else:
            _check_count(name, value, least=0 if name == "workers" else 1)
    if layout.num_ranks > MAX_COUNT:
        raise LayoutError(f"{layout} needs {layout.num_ranks} processes; the most is {MAX_COUNT}.")


def _check_choice(name: str, value: object) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in CHOICES[name]):
        known = [_spell(choice) for choice in CHOICES[name] if choice is not None]
        raise LayoutError(f"{name}={_spell(value)} is not a value of {name}.{nearest(_spell(value).lower(), known)}")


def _check_count(name: str, value: object, *, least: int) -> None:
    what = "the degree of " + name if name in AXES else name
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise LayoutError(f"{what} is {value!r}; it must be a whole number from {least} to {MAX_COUNT}.")


def _check_split(value: object) -> None:
    if type(value) is not tuple or not all(type(cut) is int and 1 <= cut <= MAX_COUNT for cut in value):
        raise LayoutError(f"split is {value!r}; it must be a tuple of block indices from 1, such as (4, 8).")
    if list(value) != sorted(set(value)):
        raise LayoutError(f"split={_spell(value)} must rise: a cut is the index of the block that begins a stage.")


def _problems(layout: Layout) -> Iterator[str]:
    if layout.threads > 1 and math.prod(getattr(layout, axis) for axis in AXES) != layout.threads:
        yield "threads live in one process, beside no other axis. Write dpN for processes, or threadsN alone."
    if layout.num_data % layout.ep:
        yield (
            f"experts are spread over the data ranks, so ep must divide dp x fsdp = {layout.num_data}, "
            f"and {layout.ep} does not."
        )
    if layout.reshard is not None and layout.fsdp == 1:
        yield "reshard says when the shards of fsdp are freed, and none are. Add fsdpN, or drop reshard."
    if layout.zero is not None and layout.num_data == 1:
        yield "zero spreads the training state over data ranks. Add dpN or fsdpN, or drop zero."
    if layout.zero is not None and layout.reshard is not None and layout.reshard != (layout.zero == 3):
        yield (
            f"zero={layout.zero} and reshard={_spell(layout.reshard)} contradict each other: only zero=3 "
            "frees parameters between forward and backward. Give one of the two."
        )
    if layout.sequence and layout.tp == 1:
        yield "sequence cuts what lies between the splits of tp, and there are none. Add tpN, or drop sequence."
    yield from _pipeline_problems(layout)


def _pipeline_problems(layout: Layout) -> Iterator[str]:
    idle = [name for name in ("schedule", "virtual", "split") if not _is_default(layout, name)]
    if layout.pp == 1 and idle:
        yield f"{idle[0]} belongs to a pipeline, and there is none. Add ppN, or drop {idle[0]}."
    if layout.split and len(layout.split) != layout.num_stages - 1:
        yield (
            f"between {layout.num_stages} stages (pp x virtual) there are cuts: {layout.num_stages - 1}; "
            f"split names {len(layout.split)}."
        )
    if layout.compile != "none" and layout.schedule in SPLIT_BACKWARD:
        yield (
            f"schedule={layout.schedule} takes input and weight gradients apart, which torch cannot compile. "
            "Drop compile, or take schedule=interleaved."
        )
    yield from _schedule_problems(layout)


def _schedule_problems(layout: Layout) -> Iterator[str]:
    """What torch 2.13 asks of each schedule; looped-bfs asks nothing."""
    micro, virtual, schedule = layout.micro, layout.virtual, f"schedule={layout.schedule}"
    if layout.schedule in ("gpipe", "1f1b") and virtual > 1:
        yield (
            f"{schedule} holds one stage per rank, and virtual={virtual} asks for more. "
            "Take schedule=interleaved or looped-bfs, or drop virtual."
        )
    if layout.schedule in V_SHAPED and virtual != 2:
        yield f"{schedule} holds 2 stages per rank, not virtual={virtual}. Drop virtual."
    if layout.schedule in ("1f1b", "dualpipev") and micro < layout.num_stages:
        yield (
            f"{schedule} needs at least as many micro-batches as stages: micro={micro} is less than "
            f"{layout.num_stages}. Take micro={layout.num_stages} or more, or schedule=gpipe."
        )
    num_rounds = max(1, micro // layout.pp)
    if layout.schedule in ("interleaved", "zb") and micro % num_rounds:
        yield (
            f"{schedule} works in rounds of about pp={layout.pp} micro-batches: {num_rounds} rounds do not "
            f"divide micro={micro}. Take {micro - micro % num_rounds} or {layout.pp * (num_rounds + 1)}."
        )


def _is_default(layout: Layout, name: str) -> bool:
    if name == "virtual" and layout.schedule in V_SHAPED:
        return layout.virtual == 2
    return bool(getattr(layout, name) == DEFAULTS[name])


def _spell(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse(text: str) -> Layout:
    if not isinstance(text, str) or not text.strip():
        raise LayoutError("the layout is empty. One process is spelled lone, two data-parallel ones dp2.")
    if re.search(r"\s", text):
        raise LayoutError(f"{text!r} holds a space. Write {''.join(text.split())}.")
    if not text.isascii():
        raise LayoutError(f"{text!r} holds a character outside ASCII; layouts use a-z, 0-9 and .:,=/-")
    degrees, colon, options = text.partition(":")
    if colon and not options:
        raise LayoutError(f"{text!r} ends in a colon without an option. Write {degrees} or {degrees}:micro=2.")
    return Layout(**_parse_degrees(degrees), **(_parse_options(options) if colon else {}))


def _parse_degrees(text: str) -> dict[str, Any]:
    if text == "lone":
        return {}
    degrees: dict[str, int] = {}
    for part in text.split("."):
        axis, degree = _parse_degree(part, text)
        if axis in degrees:
            raise LayoutError(f"{text}: the axis {axis} comes twice. Give it one degree.")
        degrees[axis] = degree
    ordered = sorted(degrees, key=AXES.index)
    if list(degrees) != ordered and "threads" not in degrees:
        right = ".".join(f"{axis}{degrees[axis]}" for axis in ordered)
        raise LayoutError(f"{text}: axes go from the outermost to the innermost: {' '.join(AXES[:6])}. Write {right}.")
    return degrees


def _parse_degree(part: str, text: str) -> tuple[str, int]:
    match = re.fullmatch(r"([^0-9=]*[^0-9=+-])(.*)", part)
    axis, digits = match.groups() if match else (part, "")
    if re.search(r"[0-9][,;x+ ]+[a-z]", part):
        raise LayoutError(f"{text!r}: axes are joined by dots. Write {re.sub('[,;x+ ]+', '.', text.strip())}.")
    if not part:
        raise LayoutError(f"{text!r} has an empty part between its dots. Write degrees such as fsdp4.tp2.")
    if axis == "lone":
        raise LayoutError(f"{text}: lone is one process and stands alone. Write lone, or only the degrees.")
    if axis not in AXES:
        close = axis[::-1] if axis[::-1] in AXES else axis.lower()  # pd is one slip, and far from dp for `nearest`
        raise LayoutError(f"{text}: there is no axis {axis!r}.{nearest(close, AXES)}")
    if not digits:
        raise LayoutError(f"{text}: the axis {axis} has no degree. Write {axis}2 for two.")
    return axis, _parse_count(digits, f"the degree of {axis}", text, least=1)


def _parse_options(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in OPTIONS:
            raise LayoutError(f"{part!r}: there is no option {name!r}.{nearest(name.lower(), OPTIONS)}")
        if not equals or not value:
            raise LayoutError(f"{part!r}: the option {name} has no value. Write {name}={_example(name)}.")
        if name in values:
            raise LayoutError(f"{text}: the option {name} comes twice. Give it one value.")
        values[name] = _parse_option(name, value)
    return values


def _parse_option(name: str, value: str) -> Any:
    if name in CHOICES:
        return {_spell(choice): choice for choice in CHOICES[name] if choice is not None}.get(value, value)
    if name == "split":
        return tuple(_parse_count(cut, "a cut", f"split={value}", least=1) for cut in value.split("/"))
    return _parse_count(value, name, f"{name}={value}", least=0 if name == "workers" else 1)


def _parse_count(digits: str, what: str, text: str, *, least: int) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,8}", digits) or not least <= int(digits) <= MAX_COUNT:
        bare = digits.lstrip("0")
        hint = f" Write {bare}." if digits != bare and bare.isdigit() and least <= len(bare) <= 6 else ""
        raise LayoutError(
            f"{_shorten(text)}: {what} is {_shorten(digits)!r}; it must be a whole number from {least} "
            f"to {MAX_COUNT} without sign or leading zero.{hint}"
        )
    return int(digits)


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _example(name: str) -> str:
    if name in CHOICES:
        return _spell(CHOICES[name][-1])
    return "4/8" if name == "split" else "2"


def check_world(layout: Layout, num_ranks: int, job_hint: str = "job.py") -> None:
    """Refuse a world whose size is not the product of the degrees.

    Raises:
        LayoutError: with the nearest layouts that fill `num_ranks` and a line that starts what was asked for.
    """
    if layout.num_ranks == num_ranks:
        return
    close = ", ".join(map(str, nearest_layouts(layout, num_ranks)))
    raise LayoutError(
        f"{layout} needs {_processes(layout.num_ranks)}, but this world has {num_ranks}. "
        "The product of the degrees must equal the world.\n"
        + (f"Nearest that fit: {close}. Or start" if close else "Start")
        + f" {layout.num_ranks}: shoal train {job_hint} --layout {layout} --nproc-per-node {layout.num_ranks}"
    )


def nearest_layouts(layout: Layout, num_ranks: int, limit: int = 3) -> list[Layout]:
    """The layouts over the same axes that fill a world of `num_ranks`, nearest first.

    Distance is the sum over the axes of |log2(degree / asked degree)|; of equals the one with fewer axes
    comes first, then the one that changes more on the data axes, which fit every job.
    """
    axes = [axis for axis in RANK_AXES if getattr(layout, axis) > 1]
    if layout.num_data == 1:
        axes = sorted([*axes, "dp"], key=AXES.index)  # data parallelism fits every job

    def distance(degrees: tuple[int, ...]) -> tuple[float, int, float, tuple[float, ...]]:
        steps = [abs(math.log2(new / getattr(layout, axis))) for axis, new in zip(axes, degrees, strict=True)]
        model_steps = sum(step for axis, step in zip(axes, steps, strict=True) if axis not in ("dp", "fsdp"))
        return (
            round(sum(steps), 9),
            sum(degree > 1 for degree in degrees),
            round(model_steps, 9),
            tuple(steps),
        )

    ranked = sorted(_factorisations(num_ranks, len(axes)), key=distance)
    fitting = (_refit(layout, dict(zip(axes, degrees, strict=True))) for degrees in ranked)
    return list(itertools.islice(filter(None, fitting), limit))


def _factorisations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    if num_factors == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factorisations(number // first, num_factors - 1):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return low + [number // divisor for divisor in reversed(low) if divisor * divisor != number]


def _refit(layout: Layout, degrees: dict[str, int]) -> Layout | None:
    """The same layout with other degrees; options of an axis that is gone go with it."""
    changes: dict[str, Any] = {**degrees, "threads": 1}
    num_data = degrees.get("dp", 1) * degrees.get("fsdp", 1)
    changes["ep"] = math.gcd(layout.ep, num_data)
    if degrees.get("pp", 1) != layout.pp:
        changes["split"] = ()
    if degrees.get("pp", 1) == 1:
        changes |= {"schedule": None, "virtual": 1}
    if degrees.get("fsdp", 1) == 1:
        changes["reshard"] = None
    if num_data == 1:
        changes["zero"] = None
    if degrees.get("tp", 1) == 1:
        changes["sequence"] = False
    try:
        return replace(layout, **changes)
    except LayoutError:
        return None


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
