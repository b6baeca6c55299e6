"""The timetable of a layout is what its stages do: every action of a training step, in its order, on every rank."""

from typing import Any

import pytest
from ranks import run_processes

from shoal.layout import Layout
from shoal.models.gpt import GPT
from shoal.parallel.pipeline.timetable import Action, actions
from shoal.parallel.place import placement_of
from shoal.run import Run, assemble
from shoal.world import Place, World


@pytest.mark.parametrize(
    "layout",
    [
        "pp2:micro=1",  # gpipe or 1f1b, as shoal chooses
        "pp2:micro=3",
        "pp2:micro=3,schedule=gpipe",
        "pp3:micro=5,schedule=1f1b",
        "pp2:micro=4,schedule=interleaved,virtual=2",
        "pp2:micro=3,schedule=looped-bfs,virtual=2",
        "pp2:micro=4,schedule=zb,virtual=2",
        "pp3:micro=7,schedule=zbv",
        "pp2:micro=5,schedule=dualpipev",
        "pp2.dp2:micro=2,schedule=1f1b",
    ],
)
def test_stages_do_what_the_timetable_says(layout: str) -> None:
    parsed = Layout.parse(layout)
    job = GPT(width=16, depth=parsed.num_stages, heads=2, context=16, batch_size=16, steps=2)

    def rank(rank: int, size: int, rendezvous: str) -> tuple[int, list[list[Action]]]:
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open(layout, place=place) as world:
            done = record(assemble(job, world, quiet=True))
            return world.mesh.coordinate(rank, "pp"), done

    for coordinate, steps in run_processes(rank, parsed.num_ranks):
        assert steps == [actions(parsed)[coordinate]] * job.steps


def record(run: Run) -> list[list[Action]]:
    """What the stages of this rank did in each step."""
    pipeline = placement_of(run.model).pipeline
    assert pipeline is not None
    done: list[Action] = []
    for stage in pipeline.stages:
        watch(stage, done)
    steps = []
    for step in run.steps():
        done.clear()
        step()
        steps.append(list(done))
    run.close()
    return steps


def watch(stage: Any, done: list[Action]) -> None:
    """Note each action as it ends."""
    forward, backward, weights = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

    def forward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
        output = forward(chunk, *args, **kwargs)
        done.append(("F", stage.stage_index, chunk))
        return output

    def backward_one_chunk(chunk: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        backward(chunk, *args, full_backward=full_backward, **kwargs)
        done.append(("B" if full_backward else "I", stage.stage_index, chunk))

    def backward_weight_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> None:
        weights(chunk, *args, **kwargs)
        done.append(("W", stage.stage_index, chunk))

    stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk
    stage.backward_weight_one_chunk = backward_weight_one_chunk
