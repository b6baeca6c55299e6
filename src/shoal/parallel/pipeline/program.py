"""What one forward of a model does, call by call, and what of it each stage of a pipeline needs.

    call 0  token(tokens)          -> value 0        stage 0
    call 1  value 0 + positions    -> value 1        stage 0: a function between modules runs where its inputs are
    call 2  blocks.0(value 1)      -> value 2        stage 0 -+
    call 3  blocks.1(value 2)      -> value 3        stage 1 <- value 2 crosses
    call 4  head(value 3)          -> value 4        stage 1, which returns it

A value is a tensor that depends on parameters. All else (tokens, masks, positions) every stage makes for itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import LayoutError

_GLUED = (
    " (layers that tensor parallelism cuts together stay together, and so do those that make or read a value before it "
    "is written in place)"
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an atom (a module that is never cut), or of a function between atoms.

    Attributes:
        atom: its name; empty for a function.
        name: of the function, for errors.
        uses, makes: the values that go in and come out.
        params: names of the parameters that take part.
        writes: the values that it changes in place, and all that share memory with them.
        changed: of a function, which of the tensors that it is given it changes, by place.
    """

    atom: str
    name: str
    uses: tuple[int, ...]
    makes: tuple[int, ...]
    params: frozenset[str] = frozenset()
    writes: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Meta:
    """What is known of a value before it exists."""

    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool

    @property
    def numel(self) -> int:
        """Elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass
class Program:
    """Calls in the order in which they run, the values they make, and those that the model returns."""

    calls: list[Call] = field(default_factory=list)
    values: list[Meta] = field(default_factory=list)
    returns: tuple[int, ...] = ()
    result: Any = None  # what it returns, values as shapes
    outputs: dict[int, Any] = field(default_factory=dict)  # by place: what a call gives, values as shapes
    has_effects: bool = False  # it leaves hooks or state of its own behind, so no stage may leave it early
    moves_state: bool = False  # the latter

    @property
    def atoms(self) -> list[str]:
        """Each once, in the order of their first calls."""
        return list(dict.fromkeys(call.atom for call in self.calls if call.atom))

    def spans(self) -> dict[str, tuple[int, int]]:
        """Of every atom, the places of its first and last call among the calls of atoms."""
        spans: dict[str, tuple[int, int]] = {}
        for place, call in enumerate(call for call in self.calls if call.atom):
            spans[call.atom] = (spans.get(call.atom, (place, place))[0], place)
        return spans

    def writers(self) -> set[tuple[str, str]]:
        """Pairs of atoms: one that makes a value, or reads it, before the other writes into it, in place.

        A function counts as the last atom that leads to it, with which it runs. In two stages each would have a copy.
        """
        lead: dict[int, tuple[int, str]] = {}  # by value: place and name of the last atom that leads to it
        seen: dict[int, set[str]] = {}  # by value: the atoms that have made or read it so far
        pairs = set()
        for place, call in enumerate(self.calls):
            _, atom = own = (place, call.atom) if call.atom else max((lead[v] for v in call.uses), default=(-1, ""))
            pairs |= {(other, atom) for value in call.writes for other in seen[value]}
            for value in (*call.uses, *call.makes):
                seen.setdefault(value, set()).add(atom)
            lead |= dict.fromkeys(call.makes, own)
        return {(a, b) for a, b in pairs if a and b and a != b}


@dataclass(frozen=True)
class Cut:
    """A program, spread over stages.

    Attributes:
        homes: of every call, the stage that runs it.
        made_in: of every value, the stage that makes it.
        enters: of every stage, the values that it is sent by the one before; those that later ones need it passes on.
        last: of every stage, the last call that it runs; -1 for none.
    """

    homes: tuple[int, ...]
    made_in: tuple[int, ...]
    enters: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return len(self.enters)

    def leaves(self, stage: int) -> tuple[int, ...]:
        """The values that a stage sends to the next."""
        return self.enters[stage + 1] if stage + 1 < self.num_stages else ()

    @staticmethod
    def of(program: Program, owner: Mapping[str, int], num_stages: int) -> "Cut":
        """Where each call runs, given the stage of every atom.

        Raises:
            LayoutError: an atom needs a value of a later stage, or a value is written where others have a copy.
        """
        homes: list[int | None] = []
        made_at: dict[int, int] = {value: place for place, call in enumerate(program.calls) for value in call.makes}
        for call in program.calls:
            before = [homes[made_at[value]] for value in call.uses]
            latest = max((home for home in before if home is not None), default=None)
            own = owner[call.atom] if call.atom else latest
            if own is not None and latest is not None and own < latest:
                raise LayoutError(
                    f"the pipeline cannot be cut so: {call.atom} is in stage {own} and is called on what stage "
                    f"{latest} makes. Put it in that stage or a later one."
                )
            homes.append(own)
        # Made of parameters alone: where it is used first. A function of such values: where they are, as of all values.
        users: dict[int, list[int]] = {}
        for place, call in enumerate(program.calls):
            for value in call.uses:
                users.setdefault(made_at[value], []).append(place)
        for place in reversed(range(len(homes))):
            if homes[place] is None:
                homes[place] = min((homes[user] or 0 for user in users.get(place, ())), default=num_stages - 1)
        known: list[int] = []
        for call, home in zip(program.calls, homes, strict=True):
            of_uses = () if call.atom else (known[made_at[value]] for value in call.uses)
            known.append(max(of_uses, default=home or 0))
        needed: dict[int, int] = dict.fromkeys(program.returns, num_stages - 1)
        for call, home in zip(program.calls, known, strict=True):
            for value in call.uses:
                needed[value] = max(needed.get(value, 0), home)
        enters = tuple(
            tuple(v for v in range(len(program.values)) if v in needed and known[made_at[v]] < stage <= needed[v])
            for stage in range(num_stages)
        )
        last = tuple(
            max((place for place, home in enumerate(known) if home == stage), default=-1) for stage in range(num_stages)
        )
        made_in = tuple(known[made_at[value]] for value in range(len(program.values)))
        _check_writes(program, known, made_in)
        return Cut(tuple(known), made_in, enters, last)


def _check_writes(program: Program, homes: Sequence[int], made_in: Sequence[int]) -> None:
    """What is written, one stage has alone until then: what is sent is what it is when that stage is over."""
    last_read: dict[int, int] = {}  # by value: the last stage that has read it so far
    for call, home in zip(program.calls, homes, strict=True):
        far = {made_in[value] for value in call.writes} | {last_read.get(value, home) for value in call.writes}
        if far - {home}:
            raise LayoutError(
                f"{call.name} (in stage {home}) writes in place into a value that stage {max(far - {home})} has too, "
                "and in a pipeline each stage has a copy of its own. Let it make a new tensor, as x = x + y does."
            )
        last_read |= {value: max(home, last_read.get(value, home)) for value in call.uses}


def holders(program: Program, cut: Cut, contents: Mapping[str, Sequence[str]]) -> dict[str, set[int]]:
    """The stages that hold each tensor: those that call an atom with it, or a function on it.

    Args:
        contents: the names of the tensors inside of every atom, called or not.
    """
    found: dict[str, set[int]] = {}
    for call, home in zip(program.calls, cut.homes, strict=True):
        for name in (*call.params, *(contents[call.atom] if call.atom else ())):
            found.setdefault(name, set()).add(home)
    return found


def balance(
    program: Program, costs: Mapping[str, float], num_stages: int, glued: Sequence[tuple[str, str]] = ()
) -> dict[str, int]:
    """The stage of every atom: contiguous stretches whose dearest costs least.

    Args:
        costs: of every atom, in any unit.
        glued: pairs of atoms that no cut may part, nor what runs between them.

    Raises:
        LayoutError: too few places to cut.
    """
    order = [call.atom for call in program.calls if call.atom]
    spans = program.spans()
    closed = [span for span in spans.values() if span[0] < span[1]]
    closed += [(min(spans[a][0], spans[b][0]), max(spans[a][1], spans[b][1])) for a, b in glued]
    # A cut before place p is open where no atom has calls on both sides of it.
    starts = [0, *(p for p in range(1, len(order)) if not any(low < p <= high for low, high in closed))]
    if len(starts) < num_stages:
        raise LayoutError(
            f"{num_stages} stages need {num_stages} parts that run one after the other, and this model has "
            f"{len(starts)}{_GLUED if glued else ''}. Take a pipeline of at most {len(starts)} stages, or another "
            "layout."
        )
    ends = [*starts[1:], len(order)]
    first = {atom: span[0] for atom, span in spans.items()}
    piece = [
        sum(costs[atom] for atom, place in first.items() if lo <= place < hi)
        for lo, hi in zip(starts, ends, strict=True)
    ]
    sums = [0.0]
    for cost in piece:
        sums.append(sums[-1] + cost)
    cuts = _least_dearest(sums, num_stages)
    owner: dict[str, int] = {}
    for stage, (low, high) in enumerate(zip(cuts, [*cuts[1:], len(starts)], strict=True)):
        for place in range(starts[low], ends[high - 1]):
            owner[order[place]] = stage
    return owner


def _least_dearest(sums: Sequence[float], num_stages: int) -> list[int]:
    """Where each stage begins among the pieces with these running sums; of equals, the sum of squares decides."""
    count = len(sums) - 1
    best: list[dict[int, tuple[float, float, list[int]]]] = [{0: (0.0, 0.0, [])}]
    for stage in range(num_stages):
        row: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(stage + 1, count - (num_stages - stage - 1) + 1):
            for start, (dearest, squares, cuts) in best[stage].items():
                if start < end:
                    cost = sums[end] - sums[start]
                    found = (max(dearest, cost), squares + cost * cost, [*cuts, start])
                    if end not in row or found[:2] < row[end][:2]:
                        row[end] = found
        best.append(row)
    return best[num_stages][count][2]
