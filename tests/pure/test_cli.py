"""The command line: what reaches a verb, what comes back, and the exit code that a script can trust."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shoal.cli
from shoal.errors import DataError
from shoal.launch import Failure, Outcome
from shoal.settings import Settings, TrainSettings
from shoal.verbs.selftest import Check, Report
from shoal.verbs.train import Trained

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "SHOAL_")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return " ".join(f"{self.out} {self.err}".replace("│", " ").split())  # usage errors stand in a box


Cli = Callable[..., Done]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """The command line in this process, in an empty folder, without any launcher around it."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)

    def run(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["shoal", *words])
        with pytest.raises(SystemExit) as end:
            shoal.cli.main()
        assert isinstance(end.value.code, int)
        return Done(end.value.code, *capsys.readouterr())

    return run


@dataclass
class Seen:
    """A verb that notes what reaches it instead of doing it."""

    result: Any
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.positional, self.named = args, kwargs
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    @property
    def settings(self) -> Settings[TrainSettings]:
        found = self.positional[1]
        assert isinstance(found, Settings)
        return found


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen(Trained(exit_code=0, folder=Path("runs/x"), figures={"train/loss": 0.5}))
    monkeypatch.setattr("shoal.verbs.train.command", seen)
    return seen


# --- help and slips


def test_help_imports_nothing_heavy() -> None:
    """Which is what makes it quick: torch alone takes a second."""
    code = (
        "import sys; sys.argv = ['shoal', '--help']; from shoal.cli import main\n"
        "try: main()\n"
        "finally: sys.stderr.write(str(sorted({'torch', 'numpy', 'pydantic', 'asyncio'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]"
    assert "train" in done.stdout


@pytest.mark.parametrize("verb", [["train"], ["launch"], ["test"], ["checkpoint", "export"], ["checkpoint", "ls"]])
def test_every_verb_that_prints_a_result_can_print_json(cli: Cli, verb: list[str]) -> None:
    done = cli(*verb, "--help")
    assert done.code == 0
    assert "--json" in done.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train"], "Missing argument 'JOB'."),
        (["train", "digits", "--lyaout", "dp2"], "there is no flag --lyaout"),
        (["train", "digits", "--steps", "many"], "Invalid value for '--steps'"),
        (["train", "digits", "--layout"], "Option '--layout' requires an argument"),
        (["checkpoint", "exprot"], "No such command 'exprot'. Did you mean 'export'?"),
        (["launch"], "Missing argument 'SCRIPT'."),
        (["launch", "nowhere.py"], "LaunchError: no script nowhere.py"),
        (["checkpoint", "ls", "nowhere"], "CheckpointError: no run folder nowhere"),
        (["train", "digits", "--seed", "3"], "JobError: --seed is no flag"),
        (["train", "--seed=3", "digits"], "it is a value of the job: --set seed=3"),
        (["train", "digts"], "JobError: no job 'digts'. Did you mean 'digits'?"),
        (["train", "digits", "--set", "widht=3"], "Digits has no field 'widht'. Did you mean 'width'?"),
        (["train", "digits", "--set", "width=x"], "JobError: Digits.width is 'x'; it must be a whole number"),
        (["train", "digits", "--set", "width"], "SettingsError: --set: 'width' is no job field"),
        (["train", "digits", "--steps", "0"], "SettingsError: --steps: steps is 0; it must be at least 1."),
        (["train", "digits", "--keep", "0"], "SettingsError: --keep: keep is 0; it must be at least 1."),
        (["train", "digits", "--trace", "0"], "SettingsError: --trace: trace is 0; it must be at least 1."),
        (["train", "digits", "--trace", "-2"], "SettingsError: --trace: trace is -2; it must be at least 1."),
        (["train", "digits", "--layout", "pd2"], "LayoutError"),
        (["train", "digits", "--layout", "cp2"], "LayoutError: cp2: not available yet in this version: cp."),
        (["train", "digits", "--layout", "dp2", "--nproc-per-node", "3"], "shoal train digits --layout dp2"),
        (["train", "digits", "--resume", "atuo"], "--resume atuo: it is auto, never, or the folder of a run"),
        (["train", "digits", "--device", "gpu"], "WorldError: there is no device 'gpu'"),
        (["train", "digits", "--config", "no.toml"], "SettingsError: the config file no.toml cannot be read"),
    ],
)
def test_a_mistake_is_code_2_and_a_line_that_helps(cli: Cli, words: list[str], told: str) -> None:
    done = cli(*words)
    assert told in str(done)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.out == ""


def test_a_mistake_leaves_no_run_folder_behind(cli: Cli, tmp_path: Path) -> None:
    for layout in ("lone", "dp2"):
        assert cli("train", "digits", "--layout", layout, "--set", "width=x").code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", ["runs/digits", "deep/down/here"])
def test_a_start_that_is_refused_leaves_no_run_folder_behind(cli: Cli, tmp_path: Path, made: str) -> None:
    words = [] if made == "runs/digits" else ["--run", made]
    done = cli("train", "digits", "--layout", "dp99999", *words)
    assert (done.code, "99999 processes on" in done.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_is_refused_leaves_a_folder_that_was_there(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "here" / "logs").mkdir(parents=True)
    assert cli("train", "digits", "--layout", "dp99999", "--run", "here").code == 2
    assert (tmp_path / "here" / "logs").is_dir()


def test_the_version_is_told(cli: Cli) -> None:
    assert cli("--version") == Done(0, f"shoal {shoal.__version__}\n", "")


# --- flags, files, environment


def test_flags_reach_the_verb(cli: Cli, trained: Seen) -> None:
    words = (
        "train jobs/mine.py:Mine --layout dp2:micro=2 --set lr=3e-4 --set width=8 --steps 7 --run here --resume "
        "auto --save-every 5 --log-every 2 --keep 4 --device cpu --threads 1 --timeout-min 2 "
        "--nproc-per-node 2 --tensorboard --trace 3"
    )
    assert cli(*words.split()).code == 0
    assert trained.positional[0] == "jobs/mine.py:Mine"
    assert trained.settings.values == TrainSettings(
        layout="dp2:micro=2",
        set={"lr": "3e-4", "width": "8"},
        steps=7,
        run="here",
        resume="auto",
        save_every=5,
        log_every=2,
        keep=4,
        device="cpu",
        threads=1,
        timeout_min=2,
        nproc_per_node=2,
        tensorboard=True,
        trace=3,
    )
    assert trained.settings.origin["save_every"] == "--save-every"


@pytest.mark.parametrize("words", [["--save_every", "3"], ["--save_every=3"], ["--save-every=3"]])
def test_underscores_are_dashes(cli: Cli, trained: Seen, words: list[str]) -> None:
    cli("train", "digits", *words, "--set", "clip_grad_norm=1")
    assert trained.settings.values.save_every == 3
    assert trained.settings.values.set == {"clip_grad_norm": "1"}


def test_a_flag_beats_the_environment_which_beats_the_file(
    cli: Cli, trained: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text("steps = 1\nkeep = 1\nsave-every = 1\n[set]\nlr = 0.1\nwidth = 1\n")
    monkeypatch.setenv("SHOAL_KEEP", "2")
    monkeypatch.setenv("SHOAL_STEPS", "2")
    monkeypatch.setenv("SHOAL_SET", "width=2")
    cli("train", "digits", "--config", "run.toml", "--steps", "3")
    values, origin = trained.settings.values, trained.settings.origin
    assert (values.steps, values.keep, values.save_every, values.set) == (3, 2, 1, {"lr": "0.1", "width": "2"})
    assert [origin[name] for name in ("steps", "keep", "save_every", "set.lr", "set.width", "device")] == [
        "--steps",
        "SHOAL_KEEP",
        "run.toml",
        "run.toml",
        "SHOAL_SET",
        "default",
    ]


def test_an_unknown_name_in_a_file_or_in_the_environment_is_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text("sutps = 1")
    done = cli("train", "digits", "--config", "run.toml")
    assert (done.code, "run.toml: there is no setting 'sutps'. Did you mean 'steps'?" in done.err) == (2, True)
    monkeypatch.setenv("SHOAL_STPES", "2")
    done = cli("train", "digits")
    assert (done.code, "Did you mean SHOAL_STEPS?" in done.err) == (2, True)


# --- what runs, and who said so


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Seen:
    """One process that would train here: notes the settings it would print."""
    seen = Seen((0, tmp_path))
    monkeypatch.setattr("shoal.verbs.train.rank.train_here", seen)
    return seen


def torchrun(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    told = {"RANK": 0, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "x"}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("size", "words", "layout", "origin"),
    [
        (None, [], "lone", "default"),
        (None, ["--nproc-per-node", "1"], "lone", "--nproc-per-node"),
        (1, [], "lone", "torchrun, 1 processes"),
        (2, [], "dp2", "torchrun, 2 processes"),
        (2, ["--layout", "dp2:micro=2"], "dp2:micro=2", "--layout"),
        (2, ["--nproc-per-node", "2"], "dp2", "torchrun, 2 processes"),
    ],
)
def test_the_table_shows_the_layout_that_runs(
    cli: Cli,
    joined: Seen,
    monkeypatch: pytest.MonkeyPatch,
    size: int | None,
    words: list[str],
    layout: str,
    origin: str,
) -> None:
    if size is not None:
        torchrun(monkeypatch, size)
    assert cli("train", "digits", *words).code == 0
    settings = joined.positional[2]
    assert settings.table().splitlines()[0].split(maxsplit=2) == ["layout", layout, origin]
    assert settings.values.layout == layout


@pytest.mark.parametrize(
    ("size", "words", "told"),
    [
        (2, ["--layout", "lone"], "LayoutError: lone needs 1 process, but this world has 2"),
        (2, ["--layout", "dp3"], "LayoutError: dp3 needs 3 processes, but this world has 2"),
        (1, ["--layout", "dp2"], "LayoutError: dp2 needs 2 processes, but this world has 1"),
        (2, ["--nproc-per-node", "3"], "torchrun has started 2 on this node already. Leave it out."),
    ],
)
def test_the_world_of_a_launcher_must_be_the_one_that_is_asked_for(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, size: int, words: list[str], told: str
) -> None:
    torchrun(monkeypatch, size)
    done = cli("train", "digits", *words)
    assert (done.code, told in done.err) == (2, True), done.err


# --- results and exit codes


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (Trained(exit_code=0, folder=Path("x")), 0),
        (Trained(exit_code=1, folder=Path("x")), 1),
        (Trained(exit_code=143, folder=Path("x")), 143),
        (DataError("no samples"), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=str,
)
def test_the_exit_code_says_how_it_went(cli: Cli, trained: Seen, result: Any, code: int) -> None:
    trained.result = result
    assert cli("train", "digits").code == code


def test_a_bug_shows_its_traceback(cli: Cli, trained: Seen) -> None:
    trained.result = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli("train", "digits")


def test_json_is_all_that_stdout_holds(cli: Cli, trained: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def chatty(*args: Any, **kwargs: Any) -> Trained:
        print("a job that prints")
        result = trained(*args, **kwargs)
        assert isinstance(result, Trained)
        return result

    monkeypatch.setattr("shoal.verbs.train.command", chatty)
    done = cli("train", "digits", "--json")
    assert json.loads(done.out) == {"exit_code": 0, "folder": "runs/x", "figures": {"train/loss": 0.5}, "error": ""}
    assert done.err == "a job that prints\n"
    assert trained.named == {"quiet": True, "nodes": None}


def test_a_mistake_is_json_too(cli: Cli) -> None:
    done = cli("train", "digts", "--json")
    told = json.loads(done.out)
    assert (done.code, told["exit_code"], told["error"]["type"]) == (2, 2, "JobError")
    assert told["error"]["message"] in done.err


def test_only_rank_0_of_a_launcher_prints_the_result(cli: Cli, trained: Seen) -> None:
    trained.result = Trained(exit_code=0, folder=Path("x"), speaks=False)
    assert cli("train", "digits", "--json") == Done(0, "", "")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Seen:
    failure = Failure(rank=1, exit_code=3, type="ValueError", message="no", user_frame="train.py:3 in f")
    seen = Seen(Outcome(exit_code=3, failures=(failure,), others=("rank 0: ended",), seconds=1.5))
    monkeypatch.setattr("shoal.verbs.launch.run_script", seen)
    return seen


@pytest.mark.parametrize(
    ("words", "script", "args", "num_ranks", "module"),
    [
        (["train.py"], "train.py", [], 1, False),
        (["--nproc_per_node", "2", "train.py", "--lr", "3"], "train.py", ["--lr", "3"], 2, False),
        (["--nproc-per-node=2", "train.py", "--", "--lr", "3"], "train.py", ["--lr", "3"], 2, False),
        (["train.py", "--nproc_per_node", "4"], "train.py", ["--nproc_per_node", "4"], 1, False),
        (["train.py", "--json", "--help", "-m"], "train.py", ["--json", "--help", "-m"], 1, False),
        (["train.py", "a", "--", "b"], "train.py", ["a", "--", "b"], 1, False),
        (["-m", "package.train", "-x"], "package.train", ["-x"], 1, True),
        (["--module", "--nproc-per-node", "2", "package.train"], "package.train", [], 2, True),
    ],
)
def test_what_follows_the_script_is_the_scripts_own(
    cli: Cli, launched: Seen, words: list[str], script: str, args: list[str], num_ranks: int, module: bool
) -> None:
    assert cli("launch", *words).code == 3
    assert launched.positional == (script, args, num_ranks)
    assert launched.named is not None
    assert (launched.named["module"], launched.named["show"]) == (module, "rank0")


def test_a_launch_as_json_is_the_exit_code_and_the_failures(cli: Cli, launched: Seen) -> None:
    done = cli("launch", "--json", "train.py")
    told = json.loads(done.out)
    assert (done.code, told["exit_code"]) == (3, 3)
    assert [(f["rank"], f["type"], f["message"], f["user_frame"]) for f in told["failures"]] == [
        (1, "ValueError", "no", "train.py:3 in f")
    ]
    assert told["others"] == ["rank 0: ended"]
    assert launched.named is not None
    assert launched.named["show"] == "none"


@pytest.mark.parametrize(("passed", "code"), [((True, True), 0), ((True, False), 1), ((), 1)])
def test_the_self_test_passes_only_if_something_ran_and_all_of_it_passed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, passed: tuple[bool, ...], code: int
) -> None:
    report = Report(checks=[Check(name="x", passed=well, found="", seconds=0.0) for well in passed])
    monkeypatch.setattr("shoal.verbs.selftest.command", Seen(report))
    done = cli("test", "--json")
    assert done.code == code
    assert json.loads(done.out)["passed"] == (code == 0)
