"""Live worlds: who meets whom, who is refused and why, what leaks (nothing), and the collectives of set-up."""

import contextlib
import gc
import io
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import run_processes

from shoal.errors import DataError, LayoutError, WorldError
from shoal.world import Place, World
from shoal.world.roll import meet

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def stand(rank: int, size: int, rendezvous: str, **more: Any) -> Place:
    return Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal", **more)


def in_world(fn: Callable[[World], Any], size: int = 2, **options: Any) -> list[Any]:
    """fn(world) in every rank of a world that met in a file."""

    def rank(rank: int, size: int, rendezvous: str) -> Any:
        with World.open(f"dp{size}", place=stand(rank, size, rendezvous), **options) as world:
            return fn(world)

    return run_processes(rank, size)


SOON_S = 30  # torch's own limits are minutes


def refused(place: Place, *, rendezvous_s: float = 1.0, after_s: float = 0.0, layout: str = "dp2") -> tuple[str, float]:
    """Why this process does not get into the world ("" where it does), and after how long."""
    time.sleep(after_s)
    started = time.monotonic()
    try:
        with World.open(layout, place=place, rendezvous_s=rendezvous_s) as world:
            world.barrier()
            return "", time.monotonic() - started
    except WorldError as error:
        return str(error), time.monotonic() - started


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def add_up(world: World) -> float:
    total = torch.tensor(float(world.rank + 1))
    dist.all_reduce(total)
    return float(total)


# -- meeting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", socket.gethostname()])
def test_ranks_meet_at_a_port(host):
    address = f"tcp://{host}:{free_port()}"

    def rank(rank, size, _):
        with World.open("dp3", place=stand(rank, size, address)) as world:
            return world.rank, world.size, world.data_rank, world.backend, add_up(world)

    assert run_processes(rank, 3) == [(r, 3, r, "gloo", 6.0) for r in range(3)]


def test_ranks_meet_in_a_file():
    assert in_world(lambda world: (world.rank, world.kind, add_up(world)), 2) == [(0, "real", 3.0), (1, "real", 3.0)]


def as_torchrun(rank: int, size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def test_ranks_of_the_environment_meet():
    port = free_port()

    def rank(rank, size, _):
        as_torchrun(rank, size, port)
        with World.open("dp2") as world:
            return world.place.source, add_up(world)

    assert run_processes(rank, 2) == [("torchrun", 3.0)] * 2


def test_ranks_with_slurms_variables_alone_meet():
    port = free_port()

    def rank(rank, size, _):
        os.environ.update(
            SLURM_JOB_ID="7",
            SLURM_STEP_ID="0",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NTASKS="2",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_NUM_NODES="1",
            SLURM_STEP_NODELIST="node1",
            MASTER_PORT=str(port),
        )
        with World.open("dp2") as world:
            return world.rank, world.place.source, add_up(world)

    assert run_processes(rank, 2) == [(0, "slurm", 3.0), (1, "slurm", 3.0)]


def test_ranks_of_mpirun_meet_without_being_told_where():
    def rank(rank, size, _):
        os.environ.update(PMI_RANK=str(rank), PMI_SIZE="2", MPI_LOCALRANKID=str(rank), MPI_LOCALNRANKS="2")
        with World.open("dp2") as world:
            found = world.rank, world.place.source, add_up(world)
        return *found, world.place.rendezvous

    # Twice: one mpirun may start two runs, one after the other.
    for _ in range(2):
        one, other = run_processes(rank, 2)
        assert (one[:3], other[:3]) == ((0, "mpi", 3.0), (1, "mpi", 3.0))
        assert one[3] == other[3]
    Path(one[3].removeprefix("file://")).unlink(missing_ok=True)  # torch mostly removes it itself


def test_the_order_of_start_decides_nothing():
    def rank(rank, size, rendezvous):
        time.sleep(0.3 * (size - 1 - rank))  # rank 0 last
        with World.open("dp3", place=stand(rank, size, rendezvous)) as world:
            return world.rank

    assert run_processes(rank, 3) == [0, 1, 2]


def test_a_world_of_one_process_may_have_a_group():
    def rank(rank, size, rendezvous):
        with World.open("lone", kind="real", place=stand(0, 1, rendezvous)) as world:
            return world.kind, world.gather_text("x"), add_up(world)

    assert run_processes(rank, 1) == [("real", ["x"], 1.0)]


# -- refusals -------------------------------------------------------------------------------------------


def test_an_absent_rank_is_named_to_all_within_the_limit():
    def rank(rank, size, rendezvous):
        return refused(stand([0, 2][rank], 4, rendezvous), layout="dp4")

    for told, took_s in run_processes(rank, 2):
        assert told.startswith("2 of 4 ranks did not come to file://"), told
        assert "Missing: 1, 3. Present: 0 (" in told
        assert f"2 ({socket.gethostname()}:" in told
        assert took_s < SOON_S


@pytest.mark.parametrize(
    ("there", "size", "told"),
    [
        ([0, 2], 4, "waiting for ranks 1, 3 (2 of 4 are here)\n"),
        ([0, 1], 3, "waiting for rank 2 (2 of 3 are here)\n"),
        ([0, 1], 2, ""),
    ],
)
def test_rank_0_says_once_whom_it_waits_for(there, size, told):
    def rank(index, _, rendezvous):
        with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.suppress(WorldError):
            meet(stand(there[index], size, rendezvous), limit_s=4, notice_s=2)
        return stderr.getvalue()

    assert run_processes(rank, len(there)) == [told, ""]


def test_an_absent_rank_0_is_named_within_the_limit():
    def by_file(rank, size, rendezvous):
        return refused(stand(1, 2, rendezvous))

    def by_port(rank, size, _):
        return refused(stand(1, 2, f"tcp://127.0.0.1:{free_port()}"))

    ((told, took_s),) = run_processes(by_file, 1)
    assert "rank 0 did not come to file://" in told
    assert took_s < SOON_S
    ((told, took_s),) = run_processes(by_port, 1)
    assert "rank 1 of 2 found nobody listening at 127.0.0.1:" in told
    assert took_s < SOON_S


@pytest.mark.parametrize("by", ["file", "port"])
@pytest.mark.parametrize(("ranks", "twice"), [((0, 0), 0), ((0, 1, 1), 1)])
def test_a_rank_that_is_there_twice_is_named_with_both_processes(by, ranks, twice):
    port = free_port()

    def rank(index, size, rendezvous):
        address = rendezvous if by == "file" else f"tcp://127.0.0.1:{port}"
        # A world of 3 that waits for its rank 2, so that every duplicate comes while the roll is called.
        return os.getpid(), *refused(stand(ranks[index], 3, address), layout="dp3", rendezvous_s=5.0)

    found = run_processes(rank, len(ranks))
    for _, told, took_s in found:
        assert f"rank {twice} is there twice: " in told, found
        assert took_s < SOON_S
    both = [pid for pid, rank in zip((pid for pid, _, _ in found), ranks, strict=True) if rank == twice]
    assert all(f":{pid}" in found[0][1] for pid in both)


@pytest.mark.parametrize("by", ["file", "port"])
def test_a_duplicate_that_comes_late_is_refused_at_once_and_the_world_goes_on(by):
    port = free_port()

    def rank(index, size, rendezvous):
        place = stand(min(index, 1), 2, rendezvous if by == "file" else f"tcp://127.0.0.1:{port}")
        if index == 2:
            return refused(place, after_s=0.5, rendezvous_s=50.0)
        with World.open("dp2", place=place) as world:
            time.sleep(1.5)  # training
            return add_up(world)

    one, other, (told, took_s) = run_processes(rank, 3)
    assert (one, other) == (3.0, 3.0)
    assert "rank 1 is there twice" in told
    assert took_s < SOON_S


def test_more_workers_than_the_world_size_are_named():
    port = free_port()

    def rank(rank, size, _):
        as_torchrun(rank, 2, port)
        try:
            with World.open("dp2", rendezvous_s=3.0) as world:
                return add_up(world)
        except WorldError as error:
            return str(error)

    one, other, told = run_processes(rank, 3)
    assert (one, other) == (3.0, 3.0)
    assert "rank 2 of 2" in told
    assert "more processes were started" in told


def test_ranks_of_two_minds_about_the_size_are_told_apart():
    def rank(rank, size, rendezvous):
        return refused(stand(rank, [2, 3][rank], rendezvous), layout=["dp2", "dp3"][rank], rendezvous_s=5.0)

    for told, took_s in run_processes(rank, 2):
        assert "was told that the world has 3 ranks, rank 0 (" in told
        assert took_s < SOON_S


@pytest.mark.parametrize("listens", [True, False])
def test_a_port_of_another_program_is_named(listens):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        port = stranger.getsockname()[1]
        stranger.listen()

        def rank(rank, size, _):
            stranger.close()
            return refused(stand(0 if listens else 1, 2, f"tcp://127.0.0.1:{port}"), rendezvous_s=1.5)

        ((told, took_s),) = run_processes(rank, 1)
    if listens:
        assert f"rank 0 cannot listen on port {port}" in told
        assert f"by process {os.getpid()} of this host" in told
    else:
        assert "does not answer like rank 0" in told
    assert took_s < SOON_S


def test_two_jobs_at_one_port_do_not_train_together():
    port = free_port()

    def rank(index, size, _):
        return refused(stand(index % 2, 2, f"tcp://127.0.0.1:{port}"), after_s=0.4 * (index // 2), rendezvous_s=3.0)

    # The first job must live while the second comes.
    def long(index, size, _):
        if index < 2:
            with World.open("dp2", place=stand(index, 2, f"tcp://127.0.0.1:{port}")) as world:
                time.sleep(1.2)
                return add_up(world), 0.0
        return rank(index, size, _)

    first, second, third, fourth = run_processes(long, 4)
    assert first[0] == second[0] == 3.0
    assert "rank 0 is there twice" in third[0]
    assert "rank 1 is there twice" in fourth[0]
    assert max(third[1], fourth[1]) < 2.5


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_an_address_that_cannot_work_is_named_within_seconds(host):
    def rank(rank, size, _):
        as_torchrun(1, 2, 29555)
        os.environ["MASTER_ADDR"] = host
        started = time.monotonic()
        with pytest.raises(WorldError) as caught, World.open("dp2", rendezvous_s=2.0):
            pass
        return str(caught.value), time.monotonic() - started

    ((told, took_s),) = run_processes(rank, 1)
    assert f"MASTER_ADDR={host} MASTER_PORT=29555" in told
    assert host in told.splitlines()[0]
    assert "frame #" not in told
    assert took_s < SOON_S


def test_a_file_that_is_no_rendezvous_is_refused_and_not_harmed(tmp_path):
    letter = tmp_path / "letter"
    letter.write_text("dear reader\n" * 20)

    def rank(rank, size, _):
        return refused(stand(rank, 2, f"file://{letter}")), refused(stand(rank, 2, f"file://{tmp_path}/no/folder"))

    (((told, took_s), (no_folder, _)),) = run_processes(rank, 1)
    assert "is no meeting file, and stays as it is" in told
    assert took_s < SOON_S
    assert letter.read_text() == "dear reader\n" * 20
    assert "its folder must be there" in no_folder


def test_the_world_must_have_the_size_of_the_layout():
    with (
        pytest.raises(LayoutError, match=r"dp4 needs 4 processes, but this world has 2[\s\S]*Nearest that fit: dp2"),
        World.open("dp4", place=Place(size=2, local_size=2)),
    ):
        pass
    with (
        pytest.raises(WorldError, match="a lone world is one process"),
        World.open("dp2", kind="lone", place=Place(size=2)),
    ):
        pass


# -- what was left behind -------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [None, 0, 1])
def test_a_file_left_by_killed_processes_is_used_again(tmp_path, late):
    address = f"file://{tmp_path}/meet"

    def killed(rank, size, _):
        with World.open("dp2", place=stand(rank, size, address)) as world:
            world.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def rank(rank, size, _):
        if rank == late:
            time.sleep(0.7)
        with World.open("dp2", place=stand(rank, size, address), rendezvous_s=5.0) as world:
            return add_up(world)

    with contextlib.suppress(AssertionError):
        run_processes(killed, 2)
    assert (tmp_path / "meet").exists()
    assert run_processes(rank, 2) == [3.0, 3.0]


@pytest.mark.parametrize("counts", [("1", "1"), ("1", "0")])
def test_a_restart_under_an_agent_ignores_the_dead_workers(counts):
    def rank(attempt, kill):
        def run(rank, size, _):
            as_torchrun(rank, size, port)
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt[rank]
            with World.open("dp2", rendezvous_s=5.0) as world:
                world.barrier()
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                return add_up(world)

        return run

    # The store's server has threads, and the ranks are forked: it lives in a process of its own.
    port = free_port()
    agent = os.fork()
    if agent == 0:
        store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        time.sleep(60)
        os._exit(store is None)
    try:
        with pytest.raises(AssertionError, match="exit codes are"):
            run_processes(rank(("0", "0"), True), 2)
        # Two agents count restarts apart: each counts the failures of its own workers.
        assert run_processes(rank(counts, False), 2) == [3.0, 3.0]
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)


@pytest.mark.parametrize("by", ["file", "port"])
def test_a_process_opens_worlds_one_after_the_other(by):
    port = free_port()

    def rank(rank, size, rendezvous):
        place = stand(rank, size, rendezvous if by == "file" else f"tcp://127.0.0.1:{port}")
        sums, kept = [], []
        for _ in range(3):
            with World.open("dp2", place=place, rendezvous_s=5.0) as world:
                sums.append(add_up(world))
                kept.append(world.group)  # as a model does that was placed in this world
                world.barrier()
                time.sleep(0.2 if rank == 0 else 0)  # so the other comes back while this one is still there
            assert not dist.is_initialized()
        return sums

    assert run_processes(rank, 2) == [[3.0] * 3] * 2


def test_a_new_process_takes_the_rank_of_one_that_has_left_though_others_have_not():
    def rank(index, size, rendezvous):
        place = stand(min(index, 1), 2, rendezvous)
        sums = []
        for number in range(2):
            if index == 2 - number:
                time.sleep(0.5)  # process 1 is in the first world alone, process 2 in the second
                continue
            with World.open("dp2", place=place, rendezvous_s=5.0) as world:
                sums.append(add_up(world))
                time.sleep(0.8 if index == 0 and number == 0 else 0)
        time.sleep(1 if index == 1 else 0)
        return sums

    assert run_processes(rank, 3) == [[3.0, 3.0], [3.0], [3.0]]


def test_processes_that_missed_each_other_may_try_again():
    def rank(rank, size, rendezvous):
        place = stand(rank, size, rendezvous)
        if rank == 2:
            time.sleep(1.5)
            return [refused(place, layout="dp3", rendezvous_s=5.0)[0]]
        first = refused(place, layout="dp3", rendezvous_s=1.0)[0]
        time.sleep(0.8 if rank == 0 else 0.1)
        return [first[:40], refused(place, layout="dp3", rendezvous_s=5.0)[0]]

    missed = "1 of 3 ranks did not come to file:///tmp/"[:40]
    assert run_processes(rank, 3) == [[missed, ""], [missed, ""], [""]]


# -- nothing leaks, nothing leaves the host -------------------------------------------------------------


def sockets() -> list[Any]:
    return psutil.Process().net_connections("inet")


@pytest.mark.parametrize("by", ["file", "port"])
def test_on_one_host_nothing_listens_or_talks_beyond_loopback(by):
    port = free_port()

    def rank(rank, size, rendezvous):
        address = rendezvous if by == "file" else f"tcp://127.0.0.1:{port}"
        with World.open("dp2", place=stand(rank, size, address)) as world:
            add_up(world)
            world.barrier()
            ends = [end.ip.removeprefix("::ffff:") for s in sockets() for end in (s.laddr, s.raddr) if end]
            world.barrier()
            return ends

    for ends in run_processes(rank, 2):
        assert ends
        assert set(ends) <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_closed_world_leaves_no_group_no_socket_and_no_variable(fails):
    port = free_port()

    def rank(rank, size, _):
        before = dict(os.environ)
        with contextlib.suppress(KeyError), World.open("dp2", place=stand(rank, 2, f"tcp://127.0.0.1:{port}")) as world:
            world.barrier()
            if fails:
                raise KeyError
        gc.collect()
        left = [str(s) for s in sockets()]
        with pytest.raises(WorldError, match="this world is closed"):
            world.barrier()
        return dist.is_initialized(), left, dict(os.environ) == before, world.group

    assert run_processes(rank, 2) == [(False, [], True, None)] * 2


def test_a_group_that_does_not_open_leaves_nothing_in_the_way_of_the_next(monkeypatch):
    def fail(*args, **kwargs):
        time.sleep(0.5 if dist.get_rank() == 0 else 0)  # so that rank 1 comes back to a roll that stands
        raise RuntimeError("[/a/b.cc:7] Gloo connectFullMesh failed\nframe #0: c10")

    monkeypatch.setattr(dist, "new_group", fail)

    def rank(rank, size, rendezvous):
        place = stand(rank, size, rendezvous)
        told, _ = refused(place)
        assert told.startswith(f"rank {rank} found the others but cannot talk to them: Gloo connectFullMesh failed")
        assert "\n" not in told
        assert not dist.is_initialized()
        monkeypatch.undo()
        with World.open("dp2", place=place, rendezvous_s=5.0) as world:
            return add_up(world)

    assert run_processes(rank, 2) == [3.0, 3.0]


def test_mpi_numbers_its_ranks_itself_and_must_agree(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: seen.append((backend, set(options))))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)

    def rank(rank, size, rendezvous):
        with pytest.raises(WorldError, match=r"asked for rank \d of 2, but mpi made this process rank 0 of 1"):
            World.open("dp2", place=stand(rank, size, rendezvous), backend="mpi").__enter__()
        return seen

    assert run_processes(rank, 2) == [[("mpi", {"timeout"})]] * 2


# -- time limits ----------------------------------------------------------------------------------------


def test_a_collective_that_a_rank_does_not_join_fails_after_the_limit():
    def body(world):
        started = time.monotonic()
        if world.rank == 0:
            with pytest.raises(RuntimeError, match="imed out"):
                dist.all_reduce(torch.ones(1))
        took_s = time.monotonic() - started
        time.sleep(0 if world.rank == 0 else 2)
        return took_s

    assert 0.9 < in_world(body, timeout_min=1 / 60)[0] < SOON_S


def test_ranks_wait_longer_for_one_that_prepares_data_than_for_a_collective():
    def body(world):
        time.sleep(1.5 if world.rank == 0 else 0)
        return world.gather_text(str(world.rank))

    assert in_world(body, timeout_min=0.5 / 60) == [["0", "1"]] * 2


def test_a_rank_that_stays_away_from_the_set_up_is_named():
    def body(world):
        world.barrier()
        if world.rank == 1:
            time.sleep(2)
            return "busy"
        with pytest.raises(WorldError) as caught:
            world.agree({"a": 1})
        return str(caught.value)

    told = in_world(body, setup_min=1 / 60)[0]
    assert told.startswith(f"rank 1 ({socket.gethostname()}:")
    assert "to where rank 0 waits while the run is set up" in told


# -- collectives of set-up ------------------------------------------------------------------------------

TEXTS = [
    "",
    "plain",
    "Fischschwarm: 魚の群れ 🐟",
    "long " * 200_000,
    "a\0b\n",
    "\udcff of a path",
    *("x" * n for n in (504, 505)),
]


def test_texts_of_any_kind_and_length_come_back_in_rank_order():
    def body(world):
        mixed = world.gather_text(TEXTS[world.rank])
        alike = [world.gather_text(text) for text in TEXTS]
        return mixed == TEXTS[:3], alike == [[text] * 3 for text in TEXTS], world.broadcast_text(TEXTS[2 - world.rank])

    assert in_world(body, 3) == [(True, True, TEXTS[2])] * 3


def test_figures_come_back_exactly():
    rows = [[0.1, 1e300, float("inf")], [-0.0, 2.0, 3.0], [float("nan"), 5e-324, 1.0]]
    found = in_world(lambda world: world.gather_floats(rows[world.rank]), 3)
    assert [json.dumps(rows)] * 3 == [json.dumps(gathered) for gathered in found]


def test_rank_0_decides_for_all_and_nobody_else_looks():
    def body(world):
        return world.decide(lambda: f"rank {world.rank} chose"), world.decide(lambda: "")

    assert in_world(body, 3) == [("rank 0 chose", "")] * 3


def reason(world: World, error: Exception) -> tuple[type, str, list[str]]:
    def choose() -> str:
        raise error

    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one is what the test looks at
        world.decide(choose)
    return type(caught.value), str(caught.value), world.gather_text("still together")


def test_what_stops_rank_0_stops_all_with_its_words():
    together = ["still together"] * 2
    assert in_world(lambda world: reason(world, DataError("no such file: ä"))) == [
        (DataError, "no such file: ä", together),
        (WorldError, "no such file: ä", together),
    ]


def test_a_bug_on_rank_0_leaves_nobody_waiting():
    together = ["still together"] * 2
    assert in_world(lambda world: reason(world, ZeroDivisionError("by zero"))) == [
        (ZeroDivisionError, "by zero", together),
        (WorldError, "rank 0 failed: ZeroDivisionError: by zero", together),
    ]


def disagreement(facts: Callable[[int], dict[str, Any]], size: int = 3) -> list[str]:
    def body(world):
        with pytest.raises(WorldError) as caught:
            world.agree(facts(world.rank))
        return str(caught.value)

    return in_world(body, size)


def test_ranks_that_agree_go_on():
    assert in_world(lambda world: world.agree({"steps": 3, "path": None, "list": [1, "ü"]}), 3) == [None] * 3


def test_a_fact_that_differs_is_named_with_the_ranks_of_each_side():
    told = 'the ranks do not agree on layout (ranks 0, 2: "dp3"; rank 1: "ä").'
    assert disagreement(lambda rank: {"same": 1, "layout": "ä" if rank == 1 else "dp3"}) == [told] * 3


def test_a_number_and_its_spelling_are_two_facts():
    assert (
        disagreement(lambda rank: {"a": "1" if rank else 1}, 2)
        == ['the ranks do not agree on a (rank 0: 1; rank 1: "1").'] * 2
    )


def test_a_fact_that_one_rank_does_not_state_stops_all():
    told = "the ranks do not agree on extra (ranks 0, 2: not stated; rank 1: true)."
    assert disagreement(lambda rank: {"extra": True} if rank == 1 else {}) == [told] * 3


def test_figures_of_a_step_are_read_where_there_are_some():
    with World.open("lone") as world:
        assert world.read(torch.tensor([1.0, 2.0])) == [1.0, 2.0]
        assert world.decide(lambda: "alone") == "alone"
        assert world.gather_text("x") == ["x"]
        world.barrier()
        world.agree({"a": 1})
    assert not dist.is_initialized()
