"""On what a job runs: the peaks of known accelerators, and a cluster's nodes, devices, links and memory.

A cluster file is TOML; a link's speed counts one direction, its latency is that of a message without content:

    nodes = 2
    devices_per_node = 8
    device = "NVIDIA H100 80GB HBM3"
    intra_node_gb_per_s = 450
    inter_node_gb_per_s = 50
    intra_node_latency_us = 4
    inter_node_latency_us = 10
"""

import csv
import json
import os
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import ShoalError, nearest

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")


class ClusterError(ShoalError):
    """The description of a cluster."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of device as its vendor states it: dense peaks in FLOP/s by dtype; the unknown is absent."""

    name: str
    vendor: str
    device_names: tuple[str, ...]
    peak_flops: Mapping[str, float]
    memory_bytes: float | None
    bandwidth_bytes_per_s: float | None
    source: str


def find_accelerator(device_name: str) -> Accelerator | None:
    """The accelerator that goes by exactly this name, as `torch.cuda.get_device_name` prints it, or None.

    A variant (PCIe, NVL, Laptop, a MIG slice) has other peaks than its sister: nothing near is taken for it.
    """
    wanted = _plain(device_name)
    for accelerator in read_accelerators():
        if wanted in map(_plain, accelerator.device_names):
            return accelerator
    return None


def peak_flops(accelerator: Accelerator | None, dtype: str) -> float | None:
    """Dense peak of matrix products in `dtype`, in FLOP/s, or None if unknown."""
    assert dtype in DTYPES, dtype
    return accelerator.peak_flops.get(dtype) if accelerator else None


def read_accelerators() -> list[Accelerator]:
    """All rows of `accelerators.csv`."""
    text = resources.files("shoal").joinpath("accelerators.csv").read_text("utf-8")
    return [_accelerator(row) for row in csv.DictReader(text.splitlines())]


def _accelerator(row: dict[str, str]) -> Accelerator:
    peaks = {dtype: _scaled(row[f"{dtype}_tflops"], 12) for dtype in DTYPES}
    return Accelerator(
        name=row["name"],
        vendor=row["vendor"],
        device_names=tuple(row["device_names"].split("|")),
        peak_flops={dtype: peak for dtype, peak in peaks.items() if peak is not None},
        memory_bytes=_scaled(row["memory_gb"], 9),
        bandwidth_bytes_per_s=_scaled(row["bandwidth_gb_per_s"], 9),
        source=row["source"],
    )


def _scaled(figure: str, exponent: int) -> float | None:
    return float(f"{figure}e{exponent}") if figure else None


def _plain(name: str) -> str:
    return " ".join(name.lower().split())


class Cluster(BaseModel):
    """Nodes of equal devices; memory in GB (10^9 bytes) and link speeds in GB/s, one way, are per device.

    A latency, in microseconds, is what a message takes whatever its size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nodes: int = Field(default=1, ge=1)
    devices_per_node: int = Field(ge=1)
    device: str | None = None
    memory_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    intra_node_gb_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    inter_node_gb_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    intra_node_latency_us: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    inter_node_latency_us: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.nodes * self.devices_per_node

    @property
    def accelerator(self) -> Accelerator | None:
        """The known accelerator that `device` names, if it does."""
        return find_accelerator(self.device) if self.device else None

    @property
    def memory_bytes(self) -> float | None:
        """Memory of one device: the file's, else its accelerator's, else None."""
        if self.memory_gb is not None:
            return self.memory_gb * 1e9
        return self.accelerator.memory_bytes if self.accelerator else None


def read_cluster(path: Path) -> Cluster:
    """The cluster that a TOML file describes.

    Raises:
        ClusterError: if the file is missing, is not TOML, or names or values are wrong; it names the first.
    """
    try:
        return Cluster.model_validate(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ClusterError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} is not TOML: {error}.") from error
    except ValidationError as error:
        raise ClusterError(f"{path}: {_lesson(error)}") from error


def write_cluster(path: Path, cluster: Cluster, *, force: bool = False) -> None:
    """Write a cluster file that `read_cluster` reads back as the same; it appears whole or not at all.

    Args:
        force: over a file that exists.

    Raises:
        ClusterError: as `check_target`, or it cannot be written.
    """
    check_target(path, force=force)
    told = cluster.model_dump(exclude_none=True)
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")
    try:
        temporary.write_text("".join(f"{name} = {_toml(value)}\n" for name, value in told.items()), "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ClusterError(f"{path} was not written: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_target(path: Path, *, force: bool = False) -> None:
    """Refuse, before the work of it, a cluster file that could not be written.

    Raises:
        ClusterError: it exists (unless `force`), or there is no such folder.
    """
    if not path.parent.is_dir():
        raise ClusterError(f"{path} cannot be written: there is no folder {path.parent}.")
    if path.exists() and not force:
        raise ClusterError(f"{path} exists. Choose another name, or overwrite it with --force.")


def _toml(value: int | float | str) -> str:
    """Python's figures are TOML's; JSON's texts are too, but for the one control character that JSON leaves bare."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lesson(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"there is no {name!r} in a cluster.{nearest(name, Cluster.model_fields)}"
    if first["type"] == "missing":
        return f"{name} is missing. Add a line such as: {name} = 8"
    return f"{name} is {first['input']!r}. {first['msg']}."
