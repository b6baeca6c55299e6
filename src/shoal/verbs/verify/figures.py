"""What a wrong figure is: guesses at a loss from what each part of the batch gives, at a norm from the gradients."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.verbs.verify.hypotheses import Setting, groups_of, same
from shoal.verbs.verify.shares import Share

Part = tuple[float, float]  # of a loss: its sum, and its count


def of_loss(loss: float, shares: Sequence[Share]) -> list[str]:
    """Which mistakes make this loss of the first batch; none where its shares are not known."""
    ranks: dict[int, list[Share]] = {}
    for share in shares:
        ranks.setdefault(share.data_rank, []).append(share)
    parts = [[(share.value, share.count) for share in own] for own in ranks.values()]
    crossed = [[share.against for share in own] for own in ranks.values()]
    return [
        why for why in (of_means(loss, parts), of_other_targets(loss, crossed), of_wrong_counts(loss, parts)) if why
    ]


def of_means(loss: float, parts: Sequence[Sequence[Part]]) -> str:
    """Whether a loss is the mean of the data ranks' means, which differ in their counts; empty where not."""
    sums = [(sum(value for value, _ in rank), sum(count for _, count in rank)) for rank in parts]
    means = [value / count for value, count in sums if count]
    is_ragged = len({count for _, count in sums}) > 1
    if is_ragged and math.isclose(loss, sum(means) / len(means), rel_tol=1e-9):
        return "it is the mean of the ranks' means, which weighs those with few samples or tokens too much"
    return ""


def of_other_targets(loss: float, crossed: Sequence[Sequence[Sequence[Part | None]]]) -> str:
    """Whether a loss is that of outputs beside the targets of other micro-batches; empty where not.

    Args:
        crossed: of every data rank, for each micro-batch its loss with the targets of each.
    """
    most = max((len(rank) for rank in crossed), default=0)
    names = {1: "the next"} | {k: f"the one {k} further on" for k in range(2, most)}
    shifts = {f"each those of {names[k]}": [(i + k) % most for i in range(most)] for k in range(1, most)}
    orders = {"in the opposite order": list(range(most))[::-1], **shifts}
    orders |= {f"all those of micro-batch {k + 1}": [k] * most for k in range(most)}
    for told, order in orders.items() if most > 1 else ():
        parts = [row[order[i]] if order[i] < len(row) else None for rank in crossed for i, row in enumerate(rank)]
        if _mean_is(loss, parts):
            return f"outputs meet the targets of other micro-batches, {told}"
    return ""


def of_wrong_counts(loss: float, parts: Sequence[Sequence[Part]]) -> str:
    """Whether a loss counts one micro-batch several times, or not at all; empty where not.

    Args:
        parts: of every data rank, each micro-batch.
    """
    most = max((len(rank) for rank in parts), default=0)
    for micro, times in itertools.product(range(most), (0, *range(2, 9))) if most > 1 else ():
        weighed = [
            (value * times, count * times) if i == micro else (value, count)
            for rank in parts
            for i, (value, count) in enumerate(rank)
        ]
        if _mean_is(loss, weighed):
            return f"micro-batch {micro + 1} " + (f"is counted {times} times" if times else "is left out")
    return ""


def _mean_is(loss: float, parts: Sequence[Part | None]) -> bool:
    known = [part for part in parts if part is not None]
    count = sum(part[1] for part in known)
    return len(known) == len(parts) and bool(count) and same(loss, sum(part[0] for part in known) / count)


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """That of one process, and who holds what of it in the layout.

    Attributes:
        squares: of each parameter, the square of the norm.
        axes: over which a parameter is cut, if any.
        copies: how many stages hold a parameter that they share.
    """

    squares: Mapping[str, float]
    axes: Mapping[str, Sequence[str]]
    copies: Mapping[str, int]
    setting: Setting

    def why_norms(self, norms: Sequence[float]) -> str:
        """Of norms that differ by rank."""
        total = math.sqrt(sum(self.squares.values()))
        missing = missing_squares(norms, (total, total * self._grown), self.setting)
        return f"each rank takes the norm of what it holds itself{': ' if missing else ''}{missing}"

    def why_norm(self, ratio: float) -> str:
        """Of one that is this many times the right one; empty where no guess holds."""
        total = sum(self.squares.values())
        if self._shared and same(ratio, self._grown):
            return f"{', '.join(self._shared)}, which several stages hold, is counted in each of them"
        for axes in self.setting.axis_sets() if total else ():
            size = math.prod(self.setting.sizes[axis] for axis in axes)
            counts = {name: 1 if set(axes) & set(self.axes.get(name, ())) else size for name in self.squares}
            counted = sum(counts[name] * square for name, square in self.squares.items())
            if same(ratio**2, counted / total):
                return f"what is replicated over {' x '.join(axes)} is counted {size} times"
            if same(ratio**2, 1 / size):
                return f"only one of {size} parts over {' x '.join(axes)} is counted"
        return ""

    @property
    def _shared(self) -> list[str]:
        return [name for name in self.copies if name in self.squares]

    @property
    def _grown(self) -> float:
        """How much the norm grows where what stages share is counted in each."""
        counted = sum(square * self.copies.get(name, 1) for name, square in self.squares.items())
        return math.sqrt(counted / (sum(self.squares.values()) or 1.0))


def missing_squares(norms: Sequence[float], references: Sequence[float], setting: Setting) -> str:
    """Whether the ranks' own norms are those of parts of one vector, cut over some axes; empty where not.

    Args:
        references: norms that the whole vector may have.
    """
    for axes in setting.axis_sets() if len(norms) == setting.num_ranks else ():
        totals = [math.sqrt(sum(norms[rank] ** 2 for rank in group)) for group in groups_of(setting, axes)]
        if any(all(same(total, reference) for total in totals) for reference in references):
            return f"the squares are not added up over {' x '.join(axes)}"
    return ""
