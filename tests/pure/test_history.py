"""history.jsonl: what was trained on, when some of it is void."""

from dataclasses import replace

import pytest

from shoal.history import HistoryWriter, committed, in_words, problems

SAMPLES, BATCH = 10, 4  # so an epoch is 4, 4, 2


def add(writer, *steps):
    for step in steps:
        epoch, place = divmod(step - 1, 3)
        writer.add(step=step, epoch=epoch, first=place * BATCH, count=min(BATCH, SAMPLES - place * BATCH))


def write(path, *generations):
    """Of each generation: the step that it goes on from, and the last that it does."""
    for number, (begins, last) in enumerate(generations, start=1):
        writer = HistoryWriter(path, step=begins, generation=number, samples=SAMPLES, is_first=number == 1)
        add(writer, *range(begins + 1, last + 1))
        writer.close()
    return committed(path)


def test_what_a_generation_did_after_the_step_that_the_next_one_begins_at_is_void(tmp_path):
    rows = write(tmp_path / "h", (0, 5), (3, 9), (8, 10))
    assert [(row.step, row.generation) for row in rows] == [
        *((step, 1) for step in (1, 2, 3)),
        *((step, 2) for step in (4, 5, 6, 7, 8)),
        *((step, 3) for step in (9, 10)),
    ]
    assert problems(rows) == []
    assert in_words(rows) == "samples once each in every epoch, steps 1 to 10 over 3 starts"


def test_a_step_that_is_left_out_is_found(tmp_path):
    rows = write(tmp_path / "h", (0, 5), (6, 9))
    assert problems(rows) == ["step 7 follows step 5"]
    assert "broken" in in_words(rows)


@pytest.mark.parametrize("change", [{"first": 0}, {"count": 3}, {"epoch": 2}])
def test_a_sample_that_is_there_twice_or_never_is_found(tmp_path, change):
    rows = write(tmp_path / "h", (0, 9))
    rows[4] = replace(rows[4], **change)
    assert problems(rows)


def test_a_line_that_was_cut_short_and_a_new_beginning(tmp_path):
    write(tmp_path / "h", (0, 5))
    with (tmp_path / "h").open("a") as file:
        file.write('{"step": 6, "epo')
    assert len(committed(tmp_path / "h")) == 5
    assert len(write(tmp_path / "h", (0, 2))) == 2
