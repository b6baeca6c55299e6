"""`python -m shoal.launch.child SPEC`: one fresh process. SPEC is JSON: the seat, and the work by name."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

from shoal.launch.fork import die_with
from shoal.launch.named import find
from shoal.launch.rank import Seat, Work, run
from shoal.world import Place


def main(text: str) -> int:
    """Take the seat and do the work; the exit code."""
    told: dict[str, Any] = json.loads(text)
    seat = told["seat"]
    die_with(seat["parent"])
    sys.path[:] = told["path"]
    given = {
        "place": Place(**seat["place"]),
        "log": Path(seat["log"]),
        "drop_variables": tuple(seat["drop_variables"]),
    }
    return run(_work(told), Seat(**(seat | given)))


def _work(told: dict[str, Any]) -> Work:
    # Found inside, so that an error of the import is reported like one of the work.
    return lambda place: functools.partial(find(told["work"]), **told["arguments"])(place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
