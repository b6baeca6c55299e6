"""What the command line asks: layouts side by side, collectives, or a published figure worked again."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.layout import Layout
from shoal.settings import TrainSettings, resolve, with_preset
from shoal.verbs.bench.command import BenchError, command

if TYPE_CHECKING:
    from shoal.verbs.bench.collectives_report import CollectivesReport
    from shoal.verbs.bench.megatron import Megatron
    from shoal.verbs.bench.report import Report

COLLECTIVES = "collectives"


def answer(
    what: str | None,
    *,
    layouts: str | None = None,
    scale: str | None = None,
    axis: str = "dp",
    mode: str = "strong",
    fields: Sequence[str] = (),
    preset: str | None = None,
    rounds: int = 5,
    block: int = 10,
    threads: int | None = None,
    device: str | None = None,
    apart: bool | None = None,
    nproc_per_node: int | None = None,
    cluster: Path | None = None,
    force: bool = False,
    max_mib: int = 256,
    megatron: bool = False,
    quiet: bool = False,
) -> "Report | CollectivesReport | Megatron":
    """Measure a job in several layouts, the collectives of this machine, or recompute Megatron's figures.

    Raises:
        ShoalError: not one of the three; what the one that was asked for refuses.
    """
    if megatron or what is None:
        if not megatron or what is not None:
            raise BenchError(
                "bench takes a job, `collectives`, or --recompute-megatron alone. Such as: "
                "shoal bench gpt --layouts lone,dp2 --set width=64"
            )
        from shoal.verbs.bench.megatron import recompute_megatron

        return recompute_megatron()
    if what == COLLECTIVES:
        from shoal.verbs.bench.collectives import command as collectives

        layout = _only(layouts)
        num_ranks = nproc_per_node or (Layout.parse(layout).num_ranks if layout else 2)
        return collectives(
            num_ranks,
            layout=layout,
            max_bytes=max_mib * 2**20,
            write=cluster,
            force=force,
            device=device,
            quiet=quiet,
        )
    if mode not in ("strong", "weak"):
        raise BenchError(f"--mode is {mode!r}; it must be strong (one global batch) or weak (a batch per data rank).")
    values = _values(what, fields, preset)
    return command(
        what,
        None if layouts is None and scale is not None else _split(layouts or "lone,dp2"),
        scale=None if scale is None else _degrees(scale),
        axis=axis,
        mode=mode,
        fields=values,
        rounds=rounds,
        block=block,
        threads=threads,
        device=device,
        apart=apart,
        quiet=quiet,
    )


def _values(job: str, fields: Sequence[str], preset: str | None) -> dict[str, Any]:
    settings = resolve(TrainSettings, flags={"set": list(fields), "preset": preset})
    if preset is not None:
        from shoal.job import preset_of

        settings = with_preset(settings, preset_of(job, preset))
    return dict(settings.values.set)


def _split(layouts: str) -> list[str]:
    """`lone,pp2:micro=4,schedule=1f1b,dp2`: a comma also parts the options of a layout."""
    found: list[str] = []
    for part in layouts.split(","):
        is_option = "=" in part and ":" not in part and bool(found) and ":" in found[-1]
        if is_option:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _degrees(scale: str) -> list[int]:
    parts = scale.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise BenchError(f"--scale is {scale!r}; it must be degrees, such as 1,2,4")
    return [int(part) for part in parts]


def _only(layouts: str | None) -> str | None:
    found = _split(layouts) if layouts else []
    if len(found) > 1:
        raise BenchError(f"collectives are measured in one layout, and got {layouts}.")
    return found[0] if found else None
