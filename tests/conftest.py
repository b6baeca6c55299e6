"""The order of the tests: the longest begin first, so that no worker is left with one when all others are done."""

from pathlib import Path

LONGEST = (
    "test_everything_that_the_readme_shows_runs_in_order",
    "test_any_layout_goes_on_with_what_any_other_has_saved",
    "test_every_schedule_in_every_product_of_axes_is_the_same_training",
    "test_a_kind_of_model_is_verified_in_a_layout_or_refused_before_step_one",
    "test_a_planted_mistake_is_caught_and_explained",
)
ROOMS = ("gloo", "fake", "pure", "gpu")


def pytest_collection_modifyitems(items):
    names = {name: place for place, name in enumerate(LONGEST)}
    rooms = {room: place for place, room in enumerate(ROOMS)}

    def place(item):
        room = Path(item.path).parent.name
        return names.get(item.originalname, len(names)), rooms.get(room, len(rooms))

    items.sort(key=place)
