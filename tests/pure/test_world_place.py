"""Where a process stands: every launcher's variables, and what is half set or contradicts itself."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from shoal.errors import WorldError
from shoal.world import Place, before_torch, environment, host_names
from shoal.world.device import find_device
from shoal.world.group import Limits, check_backend
from shoal.world.network import (
    GLOO_INTERFACE,
    gloo_interface,
    holder_of,
    is_here_and_alive,
    resolve,
    whoami,
)
from shoal.world.place import _first_host, _tasks_on
from shoal.world.rendezvous import Meeting, first_line, within

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


# -- launchers ------------------------------------------------------------------------------------------


def test_a_process_that_nobody_started_is_alone():
    assert Place.find({}) == Place(rank=0, size=1, local_rank=0, local_size=1, source="lone")


def test_torchrun_on_two_nodes():
    assert Place.find(TORCHRUN) == Place(
        rank=3, size=4, local_rank=1, local_size=2, node=1, num_nodes=2, rendezvous="env://", source="torchrun"
    )


def test_ranks_set_by_hand_without_local_ones_are_one_node():
    place = Place.find({"RANK": "1", "WORLD_SIZE": "2"})
    assert (place.rank, place.size, place.local_rank, place.local_size, place.num_nodes) == (1, 2, 1, 2, 1)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_of_torchruns_variables_is_refused(name):
    (other,) = {"RANK", "WORLD_SIZE"} - {name}
    with pytest.raises(WorldError, match=f"{name} is set but {other} is not"):
        Place.find({name: "1"})


def test_a_local_rank_alone_is_refused():
    with pytest.raises(WorldError, match="LOCAL_RANK is set but RANK and WORLD_SIZE are not"):
        Place.find({"LOCAL_RANK": "0"})


@pytest.mark.parametrize("value", ["", "two", "-1", "1.0", "4(x2)"])
def test_a_rank_that_is_no_number_is_named(value):
    with pytest.raises(WorldError, match="RANK="):
        Place.find({"RANK": value, "WORLD_SIZE": "2"})


def test_more_processes_than_the_world_size_says():
    with pytest.raises(WorldError, match=r"rank 2 of 2 .*more processes were started"):
        Place.find({"RANK": "2", "WORLD_SIZE": "2"})


def test_a_node_holds_no_more_than_the_world():
    with pytest.raises(WorldError, match="cannot hold more ranks"):
        Place(rank=0, size=2, local_size=4)


def test_a_host_is_called_as_it_was_named_and_by_its_own_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu03.cluster.lan")
    monkeypatch.delenv("SHOAL_HOST", raising=False)
    assert host_names() == ("gpu03.cluster.lan", "gpu03")
    monkeypatch.setenv("SHOAL_HOST", "a")
    assert host_names() == ("a", "gpu03.cluster.lan", "gpu03")


def test_slurm_alone_tells_everything():
    place = Place.find(SLURM)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 9, 1, 4)
    assert (place.node, place.num_nodes, place.source) == (1, 3, "slurm")
    assert place.rendezvous.startswith("tcp://gpu03:")


def test_all_ranks_of_a_slurm_step_meet_at_one_port_and_steps_at_different_ones():
    ports = {
        (step, rank): Place.find(SLURM | {"SLURM_STEP_ID": step, "SLURM_PROCID": rank}).rendezvous
        for step in ("0", "1")
        for rank in ("4", "5")
    }
    assert ports["0", "4"] == ports["0", "5"] != ports["1", "4"] == ports["1", "5"]


def test_slurm_on_one_node_meets_on_loopback():
    one_node = {
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "9",
        "SLURM_STEP_NODELIST": "gpu03",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "5",
    }
    assert Place.find(SLURM | one_node).rendezvous.startswith("tcp://127.0.0.1:")


def test_slurm_with_an_address_of_the_user_meets_there():
    assert Place.find(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}).rendezvous == "tcp://head:1234"


@pytest.mark.parametrize(
    "leftovers",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},  # sbatch, salloc
        SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},  # salloc's interactive step
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # srun --pty bash
    ],
)
def test_leftovers_of_an_interactive_allocation_are_nobodys_rank(leftovers):
    assert Place.find(leftovers) == Place()
    assert Place.find(leftovers | TORCHRUN).source == "torchrun"


def test_torchrun_within_srun_wins():
    assert Place.find(SLURM | TORCHRUN).source == "torchrun"


def test_ranks_set_by_hand_must_agree_with_slurm():
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(WorldError, match=r"contradict.*torchrun: rank 0 of 2.*slurm: rank 5 of 9"):
        Place.find(SLURM | by_hand)
    assert Place.find(SLURM | {"RANK": "5", "WORLD_SIZE": "9"}).rank == 5


def test_a_rank_that_slurm_did_not_number_is_named():
    with pytest.raises(WorldError, match="SLURM_PROCID='x' is not a whole number"):
        Place.find(SLURM | {"SLURM_PROCID": "x"})


@pytest.mark.parametrize("env", [OPEN_MPI, MPICH, without(MPICH, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")])
def test_mpi_on_one_host(env):
    place = Place.find(env)
    assert (place.rank, place.size, place.local_rank, place.local_size, place.source) == (1, 2, 1, 2, "mpi")
    assert place.rendezvous.startswith("file:///")


def test_mpi_on_two_nodes_needs_a_place_to_meet():
    env = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(WorldError, match="mpirun -x MASTER_ADDR"):
        Place.find(env)
    place = Place.find(env | {"MASTER_ADDR": "head", "MASTER_PORT": "1"})
    assert (place.num_nodes, place.rendezvous) == (2, "env://")


def test_half_of_mpis_variables_is_refused():
    with pytest.raises(WorldError, match="PMI_RANK is set but PMI_SIZE is not"):
        Place.find({"PMI_RANK": "0"})


def test_mpirun_within_a_slurm_allocation_wins_over_its_daemons_step():
    assert Place.find(SLURM | OPEN_MPI).source == "mpi"
    assert Place.find(SLURM | MPICH).source == "mpi"


def test_sruns_own_pmi_variables_are_slurm():
    assert Place.find(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "9"}).source == "slurm"


def test_ranks_behind_shell_scripts_meet_in_the_file_of_their_launcher():
    tell = f"{sys.executable} -c 'from shoal.world import Place; print(Place.find().rendezvous)'; true"
    env = dict(os.environ) | without(OPEN_MPI, "OMPI_COMM_WORLD_RANK")
    told = [
        subprocess.run(
            ["sh", "-c", tell], env=env | {"OMPI_COMM_WORLD_RANK": rank}, capture_output=True, text=True, check=True
        ).stdout
        for rank in "01"
    ]
    assert told[0] == told[1]
    assert f"-{os.getpid()}-" in told[0]


# -- the small readers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("gpu[9]", "gpu9"),
        ("cpu1,gpu[03-05]", "cpu1"),
        ("a-b-7", "a-b-7"),
        ("rack[1-2]n[7,8]x,z", "rack1n7x"),
        ("n1.cluster.org", "n1.cluster.org"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, first):
    assert _first_host(nodes) == first


def test_tasks_per_node_are_run_lengths():
    assert [_tasks_on("4(x2),1", node) for node in range(4)] == [4, 4, 1, None]
    assert _tasks_on("", 0) is None


def test_the_environment_is_read_by_prefix(monkeypatch):
    monkeypatch.setenv("SHOAL_TEST_A", "1")
    monkeypatch.setenv("NOT_SHOAL_TEST_A", "2")
    assert environment("SHOAL_TEST_") == {"SHOAL_TEST_A": "1"}


def test_torchs_import_settings_yield_to_the_users(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "x")  # so that the end of the test restores it
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    before_torch()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["TORCH_CPP_LOG_LEVEL"]) == ("ACTIVE", "ERROR")


@pytest.mark.parametrize(
    "address",
    ["tcp://host", "tcp://:1", "tcp://host:port", "tcp://host:99999", "file://relative", "file://", "http://x:1", ""],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(WorldError, match="no address to meet at"):
        Meeting.of(Place(size=2, rendezvous=address))


def test_addresses_are_read():
    assert Meeting.of(Place(rendezvous="tcp://[::1]:9")).host == "::1"
    assert str(Meeting.of(Place(rendezvous="file:///tmp/x")).path) == "/tmp/x"


@pytest.mark.parametrize(
    ("env", "lesson"),
    [
        ({}, "Set MASTER_ADDR"),
        ({"MASTER_ADDR": "a"}, "MASTER_PORT to a free port"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "b"}, "MASTER_PORT='b' is no port"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "MASTER_PORT='70000' is no port"),
    ],
)
def test_an_environment_without_an_address_is_refused(monkeypatch, env, lesson):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=lesson):
        Meeting.of(Place(size=2))


def test_the_agents_store_outlives_its_workers(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "a")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert not Meeting.of(Place()).lasting
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert Meeting.of(Place()).lasting


def test_an_unknown_name_is_told_at_once():
    started = time.monotonic()
    with pytest.raises(WorldError, match=r"cannot resolve 'nowhere\.invalid' \(MASTER_ADDR=.*spelled right"):
        resolve("nowhere.invalid", 1, "MASTER_ADDR=nowhere.invalid")
    assert time.monotonic() - started < 30
    with pytest.raises(WorldError, match="cannot resolve"):
        resolve("a" * 100, 1, "x")


def test_an_endless_wait_is_left_behind():
    started = time.monotonic()
    with pytest.raises(WorldError, match="too late"):
        within(started + 0.2, lambda: time.sleep(60), "too late")
    assert time.monotonic() - started < 30
    assert within(time.monotonic() + 5, lambda: 7, "") == 7
    with pytest.raises(KeyError):
        within(time.monotonic() + 5, lambda: {}["a"], "")


def test_only_the_first_line_of_torchs_errors_is_told():
    error = RuntimeError("[/pytorch/gloo/pair.cc:55] Connection closed.\nException raised from x\nframe #0: y")
    assert first_line(error) == "Connection closed"


# -- this host ------------------------------------------------------------------------------------------


def test_a_process_knows_whether_another_lives():
    assert is_here_and_alive(whoami())
    gone = subprocess.Popen(["true"])
    while gone.returncode is None:
        state = os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
        assert state is not None
        assert not is_here_and_alive(f"{socket.gethostname()}:{gone.pid}"), "a zombie is not alive"
        gone.wait()
    assert not is_here_and_alive(f"elsewhere:{os.getpid()}")


def test_the_holder_of_a_port_is_known():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.listen()
        assert holder_of(port) == os.getpid()
    assert holder_of(port) is None


def test_on_one_host_gloo_stays_on_loopback_and_the_environment_is_put_back(monkeypatch):
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    with gloo_interface(one_host=True, towards="whatever"):
        assert os.environ[GLOO_INTERFACE] == ("lo0" if sys.platform == "darwin" else "lo")
    assert GLOO_INTERFACE not in os.environ


def test_the_users_interface_is_kept_if_it_exists(monkeypatch):
    monkeypatch.setenv(GLOO_INTERFACE, "lo")
    with gloo_interface(one_host=False, towards=""):
        assert os.environ[GLOO_INTERFACE] == "lo"
    assert os.environ[GLOO_INTERFACE] == "lo"
    monkeypatch.setenv(GLOO_INTERFACE, "eth77")
    with (
        pytest.raises(WorldError, match=r"no interface 'eth77'. It has: .*lo"),
        gloo_interface(one_host=True, towards=""),
    ):
        pass


def interfaces(monkeypatch, addresses: dict[str, str]) -> None:
    import psutil

    found = {
        name: [type("Address", (), {"family": socket.AF_INET, "address": address})]
        for name, address in addresses.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: type("State", (), {"isup": True}) for name in found})
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)


def test_between_hosts_gloo_takes_the_way_to_the_meeting_and_never_loopback(monkeypatch):
    import shoal.world.network as network

    interfaces(monkeypatch, {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"})
    monkeypatch.setattr(network, "_own_address_towards", lambda host: {"head": "10.1.0.5"}.get(host))
    with gloo_interface(one_host=False, towards="head"):
        assert os.environ[GLOO_INTERFACE] == "ib0"
    with (
        pytest.raises(WorldError, match=r"which interface .*export GLOO_SOCKET_IFNAME=\.\.\. \(eth0, ib0\)"),
        gloo_interface(one_host=False, towards=""),
    ):
        pass


def test_an_own_name_that_means_loopback_is_not_advertised_to_other_hosts(monkeypatch):
    import shoal.world.network as network

    interfaces(monkeypatch, {"lo": "127.0.0.1", "eth0": "10.0.0.5"})
    monkeypatch.setattr(network, "_own_address_towards", lambda host: "127.0.1.1")
    with gloo_interface(one_host=False, towards="myself"):
        assert os.environ[GLOO_INTERFACE] == "eth0"


# -- device, backend, limits ----------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """Two devices that are not there; the list of those that were chosen."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_the_device_follows_the_local_rank_not_the_rank(cuda):
    place = Place(rank=3, size=4, local_rank=1, local_size=2)
    assert find_device(None, place) == torch.device("cuda", 1)
    assert cuda == [torch.device("cuda", 1)]


def test_more_local_ranks_than_devices_are_refused(cuda, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(WorldError, match=r"cuda:2, but this host shows 2 \(CUDA_VISIBLE_DEVICES is 4,6\)"):
        find_device("cuda", Place(rank=2, size=3, local_rank=2, local_size=3))


def test_a_device_is_chosen_by_number_only_by_a_lone_rank(cuda):
    assert find_device("cuda:1", Place()) == torch.device("cuda", 1)
    with pytest.raises(WorldError, match="say cuda, and each takes its own"):
        find_device("cuda:1", Place(size=2, local_size=2))


def test_cuda_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(None, Place()) == torch.device("cpu")
    with pytest.raises(WorldError, match=r"sees no CUDA device.*--device cpu"):
        find_device("cuda", Place())


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "mps", ""])
def test_a_device_that_nobody_knows_is_refused(name):
    with pytest.raises(WorldError, match="there is no device"):
        find_device(name, Place())


def test_backends_are_checked_with_the_reason():
    import torch.distributed as dist

    check_backend("gloo", "cpu")
    if not dist.is_mpi_available():
        with pytest.raises(WorldError, match="built from source with MPI"):
            check_backend("mpi", "cpu")
    with pytest.raises(WorldError, match=r"there is no backend 'glo'. Did you mean 'gloo'"):
        check_backend("glo", "cpu")


def test_nccl_on_cpu_is_refused(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    check_backend("nccl", "cuda")
    with pytest.raises(WorldError, match="nccl talks between GPUs, and the device is cpu"):
        check_backend("nccl", "cpu")


def test_mpi_is_accepted_where_torch_has_it(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    check_backend("mpi", "cpu")


@pytest.mark.parametrize("name", ["timeout_min", "setup_min", "rendezvous_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_is_a_positive_number(name, value):
    limits = {"timeout_min": 1.0, "setup_min": 1.0, "rendezvous_s": 1.0} | {name: value}
    with pytest.raises(WorldError, match=f"{name} is"):
        Limits.of(**limits)
