"""What follows a generation: again, smaller, or the end; and what counts against the limit."""

from dataclasses import replace

import pytest

from shoal.errors import LaunchError
from shoal.launch.again import Ended, History, Terms, decide, elastic

THREE = Terms(max_restarts=3)
ELASTIC = Terms(max_restarts=1, replica=2, least=1, most=4)
KILLED = Ended(exit_code=137, size=8, step=25, done=24, has_stepped=True)
RAISED = replace(KILLED, exit_code=1, error="ValueError: no batch left\njob.py:3 in loss")


def after(terms, *endings, slots=8, history=None):
    """The sizes of the generations that follow; 0 is the end. And why, at last."""
    history, sizes, why = history or History(), [], ""
    for ended in endings:
        decision = decide(terms, history, ended, slots)
        history, why = decision.history, decision.why
        sizes.append(decision.size)
    return sizes, why


@pytest.mark.parametrize(
    "ended",
    [
        replace(KILLED, exit_code=0),
        replace(KILLED, is_asked=True, exit_code=130),
        replace(RAISED, is_lesson=True, exit_code=2),
        replace(KILLED, has_stepped=False, done=0),
        replace(KILLED, lost=("node 1",)),
    ],
    ids=["done", "Ctrl-C or SIGTERM", "a lesson", "before the first step", "a machine is lost, and not elastic"],
)
def test_the_end(ended):
    assert after(THREE, ended)[0] == [0]


def test_without_restarts_the_first_failure_is_the_end():
    assert after(Terms(), KILLED) == ([0], "")


def test_failures_count_as_long_as_nothing_gets_on():
    assert after(THREE, *[KILLED] * 5) == (
        [8, 8, 8, 0, 0],
        "it was started again 3 times since the last progress; --max-restarts allows no more",
    )


def test_progress_begins_the_count_anew():
    endings = [replace(KILLED, done=done) for done in (24, 24, 25, 25, 25, 25)]
    assert after(THREE, *endings)[0] == [8, 8, 8, 8, 8, 0]


def test_a_generation_that_dies_in_its_set_up_is_tried_again_once_steps_were_done():
    assert after(THREE, KILLED, replace(KILLED, has_stepped=False, done=0, step=0))[0] == [8, 8]


def test_the_same_error_in_the_same_step_is_not_tried_again():
    sizes, why = after(THREE, RAISED, RAISED)
    assert sizes == [8, 0]
    assert "the same error in the same step twice (step 25)" in why


@pytest.mark.parametrize("other", [replace(RAISED, step=26), replace(RAISED, error="OSError: x"), KILLED])
def test_another_step_or_another_error_is_tried_again(other):
    assert after(THREE, RAISED, other)[0] == [8, 8]


def test_two_kills_in_the_same_step_are_no_error_that_repeats():
    assert after(THREE, KILLED, KILLED)[0] == [8, 8]


def test_torchruns_meaning_is_a_total_and_every_failure_counts():
    terms = Terms(max_restarts=2, counts_all=True)
    early = replace(RAISED, has_stepped=False, done=0, step=0)
    assert after(terms, early, early, early)[0] == [8, 8, 0]
    endings = [replace(KILLED, done=done) for done in (10, 20, 30)]
    assert after(terms, *endings)[0] == [8, 8, 0]


def test_elastic_goes_on_with_one_replica_less_when_restarts_are_used_up_and_counts_anew():
    assert after(ELASTIC, KILLED, KILLED)[0] == [8, 6]
    endings = [KILLED, KILLED, replace(KILLED, size=6), replace(KILLED, size=6)]
    assert after(ELASTIC, *endings)[0] == [8, 6, 6, 4]


@pytest.mark.parametrize(("slots", "size"), [(7, 6), (4, 4), (2, 2), (1, 0)])
def test_a_lost_machine_leaves_the_largest_group_that_fits(slots, size):
    assert after(ELASTIC, replace(KILLED, lost=("node 1",)), slots=slots)[0] == [size]


def test_machines_that_come_make_it_grow_up_to_the_most():
    grown = Ended(exit_code=143, size=4, done=30, has_stepped=True, grows=True)
    assert after(ELASTIC, grown, slots=6)[0] == [6]
    assert after(ELASTIC, grown, slots=100)[0] == [8]


def test_a_history_survives_json():
    history = decide(THREE, History(), RAISED, 8).history
    assert History.of(history.as_dict()) == history


@pytest.mark.parametrize("text", ["2", "0:4", "4:2", "a:b", "2:", ":4"])
def test_elastic_is_two_numbers(text):
    with pytest.raises(LaunchError, match="MIN:MAX"):
        elastic(text, 2)


def test_elastic_holds_what_the_layout_begins_with():
    assert elastic("2:4", 4) == (2, 4)
    with pytest.raises(LaunchError, match="dp8"):
        elastic("2:4", 8)
