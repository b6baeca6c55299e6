"""The verb that examines machines: doctor."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.words import Json, MasterPort, Preset, answering, app, print_json


@app.command()
def doctor(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="To compare its file, and to count its checkpoints.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Names that ssh knows, as for train: a,b=/path/to/python. None: this machine.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Of the run that is meant: fsdp4.tp2")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A field of the job: width=64 (repeatable).")] = None,
    preset: Preset = None,
    run: Annotated[Path | None, typer.Option("--run", "--run-dir", help="The folder of the run; runs.")] = None,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that are kept.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per rank; by default cores / ranks.")] = None,
    master_port: MasterPort = None,
    cluster: Annotated[Path | None, typer.Option(help="Write the slowest link to this cluster file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write all links as a heat map, SVG.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    drill: Annotated[bool, typer.Option("--drill", help="Hurt small runs here: what becomes of them.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="With --drill: every fault, often; 30 min.")] = False,
    only: Annotated[str, typer.Option(help="With --drill: the faults with this in their name.")] = "",
    as_json: Json = False,
) -> None:
    """Examine machines before a run: what is wrong, why it matters, and the fix. Exit 0 well, 1 warnings, 2 broken."""
    if drill:
        raise typer.Exit(_drill(whole=whole, only=only, as_json=as_json))
    from shoal.settings import TrainSettings, resolve
    from shoal.verbs.doctor.command import command

    with answering(as_json):
        report = command(
            job,
            hosts=hosts,
            layout=layout,
            fields=resolve(TrainSettings, flags={"set": set_ or []}).values.set,
            preset=preset,
            run=run,
            checkpoints=keep,
            threads=threads,
            port=master_port,
            cluster=cluster,
            picture=picture,
            force=force,
        )
    print_json(report.as_dict()) if as_json else typer.echo(str(report))
    raise typer.Exit(report.exit_code)


def _drill(*, whole: bool, only: str, as_json: bool) -> int:
    from shoal.verbs.drill.command import drill

    with answering(as_json):
        card = drill(say=lambda text: typer.echo(text, err=True), whole=whole, only=only)
    print_json(card.as_dict()) if as_json else typer.echo(f"\n{card}")
    return card.exit_code
