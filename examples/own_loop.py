"""A loop of your own: `shoal train` is written with nothing else.

Alone: python examples/own_loop.py
On two processes: torchrun --nproc-per-node 2 examples/own_loop.py dp2
"""

import sys

import shoal
from shoal.models.digits import Digits


def main(layout: str = "lone") -> None:
    job = Digits(steps=100)
    with shoal.World.open(layout) as world:
        run = shoal.assemble(job, world)
        for step in run.steps():
            result = step()  # forward, backward, clip, optimizer
            run.log(result)
        figures = run.evaluate()  # on every rank: each looks at its own part
        run.close()
        if world.rank == 0:
            print(f"accuracy {float(figures['accuracy']):.3f} after {result.step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
