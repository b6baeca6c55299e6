"""Words that people know from torchrun mean the same to shoal, however they are spelled; else it is said."""

import os
import sys
from pathlib import Path

import pytest
from test_cli import Cli, Seen
from test_cli import cli as cli
from test_cli import launched as launched
from test_cli import trained as trained

from shoal.errors import LaunchError
from shoal.launch import machine
from shoal.launch.machine import num_processes
from shoal.launch.nodes import Nodes

TWO = ["--nnodes", "2", "--node-rank", "1"]


@pytest.mark.parametrize(
    ("words", "num_ranks", "nodes"),
    [
        ([], 1, None),
        (["--nproc-per-node", "2"], 2, None),
        (["--nproc_per_node=2"], 2, None),
        (["--nproc-per-node", "cpu"], machine.num_cores(), None),
        (["--standalone", "--nproc-per-node", "2"], 2, None),
        (["--nnodes", "1"], 1, None),
        (["--nnodes=1", "--node_rank=0", "--master_addr=a"], 1, None),
        ([*TWO, "--master-addr", "a"], 1, Nodes(num=2, rank=1, address="a", port=29500)),
        ([*TWO, "--master_addr", "a", "--master_port", "1234"], 1, Nodes(num=2, rank=1, address="a", port=1234)),
        ([*TWO, "--rdzv-endpoint", "a:1234"], 1, Nodes(num=2, rank=1, address="a", port=1234)),
        ([*TWO, "--rdzv_endpoint=a:1234", "--rdzv_id=x"], 1, Nodes(num=2, rank=1, address="a", port=1234, run_id="x")),
        ([*TWO, "--rdzv-backend", "c10d", "--rdzv-endpoint", "a"], 1, Nodes(num=2, rank=1, address="a")),
        ([*TWO, "--rdzv_backend=static", "--master_addr=a"], 1, Nodes(num=2, rank=1, address="a")),
        (
            [*TWO, "--rdzv-conf", "join_timeout=600", "--master-addr", "a"],
            1,
            Nodes(num=2, rank=1, address="a", meet_s=600),
        ),
        (["--use-env"], 1, None),
        (["--use_env"], 1, None),
        (["--max-restarts", "0"], 1, None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_launch_takes_torchruns_words(
    cli: Cli, launched: Seen, words: list[str], num_ranks: int, nodes: Nodes | None
) -> None:
    assert cli("launch", *words, "train.py", "--lr", "3").code == 3
    assert launched.positional == ("train.py", ["--lr", "3"], num_ranks)
    assert launched.named is not None
    assert launched.named["nodes"] == nodes


@pytest.mark.parametrize("spelled", ["--log-dir", "--log_dir"])
def test_launch_keeps_logs_where_it_is_told(cli: Cli, launched: Seen, spelled: str) -> None:
    cli("launch", spelled, "logs", "train.py")
    assert launched.named is not None
    assert launched.named["log_dir"] == Path("logs")


@pytest.mark.parametrize(
    ("words", "num_ranks"), [(["--nproc_per_node", "2"], 2), (["--nproc-per-node=cpu"], machine.num_cores())]
)
def test_train_takes_the_same_numbers(cli: Cli, trained: Seen, words: list[str], num_ranks: int) -> None:
    cli("train", "digits", *words)
    assert trained.settings.values.nproc_per_node == num_ranks


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launch", "--nproc-per-node", "2,1", "x.py"], "--hosts a:2,b:1"),
        (["launch", "--nproc-per-node", "0", "x.py"], "a number from 1 on, or gpu, cpu or auto"),
        (["launch", "--nproc-per-node", "tpu", "x.py"], "or gpu, cpu or auto"),
        (["launch", "--rdzv-backend", "etcd", "x.py"], "--rdzv-backend etcd"),
        (["launch", "--nnodes", "1:4", "x.py"], "exactly the machines"),
        (["launch", "--nnodes", "2", "x.py"], "needs --node-rank"),
        (["launch", "--standalone", "--nnodes", "2", "x.py"], "this machine alone"),
        (["launch", "--rdzv-conf", "timeout=3", *TWO, "--master-addr", "a", "x.py"], "join_timeout=SECONDS"),
        (["launch", "--hosts", "a:2,b", "x.py"], "not for b"),
        (["launch", "--hosts", "a,b", "--nnodes", "2", "x.py"], "--hosts says already what --nnodes says"),
        (["launch", "--hosts", "a:2,b:1", "--nproc-per-node", "2", "x.py"], "what --nproc-per-node says"),
        (["train", "digits", "--hosts", "a,b", "--node-rank", "1"], "what --node-rank says"),
        (["train", "digits", "--log_dir", "x"], "in the run's folder, RUN/logs"),
        (["train", "digits", "--standalone"], "this machine alone"),
        (["train", "digits", "--rdzv_backend=c10d"], "machines meet at --master-addr"),
        (["launch", "--slurm", "--kubernetes", "digits"], "two different files"),
        (["launch", "--slurm", "--image", "x", "digits"], "--image means nothing in a file of --slurm"),
        (["launch", "--slurm", "--master-addr", "x", "digits"], "--master-addr means nothing"),
        (["launch", "--kubernetes", "digits"], "needs an image"),
        (["launch", "--time", "1", "x.py"], "add --slurm or --kubernetes"),
        (["launch", "--slurm", "nowhere"], "no job and no script"),
    ],
)
def test_what_is_not_done_is_refused_with_the_way_out(cli: Cli, words: list[str], told: str) -> None:
    done = cli(*words)
    assert done.code == 2
    assert told in str(done)


@pytest.mark.parametrize(
    ("visible", "files", "gpu", "auto"),
    [
        (None, 4, 4, 4),
        ("0,2", 4, 2, 2),
        ("GPU-1a, GPU-2b", 4, 2, 2),
        ("0,-1,1", 4, 1, 1),
        ("", 4, None, 3),
        ("-1", 4, None, 3),
        (None, 0, None, 3),
        ("0", 0, None, 3),
    ],
)
def test_gpu_and_auto_count_what_this_process_sees(tmp_path, monkeypatch, visible, files, gpu, auto):
    for number in range(files):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    monkeypatch.setattr(machine, "num_cores", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (num_processes("auto"), num_processes("cpu"), num_processes("5")) == (auto, 3, 5)
    if gpu is None:
        with pytest.raises(LaunchError, match="no GPU is seen"):
            num_processes("gpu")
    else:
        assert num_processes("gpu") == gpu


def test_the_same_words_are_printed_into_a_file(cli: Cli) -> None:
    Path("job.py").write_text("from shoal import Job\nclass Mine(Job): pass\n")
    done = cli("launch", "--slurm", "--nodes", "2", "--nproc_per_node", "2", "job.py", "--", "--layout", "dp4")
    assert done.code == 0
    assert "#SBATCH --nodes=2" in done.out
    assert "--nnodes 2 --nproc-per-node 2" in done.out
    assert f"exec {os.path.abspath(sys.executable)} -m shoal train" in done.out
    assert "job.py --layout dp4 &" in done.out
