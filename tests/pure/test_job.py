"""A job is named, built from text, checked and told apart from others; every slip is a lesson."""

import json
import math
import pickle
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.errors import JobError
from shoal.job import Job, Sum, check_job, identity, load_job, mean_loss, scale_lr, token_loss, with_fields

HEAD = """
    from dataclasses import dataclass
    import torch
    from torch import nn
    from shoal import Job, mean_loss

    class Methods:
        def model(self):
            return nn.Linear(2, 1)

        def data(self):
            return torch.utils.data.TensorDataset(torch.ones(6, 2), torch.ones(6))

        def loss(self, output, batch):
            return mean_loss(output[:, 0] - batch[1])

        def optimizer(self, params):
            return torch.optim.SGD(params, lr=self.lr)
"""
MINE = """
    @dataclass(frozen=True, kw_only=True)
    class Mine(Methods, Job):
        batch_size: int = 3
        steps: int = 2
        lr: float = 0.1
"""
BIG = MINE.replace("Mine", "Big").replace("0.1", "0.2")


@pytest.fixture(autouse=True)
def _leave_no_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write(path: Path, *parts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(textwrap.dedent(part) for part in parts))
    return path


def lesson(make: Callable[[], object]) -> str:
    with pytest.raises(JobError) as caught:
        make()
    return str(caught.value)


# --- names


@pytest.mark.parametrize(("name", "cls"), [("digits", "Digits"), ("gpt", "GPT")])
def test_a_built_in_job_has_a_name(name: str, cls: str) -> None:
    assert type(load_job(name)).__name__ == cls


def test_a_file_with_one_job_needs_no_class_name(tmp_path: Path) -> None:
    assert load_job(str(write(tmp_path / "mine.py", HEAD, MINE))).batch_size == 3


def test_a_file_with_two_jobs_needs_one(tmp_path: Path) -> None:
    path = write(tmp_path / "two.py", HEAD, MINE, BIG)
    assert load_job(f"{path}:Big").lr == 0.2  # type: ignore[attr-defined]
    assert lesson(lambda: load_job(str(path))) == (
        f"{path} must hold one job, or name it as {path}:Name. It holds: Mine, Big."
    )


def test_a_job_that_is_only_imported_into_a_file_is_not_the_files_own(tmp_path: Path) -> None:
    write(tmp_path / "base.py", HEAD, BIG)
    path = write(
        tmp_path / "derived.py",
        """
        from dataclasses import dataclass
        from base import Big

        @dataclass(frozen=True, kw_only=True)
        class Bigger(Big):
            steps: int = 9
        """,
    )
    assert load_job(str(path)).steps == 9
    assert load_job(f"{path}:Big").steps == 2


def test_a_module_of_the_working_folder_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "package" / "job.py", HEAD, MINE)
    monkeypatch.chdir(tmp_path)
    assert load_job("package.job:Mine").batch_size == 3


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("digts", "no job 'digts'. Did you mean 'digits'?"),
        ("mine", "Did you mean mine.py?"),
        ("mime.py", "no job file mime.py. Did you mean 'mine.py'?"),
        ("nowhere/mine.py", "no job file nowhere/mine.py. Built-in jobs: digits, gpt."),
        ("mine.py:Mein", "mine.py: 'Mein' is not there. Did you mean 'Mine'?"),
        ("mine.py:Methods", "mine.py: 'Methods' is no subclass of shoal.Job. Known: Mine."),
        ("mine:Mime", "mine: 'Mime' is not there. Did you mean 'Mine'?"),
        ("no.such:Mine", "no module 'no.such' (job 'no.such:Mine')"),
        ("empty.py", "It holds: none. A job is a subclass of shoal.Job with model, data, loss, optimizer"),
    ],
)
def test_a_slip_in_a_name_is_answered_with_the_nearest(
    spec: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mine.py", HEAD, MINE)
    write(tmp_path / "empty.py", "x = 1")
    monkeypatch.chdir(tmp_path)
    assert words in lesson(lambda: load_job(spec))


def test_an_unfinished_job_is_told_what_it_lacks(tmp_path: Path) -> None:
    path = write(tmp_path / "half.py", HEAD, MINE.replace("Methods, Job", "Job"))
    assert lesson(lambda: load_job(str(path))) == "Mine is not finished: it lacks data, loss, model, optimizer."


# --- files


def test_an_error_in_a_job_file_shows_the_users_traceback_and_no_other(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.py", "def f():\n    return 1 / 0\n\nf()")
    told = lesson(lambda: load_job(str(path)))
    assert told.startswith(f"{path} cannot be imported:\nTraceback (most recent call last):\n")
    assert f'File "{path}", line 4, in <module>' in told
    assert "return 1 / 0" in told
    assert told.endswith("ZeroDivisionError: division by zero")
    assert "load.py" not in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n    pass", "SyntaxError"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
    ],
)
def test_a_file_that_cannot_be_imported_is_a_mistake_that_is_named(tmp_path: Path, text: str, words: str) -> None:
    told = lesson(lambda: load_job(str(write(tmp_path / "bad.py", text))))
    assert words in told
    assert str(tmp_path / "bad.py") in told


def test_a_module_that_is_there_but_imports_what_is_not_shows_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "needy.py", "import needy_helper_that_is_missing")
    monkeypatch.chdir(tmp_path)
    told = lesson(lambda: load_job("needy:Mine"))
    assert "line 1, in <module>" in told
    assert "No module named 'needy_helper_that_is_missing'" in told


def test_a_file_named_like_a_real_module_does_not_take_its_place(tmp_path: Path) -> None:
    import random

    path = write(tmp_path / "random.py", HEAD, MINE)
    write(tmp_path / "colorsys.py", "raise RuntimeError('a file of the user hides the standard library')")
    job = load_job(str(path))
    assert sys.modules["random"] is random
    assert type(job).__module__ == "job_random"
    assert identity(job)["job"] == "random:Mine"
    assert pickle.loads(pickle.dumps(job)) == job  # loader processes may be sent it
    sys.modules.pop("colorsys", None)
    import colorsys

    assert colorsys.__file__ is not None
    assert not colorsys.__file__.startswith(str(tmp_path))


@pytest.mark.parametrize("name", ["my-job.py", "my.job.py", "1st.py"])
def test_a_file_may_have_a_name_that_is_no_identifier(tmp_path: Path, name: str) -> None:
    assert load_job(str(write(tmp_path / name, HEAD, MINE))).steps == 2


def test_what_lies_beside_a_job_file_can_be_imported(tmp_path: Path) -> None:
    write(tmp_path / "jobs" / "helper_of_mine.py", "BATCH_SIZE = 5")
    mine = MINE.replace("int = 3", "int = helper_of_mine.BATCH_SIZE")
    assert load_job(str(write(tmp_path / "jobs" / "mine.py", HEAD, "import helper_of_mine", mine))).batch_size == 5


def test_a_file_is_read_again_once_it_has_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", HEAD, MINE)
    first = load_job(str(path))
    assert type(load_job(str(path))) is type(first)
    write(path, HEAD, MINE.replace("int = 3", "int = 4"))
    assert load_job(str(path)).batch_size == 4


def test_a_folder_of_the_same_name_and_a_later_start_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine").mkdir()
    path = write(tmp_path / "jobs" / "mine.py", HEAD, MINE)
    names = [type(load_job(str(path))).__module__ for _ in range(2)]
    assert names == ["mine", "mine"]


@pytest.mark.parametrize("name", ["sys.py", "__main__.py"])
def test_a_built_in_module_is_not_replaced(tmp_path: Path, name: str) -> None:
    before = dict(sys.modules)
    assert load_job(str(write(tmp_path / name, HEAD, MINE))).steps == 2
    assert all(sys.modules[module] is before[module] for module in ("sys", "__main__"))


def test_a_file_on_the_import_path_keeps_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    job = load_job(str(write(tmp_path / "mine.py", HEAD, MINE)))
    assert type(job).__module__ == "mine"


# --- dataclasses


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (MINE.replace("@dataclass(frozen=True, kw_only=True)", ""), "put @dataclass(frozen=True, kw_only=True) above"),
        (MINE.replace("frozen=True, ", ""), "a job is frozen. Write @dataclass(frozen=True, kw_only=True)"),
        (MINE.replace("steps: int = 2", "steps = 2"), "Mine.steps has no type, so it is no field: steps: int = 2"),
        (
            MINE.replace("        batch_size: int = 3\n", ""),
            "Mine has no value for batch_size. Give a default in the class, or --set batch_size=...",
        ),
    ],
)
def test_a_class_that_is_no_frozen_dataclass_is_told_how_to_be_one(tmp_path: Path, mine: str, words: str) -> None:
    assert words in lesson(lambda: load_job(str(write(tmp_path / "mine.py", HEAD, mine))))


def test_a_field_without_a_default_comes_from_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", HEAD, MINE.replace("steps: int = 2", "steps: int"))
    assert load_job(str(path), {"steps": "7"}).steps == 7


# --- fields from text


def schedule(step: int) -> float:
    return 1.0 / (1 + step)


class Mode(Enum):
    SLOW = "slow"
    FAST = "fast"


@dataclass(frozen=True, kw_only=True)
class Typed(Job):
    batch_size: int = 4
    steps: int = 3
    whole: int = 1
    real: float = 0.5
    yes: bool = False
    text: str = "a"
    maybe: float | None = None
    maybe_text: str | None = None
    betas: tuple[float, float] = (0.9, 0.99)
    sizes: tuple[int, ...] = ()
    act: Literal["none", "relu", "gelu"] = "relu"
    bits: Literal[8, 16] = 8
    mode: Mode = Mode.SLOW
    path: Path = Path()
    names: list[str] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    schedule: Any = schedule

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def data(self) -> Any:
        return [torch.ones(2)]

    def loss(self, output: Any, batch: Any) -> Sum:
        return mean_loss(output)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.real)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("whole", "1_000", 1000),
        ("whole", "1e3", 1000),
        ("whole", "-5", -5),
        ("real", "3e-4", 3e-4),
        ("real", "2", 2.0),
        ("real", "inf", math.inf),
        ("yes", "true", True),
        ("yes", "True", True),
        ("yes", "no", False),
        ("text", "5", "5"),
        ("text", "none", "none"),
        ("text", "a=b,c", "a=b,c"),
        ("maybe", "none", None),
        ("maybe", "None", None),
        ("maybe", "1", 1.0),
        ("maybe_text", "none", None),
        ("maybe_text", "5", "5"),
        ("maybe_text", "true", "true"),
        ("betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("sizes", "[1, 2, 3]", (1, 2, 3)),
        ("sizes", "[]", ()),
        ("act", "none", "none"),
        ("act", "gelu", "gelu"),
        ("bits", "16", 16),
        ("mode", "fast", Mode.FAST),
        ("path", "a/b", Path("a/b")),
        ("path", "5", Path("5")),
        ("names", "['x', 'y']", ["x", "y"]),
        ("clip_grad_norm", "none", None),
        ("precision", "bf16", "bf16"),
    ],
)
def test_a_text_becomes_a_value_of_the_fields_type(name: str, text: str, value: object) -> None:
    found = getattr(with_fields(Typed(), {name: text}), name)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("whole", "3.5", "Typed.whole is '3.5'; it must be a whole number, such as 64."),
        ("whole", "many", "Typed.whole is 'many'; it must be a whole number, such as 64."),
        ("whole", "true", "Typed.whole is 'true'; it must be a whole number"),
        ("whole", "", "Typed.whole is ''; it must be a whole number"),
        ("real", "false", "Typed.real is 'false'; it must be a number, such as 3e-4."),
        ("real", "none", "Typed.real is 'none'; it must be a number"),
        ("yes", "2", "Typed.yes is '2'; it must be true or false."),
        ("maybe", "x", "Typed.maybe is 'x'; it must be a number, such as 3e-4, or none."),
        ("betas", "0.8,0.9", "it must be tuple[float, float], written as a list: [0.9, 0.95]."),
        ("betas", "[0.8]", "Typed.betas is '[0.8]'; it must be tuple[float, float]"),
        ("act", "tanh", "Typed.act is 'tanh'; it must be one of none, relu, gelu."),
        ("bits", "4", "Typed.bits is '4'; it must be one of 8, 16."),
        ("mode", "middle", "Typed.mode is 'middle'; it must be one of slow, fast."),
        ("dtype", "float64", "Typed.dtype is 'float64'; it must be a dtype."),
        ("whloe", "1", "Typed has no field 'whloe'. Did you mean 'whole'?"),
        ("model", "1", "Typed has no field 'model'."),
        ("batch_size", "0", "Typed.batch_size is 0; it must be at least 1 sample per optimizer step."),
        ("precision", "fp8", "Typed.precision is 'fp8'; it must be one of fp64, fp32, bf16, fp16."),
    ],
)
def test_a_text_that_does_not_fit_is_a_lesson(name: str, text: str, words: str) -> None:
    told = lesson(lambda: with_fields(Typed(), {name: text}))
    assert words in told
    assert "Input should" not in told  # pydantic's words


def test_values_that_are_no_text_are_checked_as_well() -> None:
    assert with_fields(Typed(), {"dtype": torch.float64, "betas": [0.1, 0.2]}).betas == (0.1, 0.2)  # type: ignore[attr-defined]
    told = lesson(lambda: with_fields(Typed(), {"whole": True}))
    assert told == "Typed.whole is True; it must be a whole number, such as 64."


def test_a_type_that_is_imported_for_checkers_alone_is_explained(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.py",
        "from __future__ import annotations",
        HEAD,
        MINE + "        when: Date | None = None\n",
    )
    assert load_job(str(path)).steps == 2
    assert "name 'Date' is not defined" in lesson(lambda: load_job(str(path), {"steps": "3"}))


# --- checks


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"steps": "5"}, "steps is '5'"),
        ({"steps": True}, "steps is True"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 2**63 - 1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"precision": "fp8"}, "precision is 'fp8'; it must be one of fp64, fp32, bf16, fp16"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm is 0.0; it must be None or above 0"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm is '1'"),
        ({"clip_grad_norm": math.nan}, "clip_grad_norm is nan"),
        ({"batch_norm": "sync"}, "batch_norm is 'sync'; it must be global or local"),
        ({"nonfinite": "ignore"}, "nonfinite is 'ignore'; it must be stop or skip"),
    ],
)
def test_values_that_no_training_can_have_are_refused(values: dict[str, Any], words: str) -> None:
    assert words in lesson(lambda: check_job(Typed(**values)))


def test_ordinary_values_pass() -> None:
    check_job(Typed(clip_grad_norm=1, seed=2**63 - 1, batch_norm="local", nonfinite="skip", precision="fp16"))


# --- identity


def test_the_identity_is_every_value_but_how_far_to_go() -> None:
    one = identity(Typed())
    assert identity(Typed(steps=99)) == one
    assert one["job"] == "test_job:Typed"
    for name, value in {"seed": 1, "batch_size": 5, "real": 0.6, "betas": (0.9, 0.98), "precision": "fp64"}.items():
        other = identity(with_fields(Typed(), {name: value}))
        assert {key for key in one if one[key] != other[key]} == {name}


def test_the_identity_is_the_same_in_another_process_and_fits_json(tmp_path: Path) -> None:
    """A function or an object in a field must not bring an address in memory: no resume would ever fit."""
    path = write(
        tmp_path / "mine.py",
        HEAD,
        "class Thing:\n    pass\n\ndef double(x):\n    return 2 * x\n",
        MINE + "        thing: object = Thing()\n        function: object = double\n        cls: type = Thing\n",
    )
    code = (
        "import json, sys; from shoal.job import identity, load_job;"
        "print(json.dumps(identity(load_job(sys.argv[1])), sort_keys=True))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found == identity(load_job(str(path)))
    assert [found[name] for name in ("thing", "function", "cls")] == ["mine:Thing object", "mine:double", "mine:Thing"]
    sys.modules["mine"] = types.ModuleType("mine")  # another one: the file is loaded under another name
    assert found == identity(load_job(str(path)))
    del sys.modules["mine"]


# --- helpers


def test_the_learning_rate_follows_the_rule_that_is_named() -> None:
    assert scale_lr(0.1, batch_size=256, base_batch_size=64, rule="linear") == pytest.approx(0.4)
    assert scale_lr(0.1, batch_size=256, base_batch_size=64, rule="sqrt") == pytest.approx(0.2)
    assert "Did you mean 'linear'?" in lesson(
        lambda: scale_lr(0.1, batch_size=2, base_batch_size=1, rule="linaer")  # type: ignore[arg-type]
    )
    assert "at least 1 sample" in lesson(lambda: scale_lr(0.1, batch_size=2, base_batch_size=0, rule="sqrt"))


def test_sums_of_ragged_parts_give_the_mean_of_the_whole() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0, 10.0])
    parts = mean_loss(losses[:3]) + mean_loss(losses[3:])
    assert float(parts.mean()) == 4.0
    assert float(mean_loss(torch.ones(2, 3)).count) == 6.0
    assert "lost its count" in lesson(lambda: mean_loss(losses.mean()))


def test_token_loss_counts_the_tokens_that_count() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 2], [-100, -100, 4]])
    loss = token_loss(logits, targets)
    assert int(loss.count) == 3
    expected = F.cross_entropy(logits[targets >= 0], targets[targets >= 0])
    assert torch.allclose(loss.mean(), expected)
    nothing = token_loss(logits, torch.full((2, 3), -100))
    assert (float(nothing.value), int(nothing.count)) == (0.0, 0)
    other = token_loss(logits, torch.where(targets < 0, 0, targets), ignore_index=0)
    assert torch.equal(other.value, loss.value)
