"""shoal verify --runs A B: two trainings that were made already, side by side.

Either two recordings (`Recording`, of a loop of your own), or two run folders of `shoal train`, whose metrics and
checkpoints are compared at the steps that both have.
"""

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint import list_checkpoints, read
from shoal.metrics.events import read_events
from shoal.verbs.verify.command import VerifyError
from shoal.verbs.verify.compare import GATE, SMALL, TINY_LOSS, Row, distance, measure, relative
from shoal.verbs.verify.diagnose import Diagnosis, diagnose
from shoal.verbs.verify.recording import START, Recorded
from shoal.verbs.verify.report import Report, summarise

# A gate for each precision: what a few steps of healthy rounding stay below.
GATES = {torch.float64: GATE, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_FIGURES = {"train/loss": "loss", "train/grad_norm": "gradient norm", "train/lr": "learning rate"}


def compare_runs(reference: Path, found: Path) -> Report:
    """The second of two trainings against the first.

    Raises:
        VerifyError: a folder that is neither a recording nor a run, or two that are not of one kind.
    """
    began = time.perf_counter()
    kinds = {path: _kind(path) for path in (reference, found)}
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{path} is {kind}" for path, kind in kinds.items())
        raise VerifyError(f"{told}: compare two of one kind.")
    recorded = kinds[reference] == _RECORDING
    rows = measure(Recorded(found), Recorded(reference)) if recorded else sorted(
        _of_runs(found, reference), key=lambda row: row.place
    )  # fmt: skip
    gate = GATES.get(_dtype(reference, recorded=recorded), GATE)
    report = _judge([row for row in rows if row.error is not None], gate)
    if report.verdict == "wrong":
        first = report.findings[0].row
        why = diagnose(first, Recorded(found), Recorded(reference)) if recorded else _plain(first)
        report.sentence = f"in step {first.step}: {why.sentence}" if first.step else why.sentence
        report.ratio, report.cosine = why.ratio, why.cosine
    report.title = f"verify  {found} against {reference}, gate {gate:g}"
    report.uncovered = ["what the two do not both hold", *_noise(rows)]
    report.seconds = time.perf_counter() - began
    return report


def _judge(rows: list[Row], gate: float) -> Report:
    findings, worst = summarise((("recorded", row) for row in rows), gate)
    if not any(row.step and row.kind != "steps" for row in rows):
        raise VerifyError("the two have no step in common that both recorded: there is nothing to compare.")
    last = max(row.step for row in rows)
    sentence = f"the two trainings are the same up to step {last}."
    return Report(title="", verdict="wrong" if findings else "same", sentence=sentence, findings=findings, worst=worst)


_RECORDING, _RUN = "a recording", "a run folder"


def _kind(path: Path) -> str:
    if (path / START).is_dir():
        return _RECORDING
    if (path / "metrics.jsonl").is_file():
        return _RUN
    raise VerifyError(
        f"{path} is neither a run folder of shoal train (there is no metrics.jsonl) nor a recording. A loop of your "
        "own records itself with shoal.verbs.verify.Recording (docs/verify.md)."
    )


def _dtype(reference: Path, *, recorded: bool) -> torch.dtype:
    """That of the weights."""
    if recorded:
        tensors = [
            Recorded(reference).tensor(START, f"weights/{n}") for n in Recorded(reference).keys(START, "weights")
        ]
    else:
        found = list_checkpoints(reference / "checkpoints")
        tensors = list(_tensors(read(found[-1].path).tree["model"]).values()) if found else []
    types = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return types[0] if types else torch.float32


def _of_runs(found: Path, reference: Path) -> Iterator[Row]:
    ours, theirs = ({int(e["step"] or 0): e for e in read_events(p / "metrics.jsonl")} for p in (found, reference))
    for step in sorted(set(ours) & set(theirs)):
        for key in (key for key in theirs[step] if key in ours[step]):
            kind = _FIGURES.get(key) or ("loss" if key.startswith("eval/") else None)
            a, b = ours[step][key], theirs[step][key]
            if kind is not None and isinstance(a, int | float) and isinstance(b, int | float):
                error = relative(float(a), float(b), TINY_LOSS if kind == "loss" else 0.0)
                yield Row(step=step, kind=kind, name=key, error=error, note=f"{a:.10g}, and {b:.10g} in the reference")
    kept = [{c.step: c.path for c in list_checkpoints(path / "checkpoints")} for path in (found, reference)]
    for step in sorted(set(kept[0]) & set(kept[1])):
        yield from _of_checkpoints(step, read(kept[0][step]).tree, read(kept[1][step]).tree)


def _of_checkpoints(step: int, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Row]:
    pairs = {
        "weights": (_tensors(ours["model"]), _tensors(theirs["model"])),
        "optimizer state": tuple(_tensors(tree["optimizer"]["state"]) for tree in (ours, theirs)),
    }
    for kind, (a, b) in pairs.items():
        floor = SMALL * math.hypot(*(float(t.double().norm()) for t in b.values())) if b and kind == "weights" else 0.0
        for order, name in enumerate(dict.fromkeys([*b, *a])):
            error = distance(a[name], b[name], floor) if name in a and name in b else math.inf
            yield Row(step=step, kind=kind, name=name, error=error, order=order)


def _tensors(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _tensors(value, f"{prefix}{name} ")
        elif isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
    return found


def _plain(row: Row) -> Diagnosis:
    told = row.note or ("is there in one of the two alone" if row.error == math.inf else f"differs by {row.error:.1e}")
    return Diagnosis(sentence=f"{row.kind}, {row.name}: {told}.")


def _noise(rows: list[Row]) -> list[str]:
    names = sorted({row.name.partition(" ")[0] for row in rows if row.error is None})
    return [f"weights and optimizer state where the gradient is rounding noise: {', '.join(names)}"] if names else []
