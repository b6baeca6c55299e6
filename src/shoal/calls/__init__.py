"""Which collectives a process has called, in which order and from where, and where two processes differ."""

from shoal.calls.difference import Difference, find_difference
from shoal.calls.ledger import Channel, Ledger, Sums
from shoal.calls.ring import Entry, Ring, beside, read_ring

__all__ = [
    "Channel",
    "Difference",
    "Entry",
    "Ledger",
    "Ring",
    "Sums",
    "beside",
    "find_difference",
    "read_ring",
]
