"""One cell of the generality matrix: a kind of model in a layout is verified, or refused before its first step."""

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainings import Record, assert_same_training, differences, record
from zoo import ZOO

from shoal.errors import ShoalError

LAYOUTS = (
    *("dp2", "fsdp2", "tp2", "dp2.tp2", "fsdp2.tp2"),
    *("pp2", "pp2.dp2", "pp2.tp2", "pp2.fsdp2", "pp2.dp2.tp2"),
)


@dataclass(frozen=True)
class Cell:
    """The largest relative difference from one process, in any number or tensor; or why it was refused."""

    error: float | None = None
    refusal: str = ""


def fill(kind: str, layout: str) -> Cell:
    """Train one kind of model in a layout and compare it with one process.

    Raises:
        AssertionError: it is another training, or it was refused only after a step.
    """
    reference = _lone(kind)
    with tempfile.TemporaryDirectory() as folder:
        stepped = Path(folder, "stepped")
        try:
            found, refusal = record(ZOO[kind], layout, on_step=lambda run: stepped.touch()), ""
        except ShoalError as error:
            found, refusal = [], str(error)
        if refusal:
            assert not stepped.exists(), f"refused in the middle of training: {refusal}"
            return Cell(refusal=refusal)
    assert_same_training(found, reference)
    return Cell(error=max(far for seen in found for _, far in differences(seen, reference)))


@cache
def _lone(kind: str) -> Record:
    ZOO[kind]().model()  # what it imports is imported here, once, and not in every rank
    (reference,) = record(ZOO[kind])
    return reference
