"""Checkpoints: written whole or not at all, verified to the last bit, without pickle."""

from shoal.checkpoint.difference import Difference, compare
from shoal.checkpoint.export import Exported, export
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.pack import Shard, pack, unpack
from shoal.checkpoint.read import Checkpoint, identity_difference, newest_good, read, read_manifest, verify
from shoal.checkpoint.retain import Collected, collect
from shoal.checkpoint.shelf import Found, list_checkpoints
from shoal.checkpoint.weights import Loaded, load_weights
from shoal.checkpoint.write import write
from shoal.checkpoint.writer import Saved, Writer

__all__ = [
    "Checkpoint",
    "Collected",
    "Difference",
    "Exported",
    "Found",
    "Loaded",
    "Manifest",
    "Saved",
    "Shard",
    "Writer",
    "collect",
    "compare",
    "export",
    "identity_difference",
    "list_checkpoints",
    "load_weights",
    "newest_good",
    "pack",
    "read",
    "read_manifest",
    "unpack",
    "verify",
    "write",
]
