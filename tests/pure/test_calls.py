"""Calls of several ranks: their sums are 0 where they agree alone, and the first one in which they part is found."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shoal.calls import Channel, Ledger, Ring, Sums, find_difference, read_ring
from shoal.calls.ledger import PRIME
from shoal.calls.ring import NUM_ENTRIES

GROUPS = {"a": (0, 1, 2), "b": (0, 2), "c": (1, 2)}  # by name: who takes part


def ledgers(*calls: str, path: Path | None = None) -> list[Ledger]:
    """Of ranks 0, 1, 2 that have called so: `a:sum b:max`, the group and what."""
    return [made(rank, told, path) for rank, told in enumerate(calls)]


def made(rank: int, calls: str, path: Path | None = None) -> Ledger:
    ledger, channels = Ledger(None if path is None else path / f"{rank}"), {}
    for each in calls.split():
        group, what = each.split(":")
        ranks = GROUPS[group]
        if group not in channels:
            label = f"{min(ranks)}..{max(ranks)}x{len(ranks)} {group}".encode()
            channels[group] = ledger.channel(label, ranks.index(rank), len(ranks))
        ledger.note(channels[group], what)
    return ledger


def total(found: Sequence[Ledger]) -> Sums:
    """As the step adds them up, in float64."""
    rows = [ledger.sums() for ledger in found]
    return Sums(*(int(sum(float(value) for value in column)) % PRIME for column in zip(*rows, strict=True)))


def rings(*calls: str) -> dict[int, Ring]:
    return {rank: read_ring(ledger.data) for rank, ledger in enumerate(ledgers(*calls))}


@pytest.mark.parametrize(
    ("calls", "agree"),
    [
        # rank 0              rank 1        rank 2
        (("a:sum a:max", "a:sum a:max", "a:sum a:max"), True),
        (("a:sum b:sum", "a:sum c:sum", "b:sum c:sum a:sum"), True),  # each group by itself is in order
        (("", "", ""), True),
        (("a:sum", "a:sum", "a:max"), False),
        (("a:sum a:sum", "a:sum a:sum", "a:sum"), False),  # skipped
        (("a:sum a:max", "a:max a:sum", "a:sum a:max"), False),  # swapped
        (("b:sum", "", "a:sum"), False),  # the wrong group
        (("b:sum", "", ""), False),
    ],
)
def test_the_sums_of_all_ranks_are_0_where_they_agree_alone(calls: tuple[str, ...], agree: bool) -> None:
    assert (total(ledgers(*calls)).calls == 0) is agree


def test_equal_calls_from_other_places_are_told_from_those_in_another_order() -> None:
    def one(ledger: Ledger, channel: Channel) -> None:
        ledger.note(channel, "sum")

    def other(ledger: Ledger, channel: Channel) -> None:
        ledger.note(channel, "sum")

    def sums(*orders: Sequence[Callable[[Ledger, Channel], None]]) -> Sums:
        found = [Ledger() for _ in orders]
        for rank, (ledger, order) in enumerate(zip(found, orders, strict=True)):
            channel = ledger.channel(b"0..1x2 a", rank, 2)
            for call in order:
                call(ledger, channel)
        return total(found)

    assert sums((one, other), (one, other)) == (0, 0, 0)
    swapped, branch = sums((one, other), (other, one)), sums((one, other), (one, one))
    assert (swapped.calls, bool(swapped.order), swapped.places) == (0, True, 0)
    assert (branch.calls, bool(branch.order), bool(branch.places)) == (0, True, True)


def test_the_first_call_in_which_ranks_part_is_named_with_the_ranks_of_each_side() -> None:
    found = find_difference(rings("a:sum b:sum a:max a:sum", "a:sum a:min a:sum", "a:sum b:sum a:max a:sum"))

    assert found is not None
    assert (found.number, found.odd, found.is_sure) == (2, (1,), True)
    told = str(found).splitlines()
    assert told[0] == "call 2 of the group of 3 ranks from 0 to 2 is"
    assert told[1].startswith("  ranks 0, 2: max, at ")
    assert told[2].startswith("  rank 1: min, at ")
    assert "test_calls.py" in told[1]


def test_a_rank_that_is_only_behind_has_not_parted() -> None:
    assert find_difference(rings("a:sum a:max", "a:sum", "a:sum a:max")) is None
    behind = find_difference(rings("a:sum a:max", "a:sum", "a:sum a:max"), step=0)
    assert behind is not None
    assert (behind.number, behind.odd, behind.is_sure) == (2, (1,), False)
    assert "rank 1: not made; the last one was sum" in str(behind)


def test_a_call_in_the_wrong_group_is_named_beside_the_one_that_is_missing() -> None:
    found = find_difference(rings("a:sum a:max", "a:sum", "a:sum b:max"), step=0)
    assert found is not None
    assert "rank 0: max" in str(found)
    assert "not made" in str(found)
    assert find_difference(rings("a:sum b:max", "a:sum", "a:sum a:max"), step=0) is not None


def test_what_parted_long_ago_is_said_to_be_so() -> None:
    same = " ".join(["a:sum"] * (2 * NUM_ENTRIES))
    found = find_difference(rings(f"a:max {same}", f"a:min {same}", f"a:max {same}"))
    assert found is not None
    assert found.is_old
    assert f"before their last {NUM_ENTRIES} calls" in str(found)


def test_a_ring_is_read_from_its_file_while_it_is_written_and_keeps_the_last_calls(tmp_path: Path) -> None:
    ledgers(" ".join(["a:sum"] * (NUM_ENTRIES + 10)), path=tmp_path)

    ring = read_ring(tmp_path / "0")
    assert (ring.world, ring.num_calls, len(ring.entries)) == (1, NUM_ENTRIES + 10, NUM_ENTRIES)
    assert [entry.number for entry in ring.entries[:2]] == [11, 12]
    assert [entry.index for entry in read_ring(tmp_path / "0", after=NUM_ENTRIES + 8).entries] == [521, 522]
    assert read_ring(tmp_path / "nowhere") == Ring() == read_ring(b"no ring")


def test_messages_from_one_rank_to_one_make_no_difference() -> None:
    sender, receiver = Ledger(), Ledger()
    for ledger, calls in ((sender, "ab"), (receiver, "b")):  # who receives "a" does not say from whom
        channel = ledger.channel(b"0>1 0 0", 0, 0)
        for call in calls:
            ledger.note(channel, call)
    assert find_difference({0: read_ring(sender.data), 1: read_ring(receiver.data)}, step=0) is None
    assert total([sender, receiver]) == (0, 0, 0)


def test_calls_of_two_worlds_of_a_process_are_not_compared(tmp_path: Path) -> None:
    first = {rank: read_ring(ledger.data) for rank, ledger in enumerate(ledgers("a:sum", "a:sum", path=tmp_path))}
    ledgers("a:max", path=tmp_path)

    second = read_ring(tmp_path / "0")
    assert second.world == 2
    assert find_difference({**first, 0: second}) is None
