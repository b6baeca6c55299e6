"""What a file for a batch system is to start, and on what: each value as it was asked for, none found out here."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.script import check_script

_WORDS = ("gpu", "cpu", "auto")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A job to train, or a script to run, on so many machines.

    Attributes:
        verb: `train` or `launch`.
        words: what follows the verb, without those about machines.
        processes: on each node: a number, or `gpu`, `cpu`, `auto`, to be found out there.
        python: the interpreter on the machines.
        wrote: the command that wrote the file.
    """

    verb: str
    words: tuple[str, ...]
    name: str
    num_nodes: int = 1
    processes: str = "1"
    gpus: int | None = None
    python: str = "python"
    wrote: str = ""

    @staticmethod
    def of(
        what: str,
        arguments: list[str],
        *,
        module: bool = False,
        name: str | None = None,
        nnodes: str | None = None,
        processes: str = "1",
        gpus: int | None = None,
        python: str = "python",
        wrote: str = "",
    ) -> "Asked":
        """From the command line.

        Raises:
            LaunchError: it cannot be said whether it is a job or a script, or a number is none.
        """
        nodes = nnodes or "1"
        if not nodes.isdecimal() or not int(nodes):
            raise LaunchError(f"--nodes is {nodes!r}; it must be a whole number from 1 on.")
        if processes not in _WORDS and not (processes.isdecimal() and int(processes)):
            raise LaunchError(f"--nproc-per-node is {processes!r}; it must be a number from 1 on, gpu, cpu or auto.")
        is_job = not module and names_job(what)
        head = ["-m", what] if module else [what]
        return Asked(
            verb="train" if is_job else "launch",
            words=(*head, *arguments),
            name=name or _name(what),
            num_nodes=int(nodes),
            processes=processes,
            gpus=gpus,
            python=python,
            wrote=wrote,
        )


def names_job(what: str) -> bool:
    """Whether it names a job to train, and not a script to run. A file is read, never run.

    Raises:
        LaunchError: a file that is both or neither, or is not there.
    """
    if not what.endswith(".py"):
        from shoal.job import BUILT_IN  # torch comes with it

        if what in BUILT_IN or ":" in what:
            return True
        raise LaunchError(f"{what} is no job and no script: name digits, gpt, job.py:Name, module:Name or script.py.")
    path = Path(what)
    check_script(path)
    try:
        tree = ast.parse(path.read_bytes(), what)
    except SyntaxError as error:
        raise LaunchError(f"{what} is no Python: {error}.") from None
    holds_job, runs = _holds_job(tree), any(_does_something(node) for node in tree.body)
    if holds_job == runs:
        does = "holds a job and also does something when it runs" if runs else "holds no class X(Job) and does nothing"
        raise LaunchError(f"{what} {does}. To train a job of it, name that: {what}:Name. A script is what runs.")
    return holds_job


def _holds_job(tree: ast.Module) -> bool:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return any(_last_name(base) == "Job" for node in classes for base in node.bases)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _does_something(node: ast.stmt) -> bool:
    """A statement that is more than a definition."""
    if isinstance(node, ast.If):
        told = {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}
        return "TYPE_CHECKING" not in told
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    defines = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Try
    return not is_text and not isinstance(node, defines)


def _name(what: str) -> str:
    """`jobs/my_job.py:Big` -> big, `jobs/my_job.py` -> my-job: a name that every system takes."""
    place, _, name = what.partition(":")
    found = re.sub(r"[^a-z0-9]+", "-", (name or Path(place).stem).lower()).strip("-")
    return found if found[:1].isalpha() else f"run-{found}".strip("-")
