"""The command line: parse, import one verb, call it. Nothing heavy is imported before a verb runs."""

import sys
from typing import Annotated, NoReturn

import typer

from shoal import __version__
from shoal.cli import checkpoint, examining, looking, training
from shoal.cli.training import check_train_flags
from shoal.cli.words import INTERRUPTED, USAGE, app
from shoal.errors import ShoalError
from shoal.launch.hosts import follow_stdin
from shoal.world import before_torch

__all__ = ["app", "checkpoint", "examining", "looking", "main", "training"]

_ORDER = ("train", "verify", "bench", "report", "plan", "launch", "doctor", "why", "test")  # of --help
app.registered_commands.sort(key=lambda verb: _ORDER.index(verb.name or getattr(verb.callback, "__name__", "")))


def main() -> NoReturn:
    """Run the command line; exit 0 done, 1 failed, 2 a mistake that the message explains, 130 Ctrl-C, 143 SIGTERM."""
    before_torch()
    follow_stdin()
    try:
        check_train_flags(sys.argv[1:])
        app(prog_name="shoal")
    except ShoalError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(USAGE)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(INTERRUPTED)
    sys.exit(0)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit()
