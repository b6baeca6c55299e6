"""Copies that go on to the next host: all take the same one, and nothing is sealed there but what was sent."""

import contextlib
import json
import socket
import threading
from dataclasses import asdict, replace

import pytest

from shoal.errors import LaunchError
from shoal.launch.line import Line
from shoal.launch.parcel import Kept, NoRoomError, check_room, keep, send, take
from shoal.launch.rounds import GIVES_UP_AFTER, Order, Report, Rounds
from shoal.sealed import all_seals, file_of, number_of, seal_of

KEY = b"of this run"
DATA = bytes(range(256)) * 50_000  # more than what goes over at once


def sealed(folder, number=7, rank=2, slot="even", data=DATA):
    folder.mkdir(exist_ok=True)
    path = file_of(folder, rank, slot)
    path.write_bytes(data)
    seal_of(path).write_text(f'{{"number":{number},"step":{number}}}')
    return path


class Wire:
    """Two lines, and what happens to the bytes between them."""

    def __init__(self, change=lambda data: data, keys=(KEY, KEY)):
        (self._a, here), (there, self._b) = socket.socketpair(), socket.socketpair()
        self._sockets = self._a, here, there, self._b
        self.here, self.there, self._change = Line(self._a, keys[0]), Line(self._b, keys[1]), change
        ways = (here, there, True), (there, here, False)
        self._threads = [threading.Thread(target=self._pass_on, args=way) for way in ways]
        for thread in self._threads:
            thread.start()
        for line in (self.here, self.there):
            line.connection.settimeout(5)

    def _pass_on(self, source, target, changes):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                target.sendall(self._change(data) if changes else data)
            target.shutdown(socket.SHUT_RDWR)

    def close(self):
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()

    def carry(self, kept, folder, ranks=range(2, 4)):
        """What became of it on the two sides."""
        ends = {}

        def receive():
            try:
                take(self.there, self.there.first_words(), folder, ranks)
            except (LaunchError, OSError, ValueError, KeyError) as error:
                ends["there"] = str(error)
            self._b.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=receive)
        thread.start()
        try:
            send(self.here, kept, 1)
        except (LaunchError, OSError, KeyError) as error:
            ends["here"] = str(error)
        thread.join()
        return ends


@pytest.fixture
def wired():
    """`wired(...)`: a Wire, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(Wire(*args, **options)))


@pytest.fixture
def kept(tmp_path):
    path = sealed(tmp_path / "kept_0", slot="copy")
    return Kept(2, path, seal_of(path).read_bytes())


def test_what_was_sent_is_sealed_on_the_other_side_byte_for_byte(tmp_path, kept, wired):
    (tmp_path / "there").mkdir()
    assert wired().carry(kept, tmp_path / "there") == {}
    there = file_of(tmp_path / "there" / "near_1", 2, "copy")
    assert there.read_bytes() == DATA
    assert number_of(there) == 7


def flipped(data):
    """In the bare bytes, not in the words before or after them."""
    middle = len(data) // 2
    return data if data.count(b"\n") < 10 else data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("wire", "ranks", "why"),
    [
        ({"change": flipped}, range(2, 4), "is not what its host has signed"),
        ({"keys": (b"of another run", KEY)}, range(2, 4), "another secret"),
        ({}, range(2), "nobody has asked for"),
        ({"change": lambda data: data.replace(b'"slot": 1', b'"slot": 0')}, range(2, 4), "another secret"),
    ],
    ids=["a changed bit", "another secret", "a rank of another host", "changed words"],
)
def test_what_is_not_what_was_asked_for_or_sent_is_not_sealed(tmp_path, kept, wired, wire, ranks, why):
    (tmp_path / "there").mkdir()
    ends = wired(**wire).carry(kept, tmp_path / "there", ranks)
    assert why in ends["there"]
    assert ends["here"]
    assert not list((tmp_path / "there").rglob("*.seal"))


def test_what_was_recorded_cannot_be_played_again(tmp_path, kept, wired):
    recorded = []

    def record(data):
        recorded.append(data)
        return data

    (tmp_path / "there").mkdir()
    assert wired(record).carry(kept, tmp_path / "there") == {}
    seal_of(file_of(tmp_path / "there" / "near_1", 2, "copy")).unlink()
    wire = wired()
    player = threading.Thread(target=wire.here.connection.sendall, args=(b"".join(recorded[1:]),))
    player.start()
    with pytest.raises(LaunchError, match="is not what its host has signed"):
        take(wire.there, json.loads(recorded[0].partition(b" ")[2]), tmp_path / "there", range(2, 4))
    player.join()
    assert not list((tmp_path / "there").rglob("*.seal"))


def test_a_copy_that_its_rank_writes_over_is_not_kept(tmp_path):
    source = sealed(tmp_path)
    assert keep(source, tmp_path / "kept_0" / "a", 7) == seal_of(source).read_bytes()
    assert (tmp_path / "kept_0" / "a").read_bytes() == DATA
    assert keep(source, tmp_path / "kept_0" / "a", 6) is None
    seal_of(source).unlink()
    assert keep(source, tmp_path / "kept_0" / "a", 7) is None
    assert [number_of(source), list(all_seals(tmp_path))] == [0, []]


def test_no_more_than_half_of_what_is_free_is_taken(tmp_path):
    check_room(tmp_path, 1)
    with pytest.raises(NoRoomError, match="more than half of the"):
        check_room(tmp_path, 1 << 60)


def came(number, newest=0, why="", **more):
    return Report(number=number, newest=newest or number, num_bytes=100, seconds=0.5, why=why, **more)


def test_a_copy_is_whole_when_each_host_has_sent_its_part_and_then_the_next_one_is_taken():
    rounds = Rounds(frozenset([0, 1, 2]))
    assert rounds.hear(0, came(1)) == rounds.hear(2, came(1)) == (None, "")
    assert rounds.hear(7, came(1)) == rounds.hear(1, came(5)) == (None, "")  # of no host of this run, of another round
    assert rounds.hear(1, came(1, newest=4)) == (Order(5, whole=1), "")  # those between are left out


def test_after_a_round_that_failed_the_copy_before_stays_and_the_next_is_asked_for_earlier():
    rounds = Rounds(frozenset([0, 1]))
    assert [rounds.hear(node, came(1)) for node in (0, 1)][1] == (Order(2, whole=1), "")
    rounds.hear(0, came(2, newest=3))
    assert rounds.hear(1, came(2, newest=3, why="too late")) == (Order(5, whole=1), "")
    assert [rounds.hear(node, came(5)) for node in (0, 1)][1] == (Order(6, whole=5), "")


def test_what_it_costs_is_told_once_and_so_is_that_it_does_not_come_about():
    rounds, told = Rounds(frozenset([0])), []
    for _ in range(5):
        told.append(rounds.hear(0, came(rounds.order.number, newest=rounds.order.number + 1))[1])
    assert [bool(text) for text in told] == [False, False, True, False, False]
    assert "one of 2 copies of a host (100 B) is on the next host too, 500 ms after it was taken, in 400 B" in told[2]
    late = [rounds.hear(0, came(rounds.order.number, why="it was written over"))[1] for _ in range(2 * GIVES_UP_AFTER)]
    assert [text for text in late if text] == [late[GIVES_UP_AFTER - 1]]
    assert "it was written over" in late[GIVES_UP_AFTER - 1]


def test_where_one_host_has_no_room_no_copy_goes_on_any_more():
    rounds = Rounds(frozenset([0, 1]))
    rounds.hear(0, came(1, why="the line has ended"))
    order, text = rounds.hear(1, came(1, why="full to the brim", is_full=True))
    assert order is None
    assert "full to the brim" in text
    assert rounds.hear(0, came(1)) == (None, "")


def test_a_report_comes_over_the_line_as_it_was():
    report = replace(came(3, newest=4), is_full=True)
    assert Report.of(json.loads(json.dumps(asdict(report)))) == report
