"""Machines that start together: exactly those that were asked for, all alike, or none, with the reason."""

import contextlib
import random
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest

from shoal.errors import LaunchError
from shoal.launch import crew as crew_room
from shoal.launch import muster
from shoal.launch.again import Ended, History
from shoal.launch.ending import first_cause
from shoal.launch.line import Line
from shoal.launch.muster import check_alike, meet
from shoal.launch.nodes import Nodes, check_words, listening
from shoal.launch.outcome import Failure, Outcome
from shoal.launch.posts import Member, posts_of
from shoal.launch.script import open_store

FACTS = {"shoal": "1", "torch": "2.13.0", "train.py": "3fa1"}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Machine(threading.Thread):
    """A parent: what it learns when it meets the others, or why it does not."""

    def __init__(self, nodes, *, ranks=2, facts=FACTS, ending=None):
        super().__init__(daemon=True)
        self.nodes, self.ranks, self.facts, self.ending = nodes, ranks, facts, ending
        self.post = self.error = self.final = None
        self.asked = []
        self.start()

    def run(self):
        try:
            with meet(self.nodes, self.ranks, self.facts, lambda address: 4321) as crew:
                self.post, self.crew = crew.post, crew
                crew.watch(self.asked)
                if self.ending is not None:
                    ended = Ended(exit_code=self.ending.exit_code, size=crew.post.size)
                    self.final, post, _ = crew.settle(self.ending, ended, self.asked)
                    assert post is None
                else:
                    self.wait_until_asked(20)
        except LaunchError as error:
            self.error = str(error)

    def wait_until_asked(self, within_s):
        until = time.monotonic() + within_s
        while not self.asked and time.monotonic() < until:
            time.sleep(0.01)
        return bool(self.asked)


def machines(num, **changes):
    port = free_port()
    all_nodes = [Nodes(num=num, rank=rank, port=port) for rank in range(num)]
    found = [Machine(nodes, **changes.get(f"of_{nodes.rank}", {})) for nodes in all_nodes]
    for machine in found:
        machine.join(25)
    return found


WELL = Outcome(exit_code=0)


def failed(exit_code, message, *, is_echo=False):
    failure = Failure(rank=0, exit_code=exit_code, type="RuntimeError", message=message, is_echo=is_echo)
    return Outcome(exit_code=exit_code, failures=(failure,))


def test_each_machine_learns_its_ranks_also_where_they_have_different_numbers_of_devices():
    found = machines(3, of_0={"ranks": 4, "ending": WELL}, of_1={"ranks": 1, "ending": WELL}, of_2={"ending": WELL})
    assert [(m.post.first, m.post.size, m.post.port) for m in found] == [(0, 7, 4321), (4, 7, 4321), (5, 7, 4321)]
    assert all(machine.final.exit_code == 0 for machine in found)


def test_who_is_missing_is_named():
    machine = Machine(Nodes(num=3, rank=0, port=free_port(), meet_s=0.5))
    machine.join(10)
    assert "1 of 3 nodes came" in machine.error
    assert "Missing: node 1, 2" in machine.error
    alone = Machine(Nodes(num=2, rank=1, port=free_port(), meet_s=0.5))
    alone.join(10)
    assert "node 0 cannot be reached" in alone.error


def test_two_machines_of_one_number_and_another_number_of_machines_are_refused():
    port = free_port()
    first = Machine(Nodes(num=3, rank=0, port=port))
    others = [Machine(Nodes(num=3, rank=1, port=port)) for _ in range(2)]
    for machine in (first, *others):
        machine.join(10)
    assert "node 1 is there twice" in first.error
    assert any("node 1 is there twice" in machine.error for machine in others)
    first, second = Machine(Nodes(num=2, rank=0, port=(port := free_port()))), Machine(Nodes(num=4, rank=1, port=port))
    first.join(10)
    second.join(10)
    assert "says --nnodes 4, and node 0 says 2" in first.error
    assert "says --nnodes 4" in second.error


def test_other_code_or_versions_are_refused_by_name_and_host():
    other = {**FACTS, "train.py": "77aa"}
    found = machines(2, of_1={"facts": other})
    assert all("train.py differs: 3fa1 on node 0" in machine.error for machine in found)
    with pytest.raises(LaunchError, match=r"torch differs: 2.13.0 on node 0 \(a\), 2.12.0 on node 1 \(b\)"):
        check_alike({0: {"host": "a", "facts": FACTS}, 1: {"host": "b", "facts": {**FACTS, "torch": "2.12.0"}}})


def test_strangers_are_sent_away_and_disturb_nobody(monkeypatch):
    """Another run at the same place, somebody without the secret, and random bytes."""
    port = free_port()
    first = Machine(Nodes(num=2, rank=0, port=port), ending=WELL)
    stranger = Machine(Nodes(num=2, rank=1, port=port, run_id="another"))
    stranger.join(10)
    assert "of another run, or has another secret" in stranger.error
    for _ in range(3):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(random.Random(0).randbytes(4096) + b"\n")
    second = Machine(Nodes(num=2, rank=1, port=port), ending=WELL)
    second.join(10)
    first.join(10)
    assert (first.error, second.error) == (None, None)
    assert first.post.size == 4


def test_node_0_waits_until_its_name_is_known(monkeypatch):
    """As that of a pod in Kubernetes, which is known once the pod is ready."""
    asked = []
    look_up = socket.getaddrinfo

    def unknown_at_first(host, *args, **options):
        asked.append(host)
        if asked.count("localhost") in (1, 2) and host == "localhost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *args, **options)

    port = free_port()
    monkeypatch.setattr(muster.socket, "getaddrinfo", unknown_at_first)
    first = Machine(Nodes(num=2, rank=0, address="localhost", port=port), ending=WELL)
    second = Machine(Nodes(num=2, rank=1, port=port), ending=WELL)
    first.join(20)
    second.join(20)
    assert (first.error, second.error) == (None, None)
    assert asked.count("localhost") == 3
    never = Machine(Nodes(num=2, rank=0, address="nobody.invalid", port=port, meet_s=0.5))
    never.join(10)
    assert "cannot listen at nobody.invalid" in never.error


def test_node_0_listens_everywhere_where_only_its_own_host_takes_its_name_for_loopback(monkeypatch):
    """As Debian has it: `127.0.1.1 h1` in /etc/hosts."""
    known = {"h1": ["127.0.1.1"], "h2": ["127.0.1.1", "10.0.0.2"], "127.0.0.1": ["127.0.0.1"], "localhost": ["::1"]}
    rows = {name: [(0, 0, 0, "", (address, 0)) for address in found] for name, found in known.items()}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: rows[host])
    assert [listening(name) for name in known] == ["", "h2", "127.0.0.1", "localhost"]


def test_the_store_reaches_itself_wherever_it_listens():
    """Else torch gives up after five minutes, and takes the store of a running training with it."""
    for address in ("127.0.0.1", "127.0.0.2", ""):
        with socket.create_server((address, 0)) as listener:
            began = time.monotonic()
            store = open_store(listener)
            store.set("key", "value")
            assert time.monotonic() - began < 30
            del store


def test_the_leader_is_first_and_who_has_no_rank_waits():
    members = {n: Member(host=f"h{n}", address="a", port=1, slots=slots) for n, slots in ((0, 2), (1, 4), (3, 2))}
    posts = posts_of(members, 1, 6, generation=2)
    assert [(node, p.first, p.num, p.node, p.num_nodes) for node, p in posts.items()] == [
        (1, 0, 4, 0, 2),
        (0, 4, 2, 1, 2),
        (3, 6, 0, 1, 2),
    ]
    assert {(post.size, post.generation) for post in posts.values()} == {(6, 2)}


def test_a_port_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as server:
        machine = Machine(Nodes(num=2, rank=0, port=server.getsockname()[1]))
        machine.join(10)
    assert "cannot listen" in machine.error


def test_a_machine_that_goes_or_falls_silent_ends_the_others(monkeypatch):
    monkeypatch.setattr(crew_room, "LOST_S", 1.0)
    monkeypatch.setattr(crew_room, "ALIVE_S", 0.2)
    for goes in (True, False):
        port = free_port()
        first, third = Machine(Nodes(num=3, rank=0, port=port)), Machine(Nodes(num=3, rank=2, port=port))
        key_holder = Machine(Nodes(num=3, rank=1, port=port))
        while key_holder.post is None or first.post is None or third.post is None:
            time.sleep(0.01)
        line = key_holder.crew.lines[0]
        if goes:
            line.connection.shutdown(socket.SHUT_RDWR)
        else:
            monkeypatch.setattr(line, "tell", lambda message: None)
        assert first.wait_until_asked(5)
        assert third.wait_until_asked(5)
        wanted = "is gone" if goes else "has said nothing for"
        assert "node 1" in first.crew.trouble
        assert wanted in first.crew.trouble
        assert first.crew.trouble == third.crew.trouble


def test_the_cause_is_told_to_all_and_not_its_echoes():
    echo = failed(1, "Connection closed by peer", is_echo=True)
    cause = failed(3, "no batch left")
    found = machines(3, of_0={"ending": echo}, of_1={"ending": echo}, of_2={"ending": cause})
    assert [machine.final.failures[0].message.splitlines()[0] for machine in found] == ["no batch left"] * 3
    assert all("on node 2" in machine.final.failures[0].message for machine in found[:2])
    told = {"exit_code": 1, "is_echo": True, "message": "Connection closed by peer"}
    assert first_cause({0: told, 1: {"exit_code": 0}}, [])["node"] == 0


@pytest.mark.parametrize(
    ("type_name", "lost", "is_echo"),
    [
        ("", ["node 0 (h1) is gone"], True),  # a rank that breaks in native code, whose peer's machine is gone
        ("ValueError", ["node 0 (h1) is gone"], False),
        ("", [], False),
    ],
)
def test_beside_a_machine_that_is_lost_only_a_failure_with_words_is_a_cause(type_name, lost, is_echo):
    told = {"exit_code": 1, "is_echo": False, "type": type_name, "message": "exit code 1"}
    final = first_cause({1: told, 2: {**told, "is_echo": True}}, lost)
    assert (final["node"], final["is_echo"], final["lost"]) == (1, is_echo, lost)


class Outbox:
    """A connection that keeps what is sent."""

    data = b""

    def sendall(self, data):
        self.data += data

    def getpeername(self):
        return "127.0.0.1", 1


def test_what_ended_a_generation_does_not_end_the_next():
    """Also where the next is told in the same breath; and a machine that is lost meanwhile is lost to the next."""
    port = free_port()
    first, second = (Machine(Nodes(num=2, rank=rank, port=port)) for rank in range(2))
    until = time.monotonic() + 10
    while (first.post is None or second.post is None) and time.monotonic() < until:
        time.sleep(0.01)
    held = Line(Outbox(), first.crew.key)
    held.tell({"end": "node 0 (h1) failed", "by": signal.SIGINT})
    roster = {str(node): vars(member) for node, member in first.crew.members.items()}
    following = vars(replace(second.post, generation=1, address="the next"))
    told = {"final": {}, "why": "", "history": History(generation=1).as_dict(), "leader": 0}
    held.tell({**told, "next": following, "roster": {**roster, "7": roster["1"]}})
    first.crew.lines[1].connection.sendall(held.connection.data)
    while 7 not in second.crew.members and time.monotonic() < until:
        time.sleep(0.01)
    assert 7 in second.crew.members
    assert second.crew.trouble == ""
    first.crew.lines[1].connection.shutdown(socket.SHUT_RDWR)
    while not second.crew.trouble and time.monotonic() < until:
        time.sleep(0.01)
    assert "node 0" in second.crew.trouble
    assert "is gone" in second.crew.lost[0]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"nnodes": "2"}, "needs --node-rank"),
        ({"nnodes": "2", "node_rank": 2, "master_addr": "a"}, "count from 0 to 1"),
        ({"nnodes": "2", "node_rank": 0}, "need a place to meet"),
        ({"nnodes": "1:4", "node_rank": 0}, "exactly the machines that it is told"),
        ({"nnodes": "two"}, "must be a whole number"),
        ({"nnodes": "2", "node_rank": 0, "master_addr": "a", "rdzv_endpoint": "a:1"}, "both say where to meet"),
        ({"nnodes": "2", "node_rank": 0, "rdzv_endpoint": "a:port"}, "must be HOST:PORT"),
        ({"nnodes": "2", "standalone": True}, "this machine alone"),
        ({"node_rank": 1}, "say how many there are"),
        ({"nnodes": "2", "node_rank": 0, "master_addr": "a", "rdzv_conf": "timeout=9"}, "join_timeout=SECONDS is all"),
        ({"nnodes": "2", "node_rank": 0, "master_addr": "a", "rdzv_conf": "join_timeout=x"}, "join_timeout=SECONDS"),
    ],
)
def test_words_that_leave_something_open_are_refused(flags, reason):
    with pytest.raises(LaunchError, match=reason):
        Nodes.of(**flags)


def test_torchruns_words_mean_the_same_here():
    told = {"nnodes": "2", "node_rank": 1}
    assert Nodes.of(**told, master_addr="10.0.0.1", master_port=1234) == Nodes(
        num=2, rank=1, address="10.0.0.1", port=1234
    )
    assert Nodes.of(**told, rdzv_endpoint="a:1234", rdzv_id="x") == Nodes(
        num=2, rank=1, address="a", port=1234, run_id="x"
    )
    assert Nodes.of(**told, master_addr="a").port == 29500
    assert Nodes.of(**told, master_addr="a", rdzv_conf="join_timeout=600").meet_s == 600
    assert Nodes.of(standalone=True) is None
    assert Nodes.of(nnodes="1", node_rank=0) is None
    assert "always" in check_words(rdzv_backend="c10d", use_env=True)[0]
