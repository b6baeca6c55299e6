"""Where each machine stands in a generation: pure, so that every case is a row of a test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OpenStore = Callable[[str], int]  # the store of a generation, at an address of this machine -> its port
Claim = Callable[[str, int], int]  # a number in the run's folder, this very one or with 0 the next -> what it got


@dataclass(frozen=True, kw_only=True)
class Post:
    """Where this machine's ranks stand in a generation.

    Attributes:
        generation: its number.
        first: the rank of its first process.
        num: of its processes; 0: it waits for the next generation.
        size: of the world.
        node: the place of this machine among those that take part, of which there are `num_nodes`.
        address: of the store; where there is none (port 0), ranks meet in a file.
        fence: the number that was claimed in the run's folder; 0: none.
        folder: the run's, as node 0 has said; empty: each rank is told otherwise.
    """

    generation: int = 0
    first: int = 0
    num: int
    size: int
    node: int = 0
    num_nodes: int = 1
    address: str = ""
    port: int = 0
    fence: int = 0
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A parent, as all know it: where it listens, and for how many ranks it has room."""

    host: str
    address: str
    port: int
    slots: int


def posts_of(members: Mapping[int, Member], leader: int, size: int, **common: Any) -> dict[int, Post]:
    """The leader first, then by number, each as many ranks as it has room for; the last ones may have none.

    Args:
        size: of the world.
        common: what is the same in all posts.
    """
    order = [leader, *(node for node in sorted(members) if node != leader)]
    nums: list[int] = []
    for node in order:
        nums.append(min(members[node].slots, size - sum(nums)))
    busy = sum(num > 0 for num in nums)
    return {
        node: Post(first=sum(nums[:place]), num=num, size=size, node=min(place, busy - 1), num_nodes=busy, **common)
        for place, (node, num) in enumerate(zip(order, nums, strict=True))
    }


def slots_of(*members: Mapping[int, Member]) -> int:
    """The ranks for which these machines have room; of one that is named twice, the later word counts."""
    return sum(member.slots for member in {node: one for group in members for node, one in group.items()}.values())
