"""The tree is the path: imports go down only, and each deed is done in its one place.

A checker reads the syntax tree of one file and names its offences; each is shown here to find a planted one.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

SRC = Path(__file__).parents[2] / "src" / "shoal"

FLOORS = {
    **dict.fromkeys(["errors", "units", "frames"], 0),
    **dict.fromkeys(["job", "layout", "cluster", "settings", "precision", "dry", "record", "sealed", "calls"], 1),
    "mesh": 2,
    "world": 3,
    **dict.fromkeys(["parallel", "data", "launch", "additive"], 4),
    **dict.fromkeys(["step", "agreement"], 5),
    **dict.fromkeys(["metrics", "checkpoint", "evaluate", "folder", "history"], 6),
    "run": 7,
    "verbs": 8,  # each verb is a room of its own
    "models": 8,  # side: it builds on the public pieces, and nobody in here imports it
    "cli": 9,
    "__main__": 10,
    "shoal": 11,  # the face: `shoal/__init__.py`
}
USES_THE_FACE = ("verbs", "models", "cli", "__main__")  # they are written as a user would write them

Checker = Callable[[ast.Module, PurePosixPath], list[str]]


def test_every_module_has_a_floor() -> None:
    rooms = {room_of(module_of(path)).partition(".")[0] for path, _ in sources()}
    assert rooms - set(FLOORS) == set(), "give the new room a floor in FLOORS, and in the tree of the design"


def test_imports_go_down_only() -> None:
    assert offences(find_bad_imports) == []


def test_the_environment_is_touched_in_world_and_launch_only() -> None:
    assert offences(find_environment, outside=("world/", "launch/")) == []


def test_process_groups_are_opened_in_world_only() -> None:
    assert offences(find_names("init_process_group"), outside=("world/",)) == []


def test_the_step_is_silent_and_reads_nothing_on_the_host() -> None:
    assert offences(find_calls("print", ".item", ".tolist"), inside=("step/", "parallel/")) == []


def test_nothing_below_the_verbs_prints() -> None:
    assert offences(find_calls("print"), outside=("verbs/", "cli/", "launch/")) == []


def test_no_pickle_is_written_or_read() -> None:
    assert offences(find_pickle) == []
    assert offences(find_torch_save, outside=("checkpoint/export.py",)) == []


def test_the_light_rooms_do_not_import_torch_at_their_top() -> None:
    light = ("errors.py", "units.py", "layout.py", "cluster.py", "settings.py", "mesh.py", "world/")
    doors = ("__init__.py", "__main__.py", "cli/", "launch/", "verbs/__init__.py", "verbs/launch", "verbs/doctor")
    assert offences(find_torch_at_top, inside=(*light, *doors)) == []


def test_functions_and_files_fit_the_eye() -> None:
    assert offences(find_long_functions) == []
    long = [str(path) for path, text in sources() if text.count("\n") > 400]
    assert long == [], "files of more than 400 lines"


@pytest.mark.parametrize("module", ["shoal", "shoal.cli", "shoal.launch", "shoal.world", "shoal.settings"])
def test_importing_a_door_does_not_import_torch(module: str) -> None:
    if not any(path.exists() for path in files_of(module)):
        pytest.skip(f"{module} is not built yet")
    loaded = run_python(f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))")
    assert loaded == "[]\n"


def test_nothing_happens_at_import() -> None:
    modules = [module_of(path) for path, _ in sources() if path.name != "__main__.py"]
    # Of torch's own doing: its pipelines load its compiler, which names its cache in the environment.
    printed = run_python(
        "import importlib, os, random, signal, threading, torch.distributed.pipelining\n"
        "def state():\n"
        "    handlers = [signal.getsignal(number) for number in signal.valid_signals()]\n"
        "    seeds = torch.initial_seed(), random.getstate()\n"
        "    return dict(os.environ), handlers, seeds, torch.get_num_threads(), threading.active_count()\n"
        "before = state()\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "print(state() == before)\n"
    )
    assert printed == "True\n"


# Each checker finds what is planted for it, and leaves alone what only looks like it.


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("layout.py", "from shoal.mesh import Mesh"),  # upward
        ("layout.py", "import shoal.mesh"),
        ("layout.py", "import shoal.mesh as m"),
        ("layout.py", "from shoal import mesh"),
        ("layout.py", "from . import mesh"),
        ("layout.py", "from .mesh import Mesh"),
        ("layout.py", "def f():\n    from shoal.mesh import Mesh"),
        ("layout.py", "if TYPE_CHECKING:\n    from shoal.world import World"),
        ("layout.py", "importlib.import_module('shoal.mesh')"),
        ("layout.py", "from shoal.job import Job"),  # sideways
        ("parallel/place.py", "from shoal.data import share"),
        ("parallel/place.py", "from ..data.order import mix"),
        ("parallel/deep/place.py", "from ...step import Step"),
        ("metrics/clock.py", "from shoal import checkpoint"),
        ("verbs/train.py", "from shoal.verbs.verify import verify"),
        ("verbs/train/loop.py", "from ..verify import verify"),
        ("verbs/train/loop.py", "from shoal.verbs import verify"),
        ("verbs/train.py", "from shoal.cli import main"),
        ("verbs/train.py", "from shoal.models.gpt import GPT"),  # aside
        ("job.py", "from shoal.models import gpt"),
        ("cli.py", "from shoal.models import gpt"),
        ("run.py", "from shoal import World"),  # the face, from below
        ("run.py", "import shoal"),
        ("run.py", "import shoal.verbs"),
        ("step.py", "from .nowhere import x"),  # no such room
    ],
)
def test_a_bad_import_is_found(path: str, line: str) -> None:
    assert len(check(find_bad_imports, path, line)) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("mesh.py", "from shoal.layout import Layout"),
        ("mesh.py", "from .layout import Layout"),
        ("parallel/place.py", "from shoal.parallel.norm import x\nfrom .norm import x\nfrom . import norm"),
        ("parallel/__init__.py", "from .norm import x\nfrom ..world import World"),
        (
            "verbs/train/start.py",
            "import shoal.verbs\nfrom . import loop\nfrom shoal.verbs.train import loop\nimport shoal",
        ),
        ("verbs/train.py", "from shoal import World, assemble\nfrom shoal.run import assemble"),
        ("models/gpt.py", "from shoal.data import StdlibText\nfrom shoal import Job\nfrom .layers import Norm"),
        ("cli.py", "from shoal.verbs import train\nfrom shoal.verbs.verify import command"),
        ("__init__.py", "def __getattr__(name):\n    from shoal.run import assemble\n    from .models import gpt"),
        ("layout.py", "import torch.mesh, numpy\nfrom shoaling.mesh import Mesh"),
    ],
)
def test_a_good_import_is_left_alone(path: str, line: str) -> None:
    assert check(find_bad_imports, path, line) == []


def find_names(*names: str) -> Checker:
    return lambda tree, _: [
        at(node, name_of(node)) for node in ast.walk(tree) if name_of(node) in names or imported(node, names)
    ]


def find_calls(*names: str) -> Checker:
    """Calls of a function `print`, or of a method `.item` of whatever object."""

    def called(node: ast.Call) -> str:
        return name_of(node.func) if isinstance(node.func, ast.Name) else "." + name_of(node.func)

    return lambda tree, _: [at(node, called(node)) for node in calls(tree) if called(node) in names]


def find_environment(tree: ast.Module, path: PurePosixPath) -> list[str]:
    return find_names("environ", "environb", "getenv", "putenv", "unsetenv")(tree, path)


def find_pickle(tree: ast.Module, path: PurePosixPath) -> list[str]:
    """Modules that pickle, `torch.load` that may unpickle, and collectives that send pickles."""
    found = [
        at(node, "pickle")
        for node in ast.walk(tree)
        for module in imported_modules(node)
        if module.partition(".")[0] in ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "joblib")
    ]
    for call in calls(tree):
        if dotted(call.func) == "torch.load" and not any(is_weights_only(word) for word in call.keywords):
            found.append(at(call, "torch.load without weights_only=True"))
    objects = ("gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list")
    return found + find_names(*objects, "send_object_list", "recv_object_list")(tree, path)


def find_torch_save(tree: ast.Module, _: PurePosixPath) -> list[str]:
    return [at(call, "torch.save") for call in calls(tree) if dotted(call.func) == "torch.save"]


def find_torch_at_top(tree: ast.Module, _: PurePosixPath) -> list[str]:
    return [
        at(node, "torch")
        for node in top_level(tree.body)
        for module in imported_modules(node)
        if module.partition(".")[0] in ("torch", "torchvision", "numpy", "sklearn")
    ]


def find_long_functions(tree: ast.Module, _: PurePosixPath) -> list[str]:
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [at(n, n.name) for n in functions if (n.end_lineno or n.lineno) - n.lineno >= 80]


def find_bad_imports(tree: ast.Module, path: PurePosixPath) -> list[str]:
    own = room_of(module_of(path))
    return [
        at(node, f"{own} imports {other}")
        for node in ast.walk(tree)
        for other in sorted({room_of(module) for module in imported_modules(node, module_of(path), path)})
        if not may_import(own, other)
    ]


def may_import(own: str, other: str) -> bool:
    if other in (own, ""):
        return True
    if own == "shoal":
        return True
    kind, other_kind = own.partition(".")[0], other.partition(".")[0]
    if other == "shoal":
        return kind in USES_THE_FACE
    if other_kind == "models" or other_kind not in FLOORS:
        return False
    return FLOORS[other_kind] < FLOORS[kind] or other == kind


@pytest.mark.parametrize(
    ("checker", "bad", "good"),
    [
        (find_environment, "import os\nx = os.environ['A']", "environment = {'os.environ': 1}"),
        (find_environment, "import os\nos.environ.setdefault('A', '1')", "x = config.environment"),
        (find_environment, "import os\nx = os.getenv('A')", "x = get_environment()"),
        (find_environment, "from os import environ", "from os import path"),
        (find_names("init_process_group"), "dist.init_process_group('gloo')", "dist.destroy_process_group()"),
        (find_names("init_process_group"), "from torch.distributed import init_process_group as i", "i = 1"),
        (find_calls("print", ".item", ".tolist"), "print(1)", "console.print(1)"),
        (find_calls("print", ".item", ".tolist"), "x = loss.detach().item()", "for k, v in d.items(): pass"),
        (find_calls("print", ".item", ".tolist"), "loss.tolist()", "list(loss)"),
        (find_pickle, "import pickle", "import json"),
        (find_pickle, "def f():\n    from pickle import loads", "'import pickle'"),
        (find_pickle, "torch.load(path)", "torch.load(path, weights_only=True)"),
        (find_pickle, "torch.load(path, weights_only=False)", "json.load(path)"),
        (find_pickle, "dist.all_gather_object(out, x)", "dist.all_gather(out, x)"),
        (find_torch_save, "torch.save(x, path)", "save(x, path)"),
        (find_torch_at_top, "import torch.distributed as dist", "import torchlight"),
        (find_torch_at_top, "try:\n    from torch import nn\nexcept ImportError:\n    pass", "def f(): import torch"),
        (find_torch_at_top, "class A:\n    import torch", "if TYPE_CHECKING:\n    import torch"),
        (find_long_functions, "def f():\n" + "    x = 1\n" * 80, "def f():\n" + "    x = 1\n" * 79),
    ],
)  # fmt: skip
def test_a_checker_finds_the_planted_offence_alone(checker: Checker, bad: str, good: str) -> None:
    assert len(check(checker, "step.py", bad)) == 1
    assert check(checker, "step.py", good) == []


def test_offences_are_looked_for_where_they_are_forbidden() -> None:
    everywhere = offences(find_names("Layout"))
    assert any(line.startswith("layout.py:") for line in everywhere)
    assert not any(line.startswith("layout.py:") for line in offences(find_names("Layout"), outside=("layout.py",)))
    inside = offences(find_names("Layout"), inside=("layout.py",))
    assert inside
    assert all(line.startswith("layout.py:") for line in inside)


def sources() -> Iterator[tuple[PurePosixPath, str]]:
    for file in sorted(SRC.rglob("*.py")):
        yield PurePosixPath(file.relative_to(SRC).as_posix()), file.read_text("utf-8")


def offences(checker: Checker, *, inside: tuple[str, ...] = ("",), outside: tuple[str, ...] = ()) -> list[str]:
    """`path:line: what` of every offence in the files under `inside` and not under `outside`."""
    return [
        f"{path}:{offence}"
        for path, text in sources()
        if str(path).startswith(inside) and not (outside and str(path).startswith(outside))
        for offence in checker(ast.parse(text), path)
    ]


def check(checker: Checker, path: str, text: str) -> list[str]:
    return checker(ast.parse(text), PurePosixPath(path))


def module_of(path: PurePosixPath) -> str:
    parts = path.with_suffix("").parts
    return ".".join(("shoal", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def files_of(module: str) -> list[Path]:
    folder = SRC.joinpath(*module.split(".")[1:])
    return [folder / "__init__.py", folder.with_suffix(".py")]


def room_of(module: str) -> str:
    """`shoal.parallel.norm` -> `parallel`, `shoal.verbs.train.loop` -> `verbs.train`; '' for a foreign module."""
    first, *rest = module.split(".")
    if first != "shoal":
        return ""
    if not rest:
        return "shoal"
    return ".".join(rest[:2]) if rest[0] == "verbs" else rest[0]


def imported_modules(node: ast.AST, module: str = "", path: PurePosixPath | None = None) -> Iterator[str]:
    """The modules that a node imports, in full; a name taken from the face stays with the face."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            is_room = base == "shoal.verbs" or (base == "shoal" and alias.name in FLOORS)
            yield f"{base}.{alias.name}" if is_room else base
    if isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__") and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import: not those inside functions, nor those for the type checker alone."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING":
            yield from top_level(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody"):
                yield from top_level(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from top_level(handler.body)


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def name_of(node: ast.AST) -> str:
    """The last name of `a.b.c` or `c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else name_of(node)


def imported(node: ast.AST, names: tuple[str, ...]) -> bool:
    return isinstance(node, ast.ImportFrom) and any(alias.name in names for alias in node.names)


def is_weights_only(word: ast.keyword) -> bool:
    return word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True


def at(node: ast.AST, what: str) -> str:
    return f"{getattr(node, 'lineno', 0)}: {what}"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
