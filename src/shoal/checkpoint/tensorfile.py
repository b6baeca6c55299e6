"""The safetensors format, as far as we need it: a length, a JSON header, the bytes of the tensors.

    | u64 length | {"name": {"dtype": "F32", "shape": [..], "data_offsets": [start, stop]}, ..} | data ... |

We write and check it ourselves, since every byte must be covered by a checksum and the snapshot of a training
state is laid out in memory just as in the file: one copy, one hash, one write. Plain safetensors loads it.
Source: https://github.com/huggingface/safetensors (format).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in _DTYPES.items()}
PREFIX_BYTES = 8
_ALIGN_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
BLOCK_BYTES = 16 << 20  # of the format: what one checksum covers


@dataclass(frozen=True)
class Span:
    """Where one tensor lies in the data part of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def dtype_of(code: str) -> torch.dtype:
    """`"BF16"` -> `torch.bfloat16`."""
    if code not in _DTYPES:
        raise CheckpointError(f"the dtype {code!r} is not known.")
    return _DTYPES[code]


def num_bytes_of(code: str, shape: tuple[int, ...]) -> int:
    """The bytes of a dense tensor, in exact integers."""
    return dtype_of(code).itemsize * math.prod(shape)


def blocks_of(code: str, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The rows (start, stop) that each checksum of a slice covers: as many as 16 MiB hold, at least one.

    So a rank that needs a few rows of a large slice reads and checks these and no others.
    """
    num_rows = shape[0] if shape else 1
    row_bytes = num_bytes_of(code, shape[1:])
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    if num_rows * row_bytes <= BLOCK_BYTES:
        return [(0, num_rows)]
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def plan_file(tensors: Mapping[str, Tensor]) -> dict[str, Span]:
    """Lay tensors out one behind the other, wide types first, so that each is aligned without gaps."""
    spans, start = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        stop = start + tensor.numel() * tensor.itemsize
        spans[name] = Span(CODES[tensor.dtype], tuple(tensor.shape), start, stop)
        start = stop
    return spans


def num_data_bytes(spans: Mapping[str, Span]) -> int:
    """The length of the data part."""
    return max((span.stop for span in spans.values()), default=0)


def header_bytes(spans: Mapping[str, Span], metadata: Mapping[str, str] | None = None) -> bytes:
    """The length prefix and the JSON header, padded with blanks so that the data begin aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, span in spans.items():
        offsets = [span.start, span.stop]
        header[name] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def parse_header(text: bytes) -> dict[str, Span]:
    """The spans of a header (without its length prefix), in the order of the data.

    Raises:
        CheckpointError: anything but tensors that lie one behind the other without gap or overlap.
    """
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        spans = {name: _parse_span(entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the header is not that of a safetensors file ({error}).") from error
    ordered = dict(sorted(spans.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 0
    for name, span in ordered.items():
        if span.start != end or span.stop - span.start != num_bytes_of(span.dtype, span.shape):
            raise CheckpointError(f"the header places tensor {name!r} wrongly: gap, overlap or wrong length.")
        end = span.stop
    return ordered


def _parse_span(entry: dict[str, Any]) -> Span:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(size) is int and size >= 0 for size in (*shape, start, stop)):
        raise ValueError("sizes and offsets are integers from 0 up")
    return Span(entry["dtype"], shape, start, stop)


def host_view(data: Tensor, span: Span) -> Tensor:
    """The tensor of a span inside a buffer of bytes, without a copy."""
    return data[span.start : span.stop].view(dtype_of(span.dtype)).view(span.shape)


def memory_of(data: Tensor) -> memoryview:
    """The bytes of a flat uint8 tensor on the host, without a copy."""
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = data.numpy()
    return array.data
