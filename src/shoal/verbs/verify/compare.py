"""Two recordings side by side: one row for every thing that can be compared, and one for what cannot.

Error: the Frobenius norm of the difference, relative to that of the reference, or to a thousandth of all tensors of
its kind where that is more. What a gradient that is zero by construction (a bias before a BatchNorm, the bias
of attention's keys) holds is rounding, of no size that two summations would agree on.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.verbs.verify.recording import START, Recorded, name_of
from shoal.verbs.verify.streams import faults

GATE = 1e-10  # in float64: rounding is 1e5 times smaller, the mildest known bug 1e3 times larger
SMALL = 1e-3  # of the size of all tensors of a kind
NOISE = 1e-12  # of the size of all gradients: one below it is rounding
TINY_LOSS = 1e-5

# In the order of cause and effect: the first that differs is the one to look at.
KINDS = (
    "initial weights",
    "sample ids",
    "random streams",
    "module outputs",
    "loss",
    "gradients",
    "gradient norm",
    "clip factor",
    "learning rate",
    "optimizer state",
    "weights",
    "steps",
)
_EXACT = ("initial weights", "sample ids", "random streams", "steps")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        step: counted from 1; 0 is the start.
        name: of the module, the parameter or the figure.
        key: of the tensor in its file; empty for a figure.
        error: relative; inf where shapes or existence differ; None where nothing could be compared (`note` says why).
        ranks: that hold this version.
        order: within its kind and step, by execution.
    """

    step: int
    kind: str
    name: str
    error: float | None
    key: str = ""
    ranks: tuple[int, ...] = (0,)
    order: int = 0
    note: str = ""

    @property
    def place(self) -> tuple[int, int, int]:
        """Where it stands in the chain of causes."""
        return self.step, KINDS.index(self.kind), self.order

    def differs(self, gate: float = GATE) -> bool:
        """Whether it is beyond the gate; what must be equal to the bit has none."""
        return self.error is not None and not self.error <= (0.0 if self.kind in _EXACT else gate)


def distance(found: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Relative Frobenius distance; inf where shapes differ, or what is not finite stands elsewhere."""
    if found.shape != reference.shape:
        return math.inf
    a, b = found.to(torch.float64), reference.to(torch.float64)
    finite = b.isfinite()
    if not bool(finite.all()):
        x, y = a[~finite], b[~finite]
        if not bool(((x == y) | (x.isnan() & y.isnan())).all()):
            return math.inf
        a, b = a[finite], b[finite]
    apart, scale = float((a - b).norm()), max(float(b.norm()), floor)
    if apart == 0.0:
        return 0.0
    return apart / scale if scale and math.isfinite(apart) else math.inf


def measure(found: Recorded, reference: Recorded, twin: Recorded | None = None) -> list[Row]:
    """Every comparison of two recordings, in the order of cause and effect; steps that only one has are a row.

    Args:
        twin: of a training that was resumed, the same without a stop: stages must draw what they drew there.
    """
    common = [step for step in found.steps if step in reference.steps]
    rows = list(_start(found, reference, common[0] if common else 1))
    noise: set[str] = set()
    for step in common:
        pair = _Pair(found, reference, step, twin)
        noise |= pair.noise
        rows += [*pair.ids(), *pair.random(), *pair.outputs(), *pair.figures(), *pair.gradients()]
        at = name_of(step)
        for row in (*pair.state(), *_weights(found, reference, (at, at), step, "weights")):
            is_noise = row.name.partition(" ")[0] in noise
            rows.append(_left_out(row, "the gradient is rounding noise") if is_noise else row)
    alone = set(found.steps) ^ set(reference.steps)
    if not common or any(common[0] <= step <= common[-1] for step in alone):
        rows.append(Row(step=min(alone, default=0), kind="steps", name="steps", error=math.inf))
    return sorted(rows, key=lambda row: row.place)


def _start(found: Recorded, reference: Recorded, first: int) -> Iterator[Row]:
    """Equal to the bit; a training that was resumed starts from what the other one had then."""
    before = name_of(first - 1)
    if first == 1 or not (reference.folder / before).is_dir():
        yield from _weights(found, reference, (START, START), 0, "initial weights")
    else:
        yield from _weights(found, reference, (START, before), first - 1, "weights")


def _left_out(row: Row, why: str) -> Row:
    return Row(step=row.step, kind=row.kind, name=row.name, error=None, note=why, order=row.order)


def whole_ids(recorded: Recorded, moment: str) -> list[int]:
    """The sample ids of the global batch: the data ranks' one behind the other."""
    parts: dict[int, list[int]] = {}
    for rank in range(recorded.num_ranks):
        data_rank = recorded.facts(START, rank).get("data_rank", rank)
        parts.setdefault(data_rank, recorded.facts(moment, rank).get("sample_ids", []))
    return [sample for data_rank in sorted(parts) for sample in parts[data_rank]]


class _Pair:
    """One step of both."""

    def __init__(self, found: Recorded, reference: Recorded, step: int, twin: Recorded | None = None) -> None:
        self._found, self._reference, self._twin = found, reference, twin
        self._step, self._at = step, name_of(step)

    def ids(self) -> Iterator[Row]:
        """The global batch is the same list; ranks with the same data coordinate hold the same part of it."""
        ours, theirs = whole_ids(self._found, self._at), whole_ids(self._reference, self._at)
        if not ours and not theirs:
            return
        yield self._row("sample ids", "the global batch", 0.0 if ours == theirs else math.inf)
        parts: dict[int, list[int]] = {}
        for rank in range(self._found.num_ranks):
            own = self._found.facts(self._at, rank).get("sample_ids", [])
            if parts.setdefault(self._data_rank(rank), own) != own:
                yield self._row("sample ids", f"rank {rank}", math.inf, ranks=(rank,))

    def random(self) -> Iterator[Row]:
        """The first data rank draws what one process draws, every other one a stream of its own; so does each stage."""
        yield from self._streams_of_stages()
        streams = {r: str(self._found.facts(self._at, r).get("random", "")) for r in range(self._found.num_ranks)}
        expected = str(self._reference.facts(self._at).get("random", ""))
        if not expected or "" in streams.values():
            return
        firsts: dict[int, str] = {0: expected}
        for rank, stream in streams.items():
            data_rank = self._data_rank(rank)
            right = firsts.setdefault(data_rank, stream) == stream
            right = right and (data_rank == 0 or stream not in (firsts[d] for d in firsts if d != data_rank))
            yield self._row("random streams", f"rank {rank}", 0.0 if right else math.inf, ranks=(rank,))

    def _streams_of_stages(self) -> Iterator[Row]:
        drawn, again = (
            [] if run is None else [run.facts(self._at, r).get("streams", {}) for r in range(run.num_ranks)]
            for run in (self._found, self._twin)
        )
        if any(drawn):
            wrong = faults(drawn, [self._data_rank(rank) for rank in range(len(drawn))], again)
            for rank in range(len(drawn)):
                error = math.inf if rank in wrong else 0.0
                yield self._row("random streams", f"rank {rank}", error, ranks=(rank,), note=wrong.get(rank, ""))

    def outputs(self) -> Iterator[Row]:
        """Each rank's outputs beside the rows of its samples in those of one process."""
        facts = self._reference.facts(self._at)
        if "calls" not in facts or self._reference.num_ranks > 1:
            return
        order = {key: index for index, key in enumerate(facts["calls"])}
        floor = SMALL * self._usual_output
        for rank in range(self._found.num_ranks):
            yield from self._outputs_of(rank, order, floor)

    def _outputs_of(self, rank: int, order: Mapping[str, int], floor: float) -> Iterator[Row]:
        facts, theirs = self._found.facts(self._at, rank), self._reference.facts(self._at)
        positions = {sample: index for index, sample in enumerate(theirs["sample_ids"])}
        for key in facts.get("calls", []):
            call, _, micro = key.removeprefix("outputs/").rpartition("@")
            twin = f"outputs/{call}@0"
            ids = facts["micro_ids"][int(micro)] if int(micro) < len(facts["micro_ids"]) else []
            if not ids or not all(sample in positions for sample in ids):
                continue
            about = {"key": key, "ranks": (rank,), "order": order.get(twin, len(order))}
            name = name_of_output(key) or "the model"
            if twin not in order:
                yield self._row("module outputs", name, None, note="one process does not make this call", **about)
                continue
            ours = self._found.tensor(self._at, facts["same"].get(key, key), rank)
            whole = self._reference.tensor(self._at, theirs["same"].get(twin, twin))
            rows = [positions[sample] for sample in ids]
            expected = aligned(ours, whole, rows, len(positions), facts["spans"].get(key, []))
            if expected is None:
                note = f"{tuple(ours.shape)} here, {tuple(whole.shape)} in one process"
                yield self._row("module outputs", name, None, note=note, **about)
            else:
                yield self._row("module outputs", name, distance(ours, expected, floor), **about)

    @cached_property
    def _usual_output(self) -> float:
        facts = self._reference.facts(self._at)
        norms = [
            float(self._reference.tensor(self._at, k).double().norm()) for k in facts["calls"] if k not in facts["same"]
        ]
        norms = sorted(norm for norm in norms if math.isfinite(norm))
        return norms[len(norms) // 2] if norms else 0.0

    def figures(self) -> Iterator[Row]:
        """Loss, norm, clip factor and learning rates, of every rank."""
        theirs = self._reference.facts(self._at)
        kinds = {"loss": "loss", "grad_norm": "gradient norm", "clip": "clip factor"}
        for rank in range(self._found.num_ranks):
            ours = self._found.facts(self._at, rank)
            for key, kind in kinds.items():
                if ours.get(key) is not None and theirs.get(key) is not None:
                    floor = TINY_LOSS if key == "loss" else 0.0
                    yield self._row(kind, kind, relative(ours[key], theirs[key], floor), ranks=(rank,))
            for index, (a, b) in enumerate(zip(ours.get("lr", []), theirs.get("lr", []), strict=False)):
                yield self._row("learning rate", f"group {index}", relative(a, b), ranks=(rank,), order=index)
            if ("lr" in ours) != ("lr" in theirs):
                yield self._row("learning rate", "the update", math.inf, ranks=(rank,), note="made in one of the two")

    def gradients(self) -> Iterator[Row]:
        """Before clipping, so that a wrong norm is no wrong gradient; what backward reaches first comes first."""
        order = backward_order(self._reference)
        for name in self._names("gradients"):
            key = f"gradients/{name}"
            about: dict[str, Any] = {"key": key, "order": order.get(name, len(order))}
            has = self._reference.has(self._at, key)
            for ranks in self._sides(key):
                if self._found.has(self._at, key, ranks[0]) != has:
                    note = "is missing" if has else "exists, and one process has none"
                    yield self._row("gradients", name, math.inf, ranks=ranks, note=note, **about)
                elif has:
                    ours = self._found.tensor(self._at, key, ranks[0])
                    error = distance(ours, self._reference.tensor(self._at, key), SMALL * self._all_gradients)
                    yield self._row("gradients", name, error, ranks=ranks, **about)

    @cached_property
    def _all_gradients(self) -> float:
        return math.sqrt(sum(norm**2 for norm in self._gradient_norms.values()))

    @cached_property
    def _gradient_norms(self) -> dict[str, float]:
        names = [n for n in self._names("gradients") if self._reference.has(self._at, f"gradients/{n}")]
        return {n: float(self._reference.tensor(self._at, f"gradients/{n}").double().norm()) for n in names}

    @property
    def noise(self) -> set[str]:
        """Parameters whose gradient is zero but for rounding."""
        return {name for name, norm in self._gradient_norms.items() if 0 < norm <= NOISE * self._all_gradients}

    def state(self) -> Iterator[Row]:
        """The optimizer's, key by key."""
        names = self._names("state")
        sizes: dict[str, float] = {}
        for name in names:
            if self._reference.has(self._at, f"state/{name}"):
                kind = name.rpartition("/")[2]
                norm = float(self._reference.tensor(self._at, f"state/{name}").double().norm())
                sizes[kind] = math.hypot(sizes.get(kind, 0.0), norm)
        for order, name in enumerate(names):
            floor = SMALL * sizes.get(name.rpartition("/")[2], 0.0)
            shown = name.replace("/", " ")
            about = {"step": self._step, "kind": "optimizer state", "name": shown, "order": order}
            both = (self._at, self._at)
            yield from _tensor_rows(self._found, self._reference, both, f"state/{name}", floor, about)

    def _names(self, kind: str) -> list[str]:
        return list(dict.fromkeys([*self._reference.keys(self._at, kind), *self._found.keys(self._at, kind)]))

    def _sides(self, key: str) -> list[tuple[int, ...]]:
        """Ranks, by the version that they hold; those without one are a side of their own."""
        return sides(self._found, self._at, key)

    def _data_rank(self, rank: int) -> int:
        return int(self._found.facts(START, rank).get("data_rank", rank))

    def _row(self, kind: str, name: str, error: float | None, **about: Any) -> Row:
        return Row(step=self._step, kind=kind, name=name, error=error, **about)


def sides(recorded: Recorded, moment: str, key: str) -> list[tuple[int, ...]]:
    """Ranks, by the version of a tensor that they hold: those of rank 0's first."""
    versions = recorded.versions(moment, key)
    without = [r for r in range(recorded.num_ranks) if not recorded.has(moment, key, r)]
    alike = tuple(r for r in range(recorded.num_ranks) if r not in without and (r == 0 or r not in versions))
    others = [(r,) for r in versions if r not in alike]
    return [side for side in (alike, *others, tuple(without)) if side]


def _weights(found: Recorded, reference: Recorded, moments: tuple[str, str], step: int, kind: str) -> Iterator[Row]:
    theirs = reference.keys(moments[1], "weights")
    norms = [float(reference.tensor(moments[1], f"weights/{name}").double().norm()) for name in theirs]
    floor = SMALL * math.hypot(*norms) if norms and kind == "weights" else 0.0
    known = [name for name in reference.facts(START).get("weights", []) if name in theirs]
    for order, name in enumerate(dict.fromkeys([*known, *theirs, *found.keys(moments[0], "weights")])):
        about = {"step": step, "kind": kind, "name": name, "order": order}
        yield from _tensor_rows(found, reference, moments, f"weights/{name}", floor, about)


def _tensor_rows(
    found: Recorded, reference: Recorded, moments: tuple[str, str], key: str, floor: float, about: dict[str, Any]
) -> Iterator[Row]:
    has = reference.has(moments[1], key)
    expected = reference.tensor(moments[1], key) if has else None
    for ranks in sides(found, moments[0], key) or [(0,)]:
        if expected is None or not found.has(moments[0], key, ranks[0]):
            yield Row(error=math.inf, key=key, ranks=ranks, note="is there in one of the two", **about)
            continue
        ours = found.tensor(moments[0], key, ranks[0])
        exact = not ours.is_floating_point() or about["kind"] in _EXACT
        error = 0.0 if exact and torch.equal(ours, expected) else distance(ours, expected, floor)
        yield Row(error=error, key=key, ranks=ranks, **about)


def name_of_output(key: str) -> str:
    """The module; empty for the model itself."""
    return key.removeprefix("outputs/").partition("@")[0]


def backward_order(recorded: Recorded) -> dict[str, int]:
    """Parameters in the order in which backward comes to them: the calls of the first forward, reversed.

    Where no calls were recorded, the order in which the model holds them stands in.
    """
    last: dict[str, int] = {}
    for step in recorded.steps[:1]:
        for index, key in enumerate(recorded.facts(name_of(step)).get("calls", [])):
            last[name_of_output(key)] = index
    names = list(enumerate(recorded.facts(START).get("parameters", [])))
    ranked = sorted(names, key=lambda pair: (last.get(pair[1].rpartition(".")[0], -1), pair[0]), reverse=True)
    return {name: place for place, (_, name) in enumerate(ranked)}


def aligned(found: Tensor, whole: Tensor, rows: list[int], num_global: int, spans: list[list[int]]) -> Tensor | None:
    """The part of a whole output that a rank's output is to be compared with; None where that cannot be told.

    Args:
        rows: the positions of this rank's samples in the global batch.
        spans: where a split layer's features lie: [dim, in this rank's, in the whole, number].
    """
    if spans and found.dim() == whole.dim():
        dim = spans[0][0]
        features = torch.zeros(found.shape[dim], dtype=torch.int64)
        for _, local, start, size in spans:
            features[local : local + size] = torch.arange(start, start + size)
        whole = whole.index_select(dim, features)
    if found.shape == whole.shape:
        return whole
    if found.dim() != whole.dim():
        return None
    differ = [d for d in range(found.dim()) if found.shape[d] != whole.shape[d]]
    if len(differ) != 1 or found.shape[differ[0]] * num_global != whole.shape[differ[0]] * len(rows):
        return None
    dim = differ[0]
    each = found.shape[dim] // len(rows)  # a batch that is flattened with time has several rows per sample
    if each * len(rows) != found.shape[dim]:
        return None
    index = (torch.tensor(rows)[:, None] * each + torch.arange(each)).flatten()
    return whole.index_select(dim, index)


def relative(a: float, b: float, floor: float = 0.0) -> float:
    """The distance of two figures, relative to the second, or to a floor where that is more."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    scale = max(abs(b), floor)
    return abs(a - b) / scale if scale and math.isfinite(a - b) else math.inf
