"""Evaluation in a pipeline: the figures of one process, with the pipeline filled once for several batches."""

import jobs
import pytest
from ranks import run_processes

from shoal.evaluate import evaluate
from shoal.parallel.place import placement_of
from shoal.run import assemble
from shoal.world import Place, World


@pytest.mark.parametrize(("layout", "chunks"), [("pp2:micro=2", [8, 8, 2]), ("pp2:micro=3", [9, 9, 9])])
def test_batches_follow_each_other_through_the_stages_until_they_are_filled(layout, chunks):
    def rank(rank, size, rendezvous):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous)
        with World.open(layout, place=place) as world:
            run = assemble(jobs.Tokens(batch_size=5), world, quiet=True)
            seen, pipeline = [], placement_of(run.model).pipeline
            through = pipeline.run
            pipeline.run = lambda calls, *rest, **named: (seen.append(len(calls)), through(calls, *rest, **named))
            figures = evaluate(run.job, run.model, run.data, world, num_steps=9)
            run.close()
            return seen, {name: float(figure) for name, figure in figures.items()}

    with World.open("lone") as world:
        run = assemble(jobs.Tokens(batch_size=5), world, quiet=True)
        alone = {
            name: float(figure) for name, figure in evaluate(run.job, run.model, run.data, world, num_steps=9).items()
        }
        run.close()
    for seen, figures in run_processes(rank, 2):
        assert seen == chunks
        assert figures == pytest.approx(alone, rel=1e-12)
