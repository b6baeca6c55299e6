"""The order of the tests: the longest begin first, so that no worker is left with one when all others are done.

Tests that read what a dear fixture has made run on one worker. (xdist's own mark for that, `xdist_group`, is not seen
under pytest 9.2.)
"""

import os
from pathlib import Path

import pytest

LONGEST = (
    "test_everything_that_the_readme_shows_runs_in_order",
    "test_any_layout_goes_on_with_what_any_other_has_saved",
    "test_every_schedule_in_every_product_of_axes_is_the_same_training",
    "test_a_kind_of_model_is_verified_in_a_layout_or_refused_before_step_one",
    "test_a_planted_mistake_is_caught_and_explained",
)
ROOMS = ("gloo", "fake", "pure", "gpu")
TOGETHER = (
    *("gloo/test_verify.py", "gloo/test_generality.py", "gloo/test_pipeline_resume.py", "gloo/test_trace.py"),
    *("gloo/test_bench.py", "gloo/test_drill.py", "hosts/test_ssh.py", "hosts/test_slurm.py"),
)


def pytest_collection_modifyitems(items):
    if not os.environ.get("SHOAL_DRILL"):
        for item in items:
            if item.get_closest_marker("drill"):
                item.add_marker(pytest.mark.skip(reason="dear: make drill runs it (SHOAL_DRILL=1)"))
    names = {name: place for place, name in enumerate(LONGEST)}
    rooms = {room: place for place, room in enumerate(ROOMS)}

    def place(item):
        path = Path(item.path)
        is_one = path.as_posix().endswith(TOGETHER)  # all of a file, or its fixtures would be made again
        rank = 1 if is_one else names.get(item.originalname, len(names))
        return rank, rooms.get(path.parent.name, len(rooms)), str(path) if is_one else ""

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return Together(config, log)
