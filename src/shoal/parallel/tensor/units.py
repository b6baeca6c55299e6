"""How the features of a layer are shared out over ranks: in whole heads, and fused matrices part by part."""

from dataclasses import dataclass

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Units:
    """A number of features in equal units (heads; single features) that the ranks share out, the first ones more.

    `parts` are the widths of what is fused in one matrix (q, k and v, say); each part has all the units.
    """

    count: int
    parts: tuple[int, ...]
    num_ranks: int

    def share(self, rank: int) -> tuple[int, int]:
        """The units of a rank: [start, stop)."""
        each, more = divmod(self.count, self.num_ranks)
        start = rank * each + min(rank, more)
        return start, start + each + (rank < more)

    def spans(self, rank: int) -> Spans:
        """The features of a rank, part by part."""
        start, stop = self.share(rank)
        spans, at = [], 0
        for width in self.parts:
            unit = width // self.count
            spans.append((at + start * unit, at + stop * unit))
            at += width
        return tuple(spans)

    def sizes(self) -> list[int]:
        """How many features each rank keeps."""
        return [sum(stop - start for start, stop in self.spans(rank)) for rank in range(self.num_ranks)]

    def local(self, size: int, rank: int) -> int:
        """What is left on a rank of a size that counts whole units."""
        start, stop = self.share(rank)
        return size // self.count * (stop - start)
