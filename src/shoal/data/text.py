"""Bytes and tokens as windows of a fixed length: what to read, and what comes next."""

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from shoal.errors import DataError

_STDLIB_BYTES = 4_000_000
_TEST_SHARE = 0.1

Window = tuple[torch.Tensor, torch.Tensor]


class TokenWindows(Dataset[Window]):
    """Windows `(ids[:-1], ids[1:])`, int64 of shape (context,), side by side in one long row of tokens.

    Attributes:
        context: tokens per window.
        vocab_size: one more than the greatest token that may occur.
    """

    def __init__(self, tokens: npt.NDArray[Any], context: int, *, vocab_size: int) -> None:
        if context < 1:
            raise DataError(f"context={context} must be at least 1.")
        if len(tokens) <= context:
            raise DataError(
                f"{len(tokens)} tokens do not fill one window of context {context}, which needs "
                f"{context + 1}: take a longer text or a smaller context."
            )
        self.tokens = tokens
        self.context = context
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Window:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index % len(self) * self.context
        ids = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        return ids[:-1], ids[1:]


class StdlibText(TokenWindows):
    """The source of Python's standard library, byte by byte; the last tenth is held out as the test text.

    It needs no download, and is the same in every process of one Python version, but not across versions.
    """

    def __init__(self, context: int, split: str = "train") -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = _read_bytes(files, limit_bytes=_STDLIB_BYTES)
        super().__init__(_split(text, split), context, vocab_size=256)


class TextFolder(TokenWindows):
    """All files of a folder that match `pattern`, byte by byte, in the order of their names."""

    def __init__(self, path: str | Path, context: int, split: str = "train", *, pattern: str = "**/*.txt") -> None:
        files = sorted(file for file in Path(path).glob(pattern) if file.is_file())
        if not files:
            raise DataError(f"no file matches {pattern!r} in {path}. Check the path, or give pattern=.")
        super().__init__(_split(_read_bytes(files), split), context, vocab_size=256)


class TokenFile(TokenWindows):
    """A `.npy` file of one row of integers, or a raw file of them (`dtype`), read from disk as needed."""

    def __init__(self, path: str | Path, context: int, *, vocab_size: int, dtype: str = "uint16") -> None:
        if not Path(path).is_file():
            raise DataError(f"there is no token file {path}.")
        if Path(path).suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, dtype=dtype, mode="r")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(f"{path} holds {tokens.dtype} of shape {tokens.shape}: tokens are one row of integers.")
        super().__init__(tokens, context, vocab_size=vocab_size)


def _read_bytes(files: Iterable[Path], *, limit_bytes: int | None = None) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(file.read_bytes() for file in files)[:limit_bytes], dtype=np.uint8)


def _split(text: npt.NDArray[np.uint8], split: str) -> npt.NDArray[np.uint8]:
    held_out = len(text) - int(len(text) * _TEST_SHARE)
    parts = {"train": text[:held_out], "test": text[held_out:]}
    if split not in parts:
        raise DataError(f"split={split!r} must be 'train' or 'test'.")
    return parts[split]
