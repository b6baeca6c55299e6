"""Which random numbers the stages of a pipeline draw. Their masks differ from those of one process by design; what must
hold is that no two are one, and that ranks with the same activation have the same.

    micro-batch 1, on data rank 0:    1/0   the modules of stage 0     one stream each, and none of them
                                      1/1   the modules of stage 1     that of another micro-batch or data rank
                                      1/    what lies between modules, which every stage computes: the same everywhere
"""

from collections.abc import Mapping, Sequence

Place = tuple[int, str, str]  # data rank, micro-batch, stage


def faults(
    drawn: Sequence[Mapping[str, str]], data_ranks: Sequence[int], again: Sequence[Mapping[str, str]] = ()
) -> dict[int, str]:
    """By rank, what is wrong with the streams that it draws; nothing of those that draw what they should.

    Args:
        drawn: of each rank, the fingerprint of the stream of each micro-batch and stage.
        again: what the same ranks drew in the same step of a training that was not stopped.
    """
    wrong: dict[int, str] = {}
    stream_at: dict[Place, str] = {}
    first_with: dict[str, Place] = {}
    for rank, (streams, data_rank) in enumerate(zip(drawn, data_ranks, strict=True)):
        for key, stream in streams.items():
            micro, _, stage = key.partition("/")
            place = (data_rank, micro, stage)
            if stream_at.setdefault(place, stream) != stream:
                told = f"{_of(place)} draw another random stream than on the ranks that hold the same activation"
                wrong.setdefault(rank, told)
            other = first_with.setdefault(stream, place)
            if other != place:
                told = f"{_of(place)} draw the random stream of {_apart(place, other)}: the two drop the same elements"
                wrong.setdefault(rank, told)
            if again and again[rank].get(key, stream) != stream:
                told = f"{_of(place)} draw another random stream after the resume than without a stop"
                wrong.setdefault(rank, told)
    return wrong


def _of(place: Place) -> str:
    _, micro, stage = place
    what = f"the modules of stage {stage}" if stage else "the functions between modules"
    return f"{what} in micro-batch {int(micro) + 1}"


def _apart(place: Place, other: Place) -> str:
    """The other place, by what it differs in."""
    told = []
    if other[2] != place[2]:
        told.append(f"stage {other[2]}" if other[2] else "what lies between modules")
    if other[1] != place[1]:
        told.append(f"micro-batch {int(other[1]) + 1}")
    if other[0] != place[0]:
        told.append(f"data rank {other[0]}")
    return ", ".join(told)
