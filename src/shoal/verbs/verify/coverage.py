"""What a verification did not look at: said, so that nobody takes silence for proof."""

from collections.abc import Iterable, Sequence
from typing import Any

from shoal.layout import Layout
from shoal.verbs.verify.compare import Row, name_of_output
from shoal.verbs.verify.recording import START, Recorded, name_of

_ALWAYS = (
    "evaluation mode",
    "kernels and collectives of other devices (this ran on CPU with gloo)",
)
_MOST = 4


def uncovered(layout: Layout, reference: Recorded, found: Recorded, rows: Sequence[Row]) -> list[str]:
    """In words, the most particular first."""
    start, facts, theirs = reference.facts(START), _facts(reference), _facts(found)
    called, spread = _called(facts), _called(theirs)
    leaving = {name for each in theirs for name in each.get("begun", [])} & called - spread
    learned = {name for step in reference.steps for name in reference.keys(name_of(step), "gradients")}
    told = [
        _list("modules that were never executed", [n or "the model" for n in start["modules"] if n not in called]),
        _list("modules that only one process executes", sorted(called - spread - leaving)),
        _list("outputs that a stage hands to the next, but in what that makes of them", sorted(leaving)),
        _list("parameters that got no gradient", [n for n in start["parameters"] if n not in learned]),
        _list("dropout, which was switched off", _united([*facts, *theirs], "silenced")),
        _list("random numbers that a forward draws, which differ between layouts", _united(facts, "draws")),
        *_left_out(rows),
        "outputs of modules in all replicas but the first" if layout.threads > 1 else "",
        "compiled kernels: compile= was left out" if layout.compile != "none" else "",
        _list("steps without an update", [each["skipped"] for each in facts if each.get("skipped")]),
        f"what comes after step {max(reference.steps, default=0)}",
        *_ALWAYS,
    ]
    return [what for what in told if what]


def _facts(recorded: Recorded) -> list[dict[str, Any]]:
    return [recorded.facts(name_of(step), rank) for step in recorded.steps for rank in range(recorded.num_ranks)]


def _called(facts: Iterable[dict[str, Any]]) -> set[str]:
    return {name_of_output(key) for each in facts for key in each.get("calls", [])}


def _united(facts: Iterable[dict[str, Any]], key: str) -> list[str]:
    return sorted({name or "the model" for each in facts for name in each.get(key, [])})


def _left_out(rows: Iterable[Row]) -> list[str]:
    """Comparisons that could not be made, by kind and reason."""
    missing = [row for row in rows if row.error is None]
    compared = {row.name for row in rows if row.error is not None and row.kind == "module outputs"}
    outputs = {row.name: row.note for row in missing if row.kind == "module outputs" and row.name not in compared}
    named = [f"{name} ({note})" for name, note in outputs.items()]
    told = [_list("outputs that could not be put beside those of one process", named)]
    others = {row.name.partition(" ")[0]: row.note for row in missing if row.kind != "module outputs"}
    for note in dict.fromkeys(others.values()):
        told.append(_list(f"weights and optimizer state where {note}", [n for n, why in others.items() if why == note]))
    return told


def _list(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{what}: {', '.join(names[:_MOST])}{more}"
