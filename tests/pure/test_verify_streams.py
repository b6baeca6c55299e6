"""What the stages of a pipeline draw: each its own, and the same wherever the same activation is."""

import pytest

from shoal.verbs.verify.streams import faults

# pp2.dp2.tp2 with two micro-batches; rank = 4 pp + 2 dp + tp, and peers on tp hold the same activation.
DATA_RANKS = [0, 0, 1, 1] * 2


def drawn():
    return [
        {f"{micro}/{at}": f"{data_rank} {micro} {at}" for micro in (0, 1) for at in ("", rank // 4)}
        for rank, data_rank in enumerate(DATA_RANKS)
    ]


def test_streams_of_stages_micro_batches_and_data_ranks_are_told_apart_and_those_of_peers_are_one():
    assert faults(drawn(), DATA_RANKS) == {}
    assert faults(drawn(), DATA_RANKS, again=drawn()) == {}


@pytest.mark.parametrize(
    ("ranks", "key", "stream", "said"),
    [
        ((4, 5), "0/1", "0 0 0", "stage 1 in micro-batch 1 draw the random stream of stage 0"),
        ((0, 1), "1/0", "0 0 0", "stage 0 in micro-batch 2 draw the random stream of micro-batch 1"),
        ((2, 3), "0/0", "0 0 0", "stage 0 in micro-batch 1 draw the random stream of data rank 0"),
        ((6, 7), "1/1", "0 0 0", "draw the random stream of stage 0, micro-batch 1, data rank 0"),
        ((0, 1), "1/0", "0 0 ", "draw the random stream of what lies between modules, micro-batch 1"),
        ((1,), "0/0", "another", "another random stream than on the ranks that hold the same activation"),
        ((4, 5, 6, 7), "0/", "another", "the functions between modules in micro-batch 1 draw another random stream"),
    ],
)
def test_a_stream_that_is_drawn_twice_or_differs_between_peers_is_named(ranks, key, stream, said):
    streams = drawn()
    for rank in ranks:
        streams[rank][key] = stream
    told = faults(streams, DATA_RANKS)
    assert said in told[ranks[0]]
    assert set(told) <= set(ranks)


def test_streams_that_a_resume_does_not_bring_back_are_named():
    streams, again = drawn(), drawn()
    again[5]["1/1"] = "earlier"
    assert faults(streams, DATA_RANKS, again) == {
        5: "the modules of stage 1 in micro-batch 2 draw another random stream after the resume than without a stop"
    }
