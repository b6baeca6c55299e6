"""The first difference, in one plain sentence: what differs, by how much, and which mistake makes such a number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.layout import Layout
from shoal.verbs.verify import figures, hypotheses
from shoal.verbs.verify.compare import Row, aligned, name_of_output, whole_ids
from shoal.verbs.verify.hypotheses import Portion, Setting
from shoal.verbs.verify.recording import START, Recorded, name_of
from shoal.verbs.verify.shares import Share

_FLOAT32 = (1e-9, 1e-5)  # between these a first step's error looks like float32 rounding


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A sentence, and the two numbers behind it (None for what is no tensor)."""

    sentence: str
    ratio: float | None = None
    cosine: float | None = None


def diagnose(row: Row, found: Recorded, reference: Recorded, shares: Sequence[Share] = ()) -> Diagnosis:
    """Explain one row that differs; `shares` are those of the first global batch, where they are known."""
    return _Case(row, found, reference, shares).diagnose()


class _Case:
    def __init__(self, row: Row, found: Recorded, reference: Recorded, shares: Sequence[Share]) -> None:
        self._row, self._found, self._reference, self._shares = row, found, reference, shares
        self._rank = row.ranks[0]
        self._at, self._then = _moment(found, row.step), _moment(reference, row.step)
        self._setting = setting_of(found, reference, self._then)

    def diagnose(self) -> Diagnosis:
        by_kind = {
            "initial weights": self._initial,
            "sample ids": self._ids,
            "random streams": self._random,
            "module outputs": self._output,
            "gradients": self._gradient,
            "gradient norm": self._norm,
            "learning rate": self._lr,
            "optimizer state": self._updated,
            "weights": self._updated,
            "loss": self._figure,
            "clip factor": self._figure,
        }
        return by_kind.get(self._row.kind, self._other)()

    # -- the start, the samples, the streams ---------------------------------------------------------------

    def _initial(self) -> Diagnosis:
        if self._row.note:
            return self._say(f"{self._row.name} {self._row.note}: the models are not the same")
        return self._say(f"the training starts from other values of {self._row.name}{self._where()}")

    def _ids(self) -> Diagnosis:
        ours, theirs = whole_ids(self._found, self._at), whole_ids(self._reference, self._at)
        return self._say(f"the samples are not those of one process: {_compare(ours, theirs)}")

    def _random(self) -> Diagnosis:
        if self._row.note:
            return self._say(f"rank {self._rank}: {self._row.note}")
        data_rank = self._found.facts(START, self._rank).get("data_rank", self._rank)
        what = (
            "draws another random stream than one process"
            if data_rank == 0
            else "draws the random stream of another data rank, or not that of the ranks with the same samples"
        )
        return self._say(f"rank {self._rank} {what}: its dropout is not what it should be")

    # -- tensors ---------------------------------------------------------------------------------------------

    def _output(self) -> Diagnosis:
        facts, theirs = self._found.facts(self._at, self._rank), self._reference.facts(self._at)
        key = self._row.key
        twin = f"{key.rpartition('@')[0]}@0"
        ours = self._found.tensor(self._at, facts["same"].get(key, key), self._rank)
        whole = self._reference.tensor(self._at, theirs["same"].get(twin, twin))
        micro = int(key.rpartition("@")[2])
        positions = {sample: index for index, sample in enumerate(theirs["sample_ids"])}

        def of(ids: list[int]) -> Tensor | None:
            rows = [positions[sample] for sample in ids]
            return aligned(ours, whole, rows, len(positions), facts["spans"].get(key, []))

        expected = of(facts["micro_ids"][micro])
        subject = f"the output of {self._row.name}{self._where()}"
        if expected is None:
            return self._say(f"{subject} has another shape")
        why = self._why_samples(ours, micro, of) or self._why_output(ours, expected)
        return self._judge(subject, ours, expected, why, draws=self._draws())

    def _why_samples(self, ours: Tensor, micro: int, of: Callable[[list[int]], Tensor | None]) -> str:
        """It is right, for the samples of another micro-batch or rank."""
        for rank in range(self._found.num_ranks):
            for other, ids in enumerate(self._found.facts(self._at, rank).get("micro_ids", [])):
                expected = of(ids) if ids and (rank, other) != (self._rank, micro) else None
                if expected is not None and expected.shape == ours.shape and _near(ours.double(), expected):
                    data_rank = self._found.facts(START, rank).get("data_rank", rank)
                    is_own = data_rank == self._found.facts(START, self._rank).get("data_rank", self._rank)
                    whose = f"micro-batch {other + 1}" + ("" if is_own else f" of data rank {data_rank}")
                    return f"in micro-batch {micro + 1} it is that of {whose}"
        return ""

    def _why_output(self, ours: Tensor, expected: Tensor) -> str:
        prefix = "" if self._row.name == "the model" else f"{self._row.name}."
        before = START if self._row.step == 1 else name_of(self._row.step - 1)
        weight, bias = (self._weight(before, f"{prefix}{kind}") for kind in ("weight", "bias"))
        times = None if bias is None else hypotheses.bias_count(ours, expected, bias)
        if times is not None:
            return f"its bias is added {times:.6g} times"
        kind = self._reference.facts(START).get("modules", {}).get(prefix.rstrip("."), "")
        if "BatchNorm" in kind and hypotheses.is_normalised_alone(ours, weight, bias):
            return "each rank normalises its own samples, not the global batch"
        return self._missing_over_tp(expected)

    def _missing_over_tp(self, expected: Tensor) -> str:
        """Ranks with the same samples that hold summands of one output."""
        setting, own = self._setting, self._setting.coordinates[self._rank] if self._setting.coordinates else {}
        peers = [r for r, at in enumerate(setting.coordinates) if all(at[a] == own[a] for a in at if a != "tp")]
        if len(peers) < 2:
            return ""
        held = []
        for rank in peers:
            facts = self._found.facts(self._at, rank)
            held.append(self._found.tensor(self._at, facts["same"].get(self._row.key, self._row.key), rank).double())
        is_sum = all(h.shape == expected.shape for h in held) and _near(sum(held[1:], held[0]), expected)
        return "a sum over tp is missing" if is_sum else ""

    def _gradient(self) -> Diagnosis:
        subject = f"the gradient of {self._row.name}{self._where()}"
        if not any(self._found.has(self._at, f"gradients/{n}") for n in self._found.keys(self._at, "gradients")):
            return self._say("the optimizer was given no gradient: it holds other tensors than the model")
        if self._row.note:
            return self._say(f"{subject} {self._row.note}")
        ours = self._found.tensor(self._at, self._row.key, self._rank)
        expected = self._reference.tensor(self._then, self._row.key)
        versions = [self._found.tensor(self._at, self._row.key, r) for r in range(self._found.num_ranks)]
        differ = any(not torch.equal(version, versions[0]) for version in versions)
        holders = self._found.facts(START).get("holders", {}).get(self._row.name, ())
        why = hypotheses.missing_reduction(versions, expected, self._setting, holders) if differ else ""
        why = why or self._why_zero(ours)
        if not why and hypotheses.is_scaled(ours, expected) is None:
            why = self._why_untied(ours, expected) or self._why_shares(ours)
        return self._judge(subject, ours, expected, why, draws=self._draws())

    def _why_zero(self, ours: Tensor) -> str:
        """A whole stage without gradient: nothing has come back to it."""
        stage = self._stage_of(self._row.name)
        if stage is None or stage + 1 == self._setting.stages or bool(ours.any()):
            return ""
        shared = self._found.facts(START).get("holders", {})
        names = [n for n in self._found.keys(self._at, "gradients") if self._stage_of(n) == stage and n not in shared]
        held = [self._found.tensor(self._at, f"gradients/{name}", self._rank) for name in names]
        if any(bool(grad.any()) for grad in held):
            return ""
        return f"no gradient comes back to stage {stage} from stage {stage + 1}"

    def _why_shares(self, ours: Tensor) -> str:
        name = self._row.name
        if self._row.step != 1 or not all(name in share.gradients for share in self._shares):
            return ""
        return hypotheses.of_portions(
            ours,
            [
                Portion(data_rank=s.data_rank, micro=s.micro, gradient=s.gradients[name], count=s.count)
                for s in self._shares
            ],
        )

    def _why_untied(self, ours: Tensor, expected: Tensor) -> str:
        """A parameter that one process knows under the name of another, with a gradient of its own here."""
        for name in self._found.keys(self._at, "gradients"):
            key = f"gradients/{name}"
            if self._reference.has(self._then, key) or not self._found.has(self._at, key, self._rank):
                continue
            other = self._found.tensor(self._at, key, self._rank)
            if other.shape == ours.shape and _near(ours.double() + other.double(), expected):
                return f"{name}, which is the same parameter in one process, is one of its own here"
        return ""

    def _updated(self) -> Diagnosis:
        row = self._row
        what = row.name if row.kind == "weights" else f"the optimizer's {' of '.join(reversed(row.name.split(' ', 1)))}"
        subject = f"{what}{self._where()}"
        if row.note:
            return self._say(f"{subject} {row.note}")
        ours = self._found.tensor(self._at, row.key, self._rank)
        expected = self._reference.tensor(self._then, row.key)
        why = self._why_one_rank() or self._why_forwards()
        why = why or (self._why_update(ours, expected) if row.kind == "weights" else "")
        return self._judge(subject, ours, expected, why)

    def _why_one_rank(self) -> str:
        ranks, num = self._row.ranks, self._found.num_ranks
        if len(ranks) == num:
            return ""
        return f"it was changed on rank {ranks[0]} alone" if len(ranks) == 1 else "the ranks hold different values"

    def _why_forwards(self) -> str:
        """A norm that has seen more batches than in one process."""
        key = f"weights/{self._row.name.rpartition('.')[0]}.num_batches_tracked"
        if self._row.kind != "weights" or not self._reference.has(self._then, key):
            return ""
        ours, theirs = int(self._found.tensor(self._at, key, self._rank)), int(self._reference.tensor(self._then, key))
        if ours == theirs:
            return ""
        return f"its statistics were moved by {ours} forwards up to here, in one process by {theirs}"

    def _why_update(self, ours: Tensor, expected: Tensor) -> str:
        """By what happened in this step: the value now less the value before."""
        before = name_of(self._row.step - 1) if self._row.step - 1 in self._found.steps else START
        if self._row.step == 0 or self._at == START or (before == START and self._row.step > 1):
            return ""
        was = self._found.tensor(before, self._row.key, self._rank)
        if torch.equal(was, ours):
            return "it was not updated: the optimizer holds other tensors than the model"
        ratio = hypotheses.is_scaled(ours.double() - was.double(), expected.double() - was.double())
        return "" if ratio is None else f"its update is {hypotheses.amount(ratio)} that of one process"

    # -- figures -----------------------------------------------------------------------------------------------

    def _figure(self) -> Diagnosis:
        key = {"loss": "loss", "clip factor": "clip"}[self._row.kind]
        ours, theirs = self._both(key)
        ratio = hypotheses.ratio_of(ours, theirs)
        subject = f"the {self._row.kind}{self._where()}"
        why = figures.of_loss(ours, self._shares) if self._row.kind == "loss" and self._row.step == 1 else []
        why = [reason for reason in (*why, *hypotheses.reasons(ratio, self._setting)) if reason]
        told = f"{subject} is {ours:.10g}, {hypotheses.amount(ratio)} the reference ({theirs:.10g})"
        return self._say(told, "; or ".join(why), ratio=ratio)

    def _norm(self) -> Diagnosis:
        ours, theirs = self._both("grad_norm")
        ratio = hypotheses.ratio_of(ours, theirs)
        told = f"the gradient norm is {ours:.10g}, {hypotheses.amount(ratio)} the reference ({theirs:.10g})"
        norms = [self._found.facts(self._at, rank)["grad_norm"] for rank in range(self._found.num_ranks)]
        facts = self._found.facts(START)
        gradient = figures.Gradient(
            squares={
                name: float(self._reference.tensor(self._then, f"gradients/{name}").double().norm()) ** 2
                for name in self._reference.keys(self._then, "gradients")
            },
            axes=facts.get("parts", {}),
            copies={name: len(at) for name, at in facts.get("holders", {}).items()},
            setting=self._setting,
        )
        if len(set(norms)) > 1:
            return self._say(told, gradient.why_norms(norms), ratio=ratio)
        return self._say(f"every gradient is right, but {told}", gradient.why_norm(ratio), ratio=ratio)

    def _lr(self) -> Diagnosis:
        if self._row.note:
            return self._say("the update is made in one of the two trainings alone")
        ours, theirs = (r.facts(self._at, k)["lr"] for r, k in ((self._found, self._rank), (self._reference, 0)))
        group = self._row.order
        told = f"the learning rate is {ours[group]:.10g}, in one process {theirs[group]:.10g}"
        earlier = [s for s in self._reference.steps if s < self._row.step]
        was = [s for s in earlier if self._reference.facts(name_of(s))["lr"][group] == ours[group]]
        return self._say(
            told, f"it is that of step {was[-1]}: the schedule was not advanced, or not restored" if was else ""
        )

    def _other(self) -> Diagnosis:
        return self._say(f"step {self._row.step} is in one of the two recordings alone")

    # -- words ---------------------------------------------------------------------------------------------------

    def _judge(self, subject: str, ours: Tensor, expected: Tensor, why: str, draws: str = "") -> Diagnosis:
        if ours.shape != expected.shape:
            return self._say(f"{subject} is {tuple(ours.shape)}, in one process {tuple(expected.shape)}")
        ratio, cosine = hypotheses.ratio_and_cosine(ours, expected)
        scaled = hypotheses.is_scaled(ours, expected)
        told = f"{subject} is not that of one process"
        if not bool(ours.any()):
            told = f"{subject} is zero"
        elif scaled is not None and not hypotheses.same(scaled, 1.0):
            told = f"{subject} is {hypotheses.amount(scaled)} the reference"
            why = why or "; or ".join(hypotheses.reasons(scaled, self._setting))
        elif not why and hypotheses.is_reordered(ours, expected):
            why = "it holds the right values in the wrong places: parts were put together in another order"
        elif not why and self._row.step == 1 and _FLOAT32[0] < (self._row.error or 0.0) < _FLOAT32[1]:
            why = f"the difference has the size of float32 rounding: something {self._in_there()} computes in float32"
        return self._say(told, why or draws, ratio=ratio, cosine=cosine)

    def _in_there(self) -> str:
        """Of the first module of a stage, what comes from the stage before may be at fault."""
        calls = self._found.facts(self._at, self._rank).get("calls", [])
        stage = self._stage_of(self._row.name)
        ours = [key for key in calls if self._stage_of(name_of_output(key)) == stage]
        if not stage or ours[:1] != [self._row.key]:
            return "in there"
        return f"in there, or between stage {stage - 1} and stage {stage},"

    def _say(self, told: str, why: str = "", *, ratio: float | None = None, cosine: float | None = None) -> Diagnosis:
        return Diagnosis(sentence=f"{told}: {why}." if why else f"{told}.", ratio=ratio, cosine=cosine)

    def _where(self) -> str:
        """` (stage 0)` in a pipeline; ` on rank 1`, where not all ranks share it."""
        ranks, num = self._row.ranks, self._found.num_ranks
        stage = self._stage_of(self._row.name)
        told = "" if stage is None else f" (stage {stage})"
        if len(ranks) == num or self._row.kind in ("module outputs", "loss"):
            return told
        return f"{told} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

    def _stage_of(self, name: str) -> int | None:
        """Of a module, a parameter, or a key of its optimizer state; None without a pipeline, and between stages."""
        stages = self._found.facts(START).get("stages", {})
        return next((s for atom, s in stages.items() if f"{name.partition(' ')[0]}.".startswith(f"{atom}.")), None)

    def _draws(self) -> str:
        drawn = self._reference.facts(self._at).get("draws", [])
        return f"{drawn[0] or 'the model'} draws random numbers, which differ between layouts" if drawn else ""

    def _both(self, key: str) -> tuple[float, float]:
        return self._found.facts(self._at, self._rank)[key], self._reference.facts(self._at)[key]

    def _weight(self, moment: str, name: str) -> Tensor | None:
        has = self._reference.has(moment, f"weights/{name}")
        return self._reference.tensor(moment, f"weights/{name}") if has else None


def _moment(recorded: Recorded, step: int) -> str:
    return name_of(step) if step in recorded.steps else START


def setting_of(found: Recorded, reference: Recorded, moment: str) -> Setting:
    """The numbers of the layout that was recorded."""
    own = found.facts(START)
    sizes = own.get("sizes", {})
    layout = Layout.parse(own.get("layout", "lone"))
    return Setting(
        sizes=sizes,
        micro=layout.micro,
        stages=layout.num_stages,
        coordinates=[found.facts(START, rank).get("coordinates", {}) for rank in range(found.num_ranks)]
        if sizes
        else (),
        count=reference.facts(moment).get("count"),
    )


def _near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b.double()).norm() <= hypotheses.SAME * b.double().norm())


def _compare(ours: list[int], theirs: list[int]) -> str:
    """How two lists of samples differ."""
    twice = sorted({sample for sample in ours if ours.count(sample) > 1})
    missing = [sample for sample in theirs if sample not in ours]
    extra = [sample for sample in ours if sample not in theirs]
    if not missing and not extra and not twice:
        return (
            f"the same {len(ours)}, in another order" if len(ours) == len(theirs) else f"{len(ours)}, not {len(theirs)}"
        )
    told = [f"{len(twice)} come more than once (sample {twice[0]}): ranks share samples"] if twice else []
    told += [f"{len(missing)} of {len(theirs)} are missing (sample {missing[0]})"] if missing else []
    told += [f"{len(extra)} are of another step (sample {extra[0]})"] if extra else []
    return ", ".join(told)
