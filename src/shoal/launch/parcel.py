"""One sealed file from a host to the next, over a line of its own: signed words, and between them bare bytes.

    sender    {"rank": 2, "slot": 0, "seal": 4120, "data": 39845888}  ──►  receiver: is it asked for, is there room?
              ◄──  {"nonce": "93f0.."}                                    or {"refused": "no room ..."}
              seal, data, bare  ──►
              the first words, "sha256", "nonce"  ──►                     signed, so all of it is
              ◄──  {"have": 2}                                            it is sealed there, and only now

The receiver's nonce is of this parcel alone: what was recorded of another cannot be played again.
"""

import hashlib
import mmap
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.line import Line
from shoal.sealed import file_of, number_of, seal_of, write_whole
from shoal.units import show_bytes

_CHUNK_BYTES = 1 << 22
_MAX_SEAL_BYTES = 1 << 28


class NoRoomError(LaunchError):
    """Shared memory is full, here or there."""


@dataclass(frozen=True)
class Kept:
    """A copy of a copy, that its rank does not write over."""

    rank: int
    path: Path
    seal: bytes

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size


def keep(source: Path, target: Path, number: int) -> bytes | None:
    """Copy a sealed file; its seal, or None where its rank has begun to write over it.

    Raises:
        OSError: there is no room.
    """
    if number_of(source) != number:
        return None
    try:
        seal = seal_of(source).read_bytes()
        with source.open("rb") as file:
            _copy(file.fileno(), target)
        is_same = seal_of(source).read_bytes() == seal
    except FileNotFoundError:
        return None
    return seal if is_same else None


def _copy(source: int, target: Path) -> None:
    num_bytes, at = os.fstat(source).st_size, 0
    descriptor = _open(target, num_bytes)
    try:
        while at < num_bytes and (sent := os.sendfile(descriptor, source, at, _CHUNK_BYTES)):
            at += sent
    finally:
        os.close(descriptor)


def _open(path: Path, num_bytes: int) -> int:
    """A file of this size: one that is there already keeps its pages, since fresh ones cost more than the copy.

    Raises:
        OSError: there is no room.
    """
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size != num_bytes:
            os.ftruncate(descriptor, num_bytes)
            os.posix_fallocate(descriptor, 0, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_room(folder: Path, num_bytes: int) -> None:
    """Refuse to take more than half of what is free in shared memory.

    Raises:
        NoRoomError: how much there is.
    """
    if 2 * num_bytes > (free := shutil.disk_usage(folder).free):
        raise NoRoomError(
            f"{show_bytes(num_bytes)} are more than half of the {show_bytes(free)} that are free in shared memory"
        )


def send(line: Line, kept: Kept, slot: int) -> None:
    """Until the other side has it, and has said so.

    Raises:
        NoRoomError: there is no room on the other side.
        LaunchError, OSError: it is gone, or has refused.
    """
    header = {"rank": kept.rank, "slot": slot, "seal": len(kept.seal), "data": kept.num_bytes}
    line.tell(header)
    answer = line.first_words()
    if "full" in answer:
        raise NoRoomError(str(answer["full"]))
    digest = hashlib.sha256(kept.seal)
    line.connection.sendall(kept.seal)
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with kept.path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            line.connection.sendall(buffer[:count])
    line.tell({**header, "sha256": digest.hexdigest(), "nonce": answer["nonce"]})
    if line.first_words().get("have") != kept.rank:
        raise LaunchError("the next host has not got what was sent")


def take(line: Line, header: Mapping[str, Any], folder: Path, ranks: range) -> None:
    """Take in one file, and seal it when every byte is there and signed.

    Args:
        header: the first words of it.
        ranks: of which files are wanted.

    Raises:
        LaunchError, OSError, ValueError, KeyError: it is none of those, it was cut short or changed on the way, or
            there is no room.
    """
    rank, slot, seal_bytes, num_bytes = (int(header[name]) for name in ("rank", "slot", "seal", "data"))
    if rank not in ranks or slot not in (0, 1) or not 0 < seal_bytes <= _MAX_SEAL_BYTES or num_bytes <= 0:
        raise LaunchError(f"a copy that nobody has asked for: {dict(header)}")
    path = file_of(folder / f"near_{slot}", rank, "copy")
    seal_of(path).unlink(missing_ok=True)
    try:
        if not path.exists():
            check_room(folder, num_bytes)
        descriptor = _open(path, num_bytes)
    except (NoRoomError, OSError) as error:
        line.tell({"full": str(error)})
        raise
    try:
        with mmap.mmap(descriptor, num_bytes) as memory:
            seal = _fill(line, memory, header)
    finally:
        os.close(descriptor)
    write_whole(seal_of(path), seal)
    line.tell({"have": rank})


def _fill(line: Line, memory: mmap.mmap, header: Mapping[str, Any]) -> bytes:
    """What follows the first words, into memory; the seal, once all of it is signed."""
    nonce, digest, seal = secrets.token_hex(16), hashlib.sha256(), bytearray(int(header["seal"]))
    line.tell({"nonce": nonce})
    for whole in (seal, memory):
        with memoryview(whole) as view:
            at = 0
            while at < len(view):
                with view[at : at + _CHUNK_BYTES] as part:
                    count = line.connection.recv_into(part)
                    digest.update(part[:count])
                if not count:
                    raise LaunchError("the line has ended within a copy")
                at += count
    if line.first_words() != {**header, "sha256": digest.hexdigest(), "nonce": nonce}:
        raise LaunchError("a copy that is not what its host has signed")
    return bytes(seal)
