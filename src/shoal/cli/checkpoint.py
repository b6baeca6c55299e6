"""shoal checkpoint: its verbs."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.words import Json, answering, app, finish, print_json

checkpoint = typer.Typer(help="Look at checkpoints, and hand their weights to plain PyTorch.", no_args_is_help=True)
app.add_typer(checkpoint, name="checkpoint")


@checkpoint.command("export")
def checkpoint_export(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one checkpoint of it.")],
    to: Annotated[Path, typer.Option("--to", help="model.safetensors or model.pt")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Json = False,
) -> None:
    """Write the model's weights for plain PyTorch, under the keys of its own state_dict()."""
    from shoal.verbs.checkpoint import export

    with answering(as_json):
        result = export(source, to, force=force)
    print_json(result) if as_json else typer.echo(result["text"])


@checkpoint.command("ls")
def checkpoint_ls(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, each verified to the last byte."""
    from shoal.verbs.checkpoint import listing

    with answering(as_json):
        rows = listing(source)
    if as_json:
        print_json(rows)
    elif not rows:
        typer.echo(f"no checkpoint in {source}")
    for row in () if as_json else rows:
        typer.echo(f"{row['step']:>8}  {row['size']:>10}  {row['state']}  {row['path']}")
    raise typer.Exit(0 if rows and all(row["state"] == "good" for row in rows) else 1)


@checkpoint.command("verify")
def checkpoint_verify(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one checkpoint of it.")],
    as_json: Json = False,
) -> None:
    """Read every byte, and tell what is wrong, by file and tensor."""
    from shoal.verbs.checkpoint import verified

    with answering(as_json):
        result = verified(source)
    finish(result, as_json)


@checkpoint.command("diff")
def checkpoint_diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run's folder, or one checkpoint of it.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: Json = False,
) -> None:
    """Compare two checkpoints, whatever layouts saved them: job, step, and each tensor; exit 1 where they differ."""
    from shoal.verbs.checkpoint import difference

    with answering(as_json):
        result = difference(first, second)
    finish(result, as_json)


@checkpoint.command("gc")
def checkpoint_gc(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    keep: Annotated[int, typer.Option(help="Good checkpoints to keep, the newest.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Delete old checkpoints, and what killed writers left; never while a run writes there."""
    from shoal.verbs.checkpoint import make_room

    with answering(as_json):
        result = make_room(source, keep, dry_run=dry_run)
    finish(result, as_json)
