"""The harness itself: a test room that hides failures is worse than none."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_processes, run_ranks


class UnpicklableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_results_come_back_in_the_order_of_ranks():
    def add_up(rank, size):
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        return rank, size, total

    assert run_ranks(add_up, 3) == [(0, 3, torch.tensor(3.0)), (1, 3, 3.0), (2, 3, 3.0)]


def test_the_first_failure_is_raised_not_its_echo_in_the_others():
    def fail_on_one(rank, size):
        if rank == 1:
            raise KeyError("mine")
        dist.barrier()

    with pytest.raises(KeyError, match="mine") as caught:
        run_ranks(fail_on_one, 2)
    assert "rank 1 failed first" in caught.value.__notes__[0]
    assert "in fail_on_one" in caught.value.__notes__[0]


def test_an_exception_that_cannot_be_pickled_is_still_told():
    def fail(rank, size, rendezvous):
        raise UnpicklableError("salt", "pepper")

    with pytest.raises(RankError, match="UnpicklableError: salt and pepper"):
        run_processes(fail, 1)


def test_a_hung_rank_is_killed_and_its_stack_shown():
    def hang_here(rank, size, rendezvous):
        time.sleep(60 if rank == 1 else 0)
        return os.getpid()

    started = time.monotonic()
    with pytest.raises(RankError, match="in hang_here"):
        run_processes(hang_here, 2, time_limit_s=1)
    assert time.monotonic() - started < 30


def test_a_rank_that_dies_without_a_word_is_an_error():
    def die(rank, size, rendezvous):
        os._exit(3)

    with pytest.raises(RankError, match=r"exit codes are \[3\]"):
        run_processes(die, 1)
