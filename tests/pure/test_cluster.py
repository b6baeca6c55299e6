"""Peaks of known accelerators, never guessed; clusters read from a file, with lessons for its slips."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster import (
    DTYPES,
    Cluster,
    ClusterError,
    find_accelerator,
    peak_flops,
    read_accelerators,
    read_cluster,
    write_cluster,
)


@pytest.mark.parametrize(
    ("device_name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),  # not 624, which is the sparse figure
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-80GB", "fp64", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),  # not 1979
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI250X", "bf16", 191.5),  # a device is one of the two dies
        ("nvidia a100-sxm4-80gb ", "fp32", 19.5),
    ],
)
def test_a_known_device_has_its_dense_peak(device_name: str, dtype: str, tflops: float) -> None:
    assert peak_flops(find_accelerator(device_name), dtype) == tflops * 1e12


@pytest.mark.parametrize(
    "device_name",
    [
        "",
        "cpu",
        "NVIDIA A100",
        "NVIDIA H100",
        "NVIDIA H800",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "Tesla V100-SXM3-32GB-H",
        "AMD Instinct MI250X/MI250",
        "NVIDIA Z9000",
    ],
)
def test_a_device_that_is_not_in_the_table_has_no_peak(device_name: str) -> None:
    assert find_accelerator(device_name) is None
    assert peak_flops(find_accelerator(device_name), "bf16") is None


def test_a_dtype_that_a_known_device_lacks_has_no_peak() -> None:
    volta = find_accelerator("Tesla V100-SXM2-16GB")
    assert volta is not None
    assert [dtype for dtype in DTYPES if peak_flops(volta, dtype) is None] == ["tf32", "bf16", "fp8"]


def test_every_row_of_the_table_is_whole_and_no_name_is_taken_twice() -> None:
    rows = read_accelerators()
    names = [name.lower() for row in rows for name in row.device_names]
    assert len(names) == len(set(names)) > 30
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.vendor in ("NVIDIA", "AMD"), row.name
        assert all(row.device_names), row.name
        assert len(row.source) > 10, row.name
        assert row.memory_bytes is not None, row.name
        assert 10e9 < row.memory_bytes < 300e9, row.name
        assert row.bandwidth_bytes_per_s is None or 3e11 <= row.bandwidth_bytes_per_s <= 8e12, row.name


def test_peaks_rise_as_the_dtype_narrows() -> None:
    """A sparse figure, or one in a wrong column, breaks these ratios."""
    for row in read_accelerators():
        peaks = row.peak_flops
        ratios = {pair: peaks[pair[1]] / peaks[pair[0]] for pair in RATIOS if set(pair) <= set(peaks)}
        for pair, ratio in ratios.items():
            low, high = RATIOS[pair]
            assert low <= ratio <= high, (row.name, pair, ratio)


RATIOS = {
    ("fp64", "fp32"): (1, 4.02),
    ("fp32", "tf32"): (1, 16),
    ("tf32", "fp16"): (1.97, 2.05),
    ("fp32", "fp16"): (1.99, 32),
    ("bf16", "fp16"): (1, 2),
    ("fp16", "fp8"): (1.99, 2.03),
}


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_a_cluster_file_states_nodes_devices_links_and_memory(tmp_path: Path) -> None:
    cluster = read_cluster(
        write(
            tmp_path,
            """
            nodes = 2
            devices_per_node = 8
            device = "NVIDIA H100 80GB HBM3"
            intra_node_gb_per_s = 450
            inter_node_gb_per_s = 50.5
            intra_node_latency_us = 0
            inter_node_latency_us = 10.5
            """,
        )
    )
    assert cluster.num_devices == 16
    assert cluster.memory_bytes == 80e9
    assert (cluster.intra_node_gb_per_s, cluster.inter_node_gb_per_s) == (450, 50.5)
    assert (cluster.intra_node_latency_us, cluster.inter_node_latency_us) == (0, 10.5)
    assert cluster.accelerator == find_accelerator("NVIDIA H100 80GB HBM3")


def test_memory_of_the_file_goes_before_that_of_the_table(tmp_path: Path) -> None:
    text = 'devices_per_node = 1\ndevice = "NVIDIA H200"\n'
    assert read_cluster(write(tmp_path, text)).memory_bytes == 141e9
    assert read_cluster(write(tmp_path, text + "memory_gb = 70")).memory_bytes == 70e9


def test_what_a_cluster_file_leaves_out_is_unknown(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, 'devices_per_node = 4\ndevice = "something new"'))
    assert (cluster.nodes, cluster.accelerator, cluster.memory_bytes) == (1, None, None)


@pytest.mark.parametrize(
    ("text", "lesson"),
    [
        ("", "devices_per_node is missing"),
        ("devices_per_node = 8\ndevicse = 'x'", "no 'devicse' in a cluster. Did you mean 'device'?"),
        ("devices_per_node = 0", "devices_per_node is 0"),
        ("devices_per_node = '8'", "devices_per_node is '8'"),
        ("devices_per_node = true", "devices_per_node is True"),
        ("devices_per_node = 8\nmemory_gb = -1", "memory_gb is -1"),
        ("devices_per_node = 8\nintra_node_gb_per_s = inf", "intra_node_gb_per_s is inf"),
        ("devices_per_node = 8\nintra_node_latency_us = -0.5", "intra_node_latency_us is -0.5"),
        ("devices_per_node = ", "is not TOML"),
    ],
)
def test_a_slip_in_a_cluster_file_is_named(tmp_path: Path, text: str, lesson: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_cluster(write(tmp_path, text))
    assert lesson in str(caught.value)
    assert "cluster.toml" in str(caught.value)


def test_a_cluster_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.toml cannot be read: No such file"):
        read_cluster(tmp_path / "none.toml")


positive = st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False)
latency = st.none() | st.floats(min_value=0, allow_infinity=False)
clusters = st.builds(
    Cluster,
    nodes=st.integers(1, 2**62),
    devices_per_node=st.integers(1, 2**62),
    device=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    memory_gb=positive,
    intra_node_gb_per_s=positive,
    inter_node_gb_per_s=positive,
    intra_node_latency_us=latency,
    inter_node_latency_us=latency,
)


@settings(deadline=None)
@given(clusters)
def test_a_cluster_that_is_written_reads_back_as_the_same(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        write_cluster(path, cluster)
        assert read_cluster(path) == cluster
        assert [file.name for file in Path(folder).iterdir()] == ["cluster.toml"]


def test_a_cluster_file_that_exists_is_overwritten_by_force_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "devices_per_node = 4\n")
    with pytest.raises(ClusterError, match=r"cluster\.toml exists.*--force"):
        write_cluster(path, Cluster(devices_per_node=8))
    assert path.read_text() == "devices_per_node = 4\n"
    write_cluster(path, Cluster(devices_per_node=8), force=True)
    assert path.read_text() == "nodes = 1\ndevices_per_node = 8\n"


def test_a_cluster_file_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="there is no folder"):
        write_cluster(tmp_path / "none" / "cluster.toml", Cluster(devices_per_node=8))
