"""What the verbs of the command line share: the application, words, and how a result is told."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from shoal.errors import ShoalError
from shoal.folder import to_json

USAGE = 2  # a person's mistake: the message says what to do
INTERRUPTED = 130  # Ctrl-C

app = typer.Typer(
    help="Train any PyTorch module on many devices as if it were one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # --save_every is --save-every, as for torchrun.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)

JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="digits, gpt, jobs/mine.py, jobs/mine.py:Mine, module:Mine")
]
Preset = Annotated[str | None, typer.Option(help="Values that the job sets together: gpt3-175b; --set is stronger.")]
Nnodes = Annotated[str | None, typer.Option(help="Machines that start together, each with this command.")]
NodeRank = Annotated[int | None, typer.Option(help="Which of them this is; 0 is where all meet.")]
MasterAddr = Annotated[str | None, typer.Option(help="An address of node 0 that all can reach.")]
MasterPort = Annotated[int | None, typer.Option(help="A port there that is free; 29500.")]
RdzvEndpoint = Annotated[str | None, typer.Option(help="Both in one, HOST:PORT.")]
RdzvConf = Annotated[str | None, typer.Option(help="join_timeout=600: seconds for all machines to be there; 30.")]
NprocPerNode = Annotated[str | None, typer.Option(help="Processes to start on this machine: 2, gpu, cpu or auto.")]
Hosts = Annotated[
    str | None, typer.Option(help="Start it on these over SSH: a,b or a:2,b:1 or a,b=/path/to/python; a is node 0.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With --hosts: print the commands alone.")]
RdzvId = Annotated[str | None, typer.Option(help="A name for the run; machines of another one are refused.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def finish(result: dict[str, Any], as_json: bool) -> None:
    told = {name: value for name, value in result.items() if name != "text"}
    print_json(told) if as_json else typer.echo(result["text"])
    raise typer.Exit(result["exit_code"])


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """With --json, stdout holds one JSON value, after a mistake too; what a job prints meanwhile goes to stderr."""
    if not as_json:
        yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ShoalError as error:
        print_json({"exit_code": USAGE, "error": {"type": type(error).__name__, "message": str(error)}})
        raise


def print_json(result: Any) -> None:
    typer.echo(to_json(result))
