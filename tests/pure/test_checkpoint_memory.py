"""Copies in shared memory, and the right to commit: what is torn or late is never used."""

import json

import pytest
import torch
from checkpoint_states import state_of

from shoal import World
from shoal.checkpoint import Writer, list_checkpoints, read
from shoal.checkpoint.fence import Fence, newest
from shoal.checkpoint.memory import SharedCopies
from shoal.checkpoint.recover import Memory, Part, choose
from shoal.checkpoint.recover import recover as recover_from
from shoal.errors import CheckpointError

JOB = {"lr": 1e-3}


@pytest.fixture
def world():
    with World.open("lone") as opened:
        yield opened


def copies_of(folder, world, *steps):
    copies = SharedCopies(folder, world)
    for step in steps:
        copies.take(state_of(step), step=step)
    return copies


def recover(folder, world, job, least=0):
    return recover_from(Memory(folder=folder, checkpoints=folder / "checkpoints"), world, job, least=least)


def test_the_newest_copy_comes_back_bit_for_bit(tmp_path, world):
    copies_of(tmp_path, world, 1, 2, 3)
    found = recover(tmp_path, world, JOB)
    assert found.step == 3
    checkpoint = read(found.path)
    assert str(checkpoint.tree) == str(state_of(3))
    assert (checkpoint.manifest.job, checkpoint.manifest.layout) == (JOB, "lone")


def test_a_torn_copy_is_not_used(tmp_path, world):
    copies_of(tmp_path, world, 1, 2, 3)
    (tmp_path / "generation_0" / "rank_00000.even.seal").unlink()  # killed while step 3 went over step 1
    assert recover(tmp_path, world, JOB).step == 2


def test_a_copy_whose_bytes_are_not_those_that_were_sealed_is_not_used(tmp_path, world):
    copies_of(tmp_path, world, 1)
    path = tmp_path / "generation_0" / "rank_00000.even"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert recover(tmp_path, world, JOB) is None


def test_where_the_newest_copy_is_damaged_the_one_before_it_is_taken(tmp_path, world):
    copies_of(tmp_path, world, 1, 2)
    path = tmp_path / "generation_0" / "rank_00000.odd"
    path.write_bytes(path.read_bytes()[:-1])
    assert recover(tmp_path, world, JOB).step == 1
    assert recover(tmp_path, world, JOB, least=2) is None


def parts(step, ranks, *, size=3, node=0, generation=0, layout="dp3", where="x"):
    return [Part(generation, step, step, layout, size, rank, node, f"{where}{step}.{rank}") for rank in ranks]


def test_the_newest_step_is_taken_of_which_each_part_lies_on_some_host():
    left = [*parts(9, [0, 1]), *parts(8, [0, 1]), *parts(7, [0, 1], node=0), *parts(7, [2], node=1, where="near")]
    assert [(part.step, part.rank, part.node) for part in choose(left, set())] == [(7, 0, 0), (7, 1, 0), (7, 2, 1)]
    assert choose(left, {(1, "near7.2")}) == []


def test_parts_of_different_starts_or_layouts_make_no_copy():
    mixed = [*parts(5, [0, 1]), *parts(5, [2], generation=1)], [*parts(5, [0, 1]), *parts(5, [2], layout="fsdp3")]
    assert [choose(left, set()) for left in mixed] == [[], []]
    twice = [*parts(5, [0, 1, 2], generation=1), *parts(5, [0, 1, 2])]
    assert {part.generation for part in choose(twice, set())} == {1}


def test_a_copy_that_one_rank_of_two_has_not_sealed_is_not_used(tmp_path, world):
    copies_of(tmp_path, world, 1, 2)
    for path in (tmp_path / "generation_0").glob("*.seal"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "size": 2}))
    assert recover(tmp_path, world, JOB) is None


def test_a_copy_that_was_gone_on_from_serves_until_there_is_a_newer_one(tmp_path, world):
    copies_of(tmp_path, world, 1, 2)
    assert recover(tmp_path, world, JOB).step == 2
    assert recover(tmp_path, world, JOB).step == 2  # the generation after died in its set-up
    copies_of(tmp_path, world, 3, 4, 5)
    assert [path.name for path in tmp_path.glob("step_*")] == []
    assert recover(tmp_path, world, JOB).step == 5


def test_nothing_was_copied(tmp_path, world):
    assert recover(tmp_path, world, JOB) is None


def test_of_two_that_want_a_number_one_gets_it(tmp_path):
    assert Fence.claim(tmp_path).number == 1
    assert Fence.claim(tmp_path, 2).number == 2
    for late in (1, 2):
        with pytest.raises(CheckpointError, match="another start of this run has taken over"):
            Fence.claim(tmp_path, late)
    assert newest(tmp_path) == 2


def test_a_writer_that_is_no_longer_the_newest_commits_nothing_and_says_so(tmp_path):
    with Writer(tmp_path) as writer:
        writer.submit({"x": torch.ones(3)}, step=1, job=JOB, layout="lone")
        assert writer.wait()
        Fence.claim(tmp_path)  # a part of the run that this one cannot see goes on
        writer.submit({"x": torch.ones(3)}, step=2, job=JOB, layout="lone")
        assert not writer.wait()
        assert "another start of this run has taken over" in writer.events[-1]
    assert [found.step for found in list_checkpoints(tmp_path)] == [1]
