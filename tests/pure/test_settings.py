"""Which value holds, and who said so."""

from pathlib import Path
from typing import Any

import pytest

from shoal.settings import Settings, SettingsError, TrainSettings, of_host, resolve


def settle(
    folder: Path, config: str | None = None, environment: dict[str, str] | None = None, **flags: Any
) -> Settings[TrainSettings]:
    path = None
    if config is not None:
        path = folder / "run.toml"
        path.write_text(config)
    return resolve(TrainSettings, config=path, environment=environment, flags=flags)


CONFIG, ENVIRONMENT, FLAG = "keep = 4", {"SHOAL_KEEP": "5"}, {"keep": 6}


@pytest.mark.parametrize(
    ("config", "environment", "flags", "keep", "origin"),
    [
        (None, {}, {}, 3, "default"),
        (CONFIG, {}, {}, 4, "run.toml"),
        (CONFIG, ENVIRONMENT, {}, 5, "SHOAL_KEEP"),
        (CONFIG, ENVIRONMENT, FLAG, 6, "--keep"),
        (None, ENVIRONMENT, FLAG, 6, "--keep"),
        (CONFIG, {}, FLAG, 6, "--keep"),
        (CONFIG, {"SHOAL_KEEP": ""}, {"keep": None}, 4, "run.toml"),
    ],
)
def test_the_nearer_to_the_hand_the_stronger(
    tmp_path: Path,
    config: str | None,
    environment: dict[str, str],
    flags: dict[str, Any],
    keep: int,
    origin: str,
) -> None:
    settings = settle(tmp_path, config, environment, **flags)
    assert (settings.values.keep, settings.origin["keep"]) == (keep, origin)


def test_nothing_given_is_the_defaults(tmp_path: Path) -> None:
    settings = settle(tmp_path)
    assert settings.values == TrainSettings()
    assert set(settings.origin) == set(TrainSettings.model_fields)
    assert set(settings.origin.values()) == {"default"}


def test_a_false_flag_beats_a_true_file(tmp_path: Path) -> None:
    settings = settle(tmp_path, "tensorboard = true", tensorboard=False)
    assert (settings.values.tensorboard, settings.origin["tensorboard"]) == (False, "--tensorboard")


def test_job_fields_are_merged_key_by_key(tmp_path: Path) -> None:
    settings = settle(
        tmp_path,
        "[set]\nlr = 3e-4\nwidth = 8\ndepth = 2\ntied = true\nname = 'a,b=c'",
        {"SHOAL_SET": "width=16, depth=3"},
        set=["depth=4", "text=x=y,z"],
    )
    assert settings.values.set == {
        "lr": "0.0003",
        "width": "16",
        "depth": "4",
        "tied": "true",
        "name": "a,b=c",
        "text": "x=y,z",
    }
    assert {name: source for name, source in settings.origin.items() if name.startswith("set.")} == {
        "set.lr": "run.toml",
        "set.width": "SHOAL_SET",
        "set.depth": "--set",
        "set.tied": "run.toml",
        "set.name": "run.toml",
        "set.text": "--set",
    }


def test_an_empty_list_of_job_fields_is_not_given(tmp_path: Path) -> None:
    assert settle(tmp_path, set=[]).origin["set"] == "default"
    assert settle(tmp_path, set={"lr": 1e-3}).values.set == {"lr": "0.001"}


@pytest.mark.parametrize("spelled", ["save-every", "save_every"])
def test_dashes_and_underscores_are_the_same(tmp_path: Path, spelled: str) -> None:
    assert settle(tmp_path, f"{spelled} = 7").values.save_every == 7
    settings = settle(tmp_path, **{spelled: 8})
    assert (settings.values.save_every, settings.origin["save_every"]) == (8, "--save-every")


def test_the_environment_speaks_in_text(tmp_path: Path) -> None:
    environment = {
        "SHOAL_LAYOUT": "dp2",
        "SHOAL_TIMEOUT_MIN": "0.5",
        "SHOAL_TENSORBOARD": "yes",
        "SHOAL_NPROC_PER_NODE": "2",
        "HOME": "/nowhere",
    }
    values = settle(tmp_path, None, environment).values
    assert (values.layout, values.timeout_min, values.tensorboard, values.nproc_per_node) == (
        "dp2",
        0.5,
        True,
        2,
    )


def test_variables_of_shoal_that_are_no_settings_are_left_alone(tmp_path: Path) -> None:
    environment = {"SHOAL_RANK": "1", "SHOAL_WORLD_SIZE": "2", "SHOAL_RUN_ID": "x", "STEPS": "3"}
    assert settle(tmp_path, None, environment).values == TrainSettings()


@pytest.mark.parametrize(
    ("config", "environment", "flags", "lesson"),
    [
        ("stpes = 3", {}, {}, "run.toml: there is no setting 'stpes'. Did you mean 'steps'?"),
        ("seed = 3", {}, {}, "run.toml: there is no setting 'seed'."),
        ("save-every = 3\nsave_every = 4", {}, {}, "save-every and save_every are the same setting"),
        ("steps = ", {}, {}, "is not TOML"),
        ("steps = 'many'", {}, {}, "run.toml: steps is 'many'; it must be a whole number, such as 64."),
        ("steps = true", {}, {}, "run.toml: steps is true; it is no yes-or-no setting"),
        ("steps = 2.5", {}, {}, "run.toml: steps is 2.5; it must be a whole number"),
        ("layout = 2", {}, {}, "run.toml: layout is 2; it must be a text."),
        ("timeout_min = inf", {}, {}, "run.toml: timeout_min is inf; it must be finite."),
        ("timeout_min = 0", {}, {}, "run.toml: timeout_min is 0; it must be above 0."),
        ("timeout_min = 'long'", {}, {}, "run.toml: timeout_min is 'long'; it must be a number, such as 3e-4."),
        ("threads = 9999", {}, {}, "run.toml: threads is 9999; it must be at most 1024."),
        ("tensorboard = 'maybe'", {}, {}, "run.toml: tensorboard is 'maybe'; it must be true or false."),
        ("[set]\nlr = [1]", {}, {}, "run.toml: the job field lr is [1]"),
        ("set = 3", {}, {}, "run.toml: set is 3"),
        ("set = [3]", {}, {}, "run.toml: set is [3]"),
        (None, {"SHOAL_STPES": "3"}, {}, "SHOAL_STPES is no setting. Did you mean SHOAL_STEPS?"),
        (None, {"SHOAL_STEPS": "x"}, {}, "SHOAL_STEPS: steps is 'x'; it must be a whole number, such as 64."),
        (None, {"SHOAL_SET": "lr"}, {}, "SHOAL_SET: 'lr' is no job field"),
        (None, {}, {"keep": 0}, "--keep: keep is 0; it must be at least 1."),
        (None, {}, {"stpes": 3}, "there is no flag --stpes. Did you mean 'steps'?"),
        (None, {}, {"set": ["=3"]}, "--set: '=3' is no job field"),
        (None, {}, {"set": ["lr=1", "lr=2"]}, "--set: the job field lr is given twice"),
    ],
)
def test_a_slip_is_named_with_its_place(
    tmp_path: Path, config: str | None, environment: dict[str, str], flags: dict[str, Any], lesson: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        settle(tmp_path, config, environment, **flags)
    assert lesson in str(caught.value)


def test_a_wrong_value_that_a_stronger_one_replaces_does_no_harm(tmp_path: Path) -> None:
    assert settle(tmp_path, "steps = 'many'", steps=3).values.steps == 3


def test_a_config_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml cannot be read: No such file"):
        resolve(TrainSettings, config=tmp_path / "none.toml")


def test_a_host_uses_its_own_values_over_those_for_all(tmp_path: Path) -> None:
    told = ["lr=0.1", "data_dir=/all", "data_dir@a=/a", "data_dir@b.lan=/b", "cache@b.lan=/c"]
    settings = settle(tmp_path, "[set]\n'data_dir@a' = '/file'", set=told)
    fields = settings.values.set
    assert of_host(fields, ["a"]) == {"lr": "0.1", "data_dir": "/a"}
    assert of_host(fields, ["b.lan", "b"]) == {"lr": "0.1", "data_dir": "/b", "cache": "/c"}
    assert of_host(fields, ["c"]) == {"lr": "0.1", "data_dir": "/all"}
    assert of_host({"x@a": "1", "x@b": "2"}, ["b", "a"]) == {"x": "2"}  # by the name that it is called by first
    assert ("set.data_dir@a", "/a", "--set") in settings.rows()


def test_the_table_shows_each_value_with_its_origin(tmp_path: Path) -> None:
    settings = settle(tmp_path, "steps = 300\n[set]\nlr = 1", {"SHOAL_LAYOUT": "dp2"}, save_every=10)
    assert settings.table().splitlines() == [
        "layout          dp2    SHOAL_LAYOUT",
        "steps           300    run.toml",
        "run             -      default",
        "resume          never  default",
        "save-every      10     --save-every",
        "log-every       -      default",
        "keep            3      default",
        "device          -      default",
        "timeout-min     10     default",
        "threads         -      default",
        "nproc-per-node  -      default",
        "tensorboard     false  default",
        "trace           -      default",
        "weights         -      default",
        "preset          -      default",
        "max-restarts    0      default",
        "memory-copies   auto   default",
        "elastic         -      default",
        "set.lr          1      run.toml",
    ]
