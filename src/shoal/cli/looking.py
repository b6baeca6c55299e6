"""The verbs that look: verify, plan, bench, report, why, test."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.words import JobName, Json, Preset, answering, app, print_json


@app.command(no_args_is_help=True)
def verify(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="digits, gpt, jobs/mine.py, jobs/mine.py:Mine, module:Mine")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="The layout to compare with one process: fsdp2.tp2")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the job: width=64 makes it small (repeatable).")
    ] = None,
    preset: Preset = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps with SGD, and again with the job's optimizer.")] = 3,
    runs: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Compare two runs that were made already.")
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant known mistakes, and show that they are found.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare a layout with one process, in float64: the same training, or the first module that differs and why."""
    from shoal.verbs.verify import answer

    with answering(as_json):
        report = answer(
            job, layout, set_ or [], steps=steps, runs=runs, self_test=self_test, preset=preset, quiet=as_json
        )
    print_json(report.as_dict()) if as_json else typer.echo(str(report))
    raise typer.Exit(report.exit_code)


@app.command()
def plan(
    job: JobName,
    layout: Annotated[str, typer.Option(help="The layout to plan, of any size: pp64.dp6.tp8:micro=256")],
    preset: Preset = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A field of the job: width=64 (repeatable).")] = None,
    ranks: Annotated[
        str, typer.Option(help="ends: the first, a middle and the last stage; all: every stage; or numbers, 0,5")
    ] = "ends",
    as_json: Json = False,
) -> None:
    """Tell memory, FLOPs and traffic of each rank of a layout, without the machine for it: nothing is computed."""
    from shoal.settings import TrainSettings, resolve
    from shoal.verbs.plan import command

    with answering(as_json):
        values = resolve(TrainSettings, flags={"layout": layout, "set": set_ or []}).values
        found = command(job, layout, fields=values.set, preset=preset, ranks=ranks)
    print_json(found.as_dict()) if as_json else typer.echo(str(found))


@app.command(no_args_is_help=True)
def bench(
    what: Annotated[
        str | None, typer.Argument(metavar="JOB", help="A job, as for train; or `collectives`, of the ranks here.")
    ] = None,
    layouts: Annotated[
        str | None, typer.Option("--layouts", "--layout", help="To compare: lone,dp2,fsdp2 (by default lone,dp2).")
    ] = None,
    scale: Annotated[str | None, typer.Option(help="Instead, degrees of one axis: 1,2,4")] = None,
    axis: Annotated[str, typer.Option(help="Of --scale: dp, fsdp, tp, pp, threads")] = "dp",
    mode: Annotated[
        str, typer.Option(help="strong: one global batch; weak: the job's batch for each data rank.")
    ] = "strong",
    set_: Annotated[list[str] | None, typer.Option("--set", help="A field of the job: width=64 (repeatable).")] = None,
    preset: Preset = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each layout has its turn.")] = 5,
    block: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 10,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads per rank, equal in all layouts; by default cores / ranks.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default what there is.")] = None,
    apart: Annotated[
        bool | None,
        typer.Option("--apart/--together", help="One world at a time; by default on a GPU, where memory is short."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch/--no-watch", help="Say each turn and the time left.")] = True,
    run: Annotated[Path | None, typer.Option("--run", "--run-dir", help="Where bench.json and bench.csv go.")] = None,
    nproc_per_node: Annotated[int | None, typer.Option(help="Ranks whose collectives are timed.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="Write the links that collectives found to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing cluster file.")] = False,
    max_mib: Annotated[int, typer.Option(min=1, help="The largest message of collectives, MiB.")] = 256,
    recompute_megatron: Annotated[
        bool, typer.Option("--recompute-megatron", help="Work Megatron's figures again: 512 GPUs at 76 %.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure a job in several layouts side by side: speed, efficiency, where the time goes, the same loss."""
    from shoal.verbs.bench import answer, claimed, keep

    with answering(as_json), claimed(run):
        found = answer(
            what,
            layouts=layouts,
            scale=scale,
            axis=axis,
            mode=mode,
            fields=set_ or [],
            preset=preset,
            rounds=rounds,
            block=block,
            threads=threads,
            device=device,
            apart=apart,
            nproc_per_node=nproc_per_node,
            cluster=cluster,
            force=force,
            max_mib=max_mib,
            megatron=recompute_megatron,
            quiet=as_json or not watch,
        )
        folder = keep(found, run)
        page = None if folder is None else _page(folder)
    told = found.as_dict()
    if as_json:
        print_json({**told, "folder": folder, "page": page})
    else:
        typer.echo(f"{found}" + (f"\nfiles   {folder}\npage    {page}" if folder is not None else ""))
    raise typer.Exit(told["exit_code"])


def _page(folder: Path) -> str:
    """The page of what was measured, or why there is none; the figures are kept either way."""
    from shoal.verbs.report import ReportError, write_page

    try:
        return str(write_page([folder]))
    except ReportError as error:
        return f"none: {error}"


@app.command(no_args_is_help=True)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of benchmarks.")],
    to: Annotated[Path | None, typer.Option("--to", help="The file; by default report.html in the first.")] = None,
    as_json: Json = False,
) -> None:
    """Write one page of runs and benchmarks: charts, tables and the mesh, in one file that needs nothing else."""
    from shoal.verbs.report import write_page

    with answering(as_json):
        file = write_page(runs, to)
    print_json({"exit_code": 0, "file": str(file)}) if as_json else typer.echo(str(file))


@app.command(no_args_is_help=True)
def why(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    as_json: Json = False,
) -> None:
    """Tell what became of a run: what happened first, what was lost, and the command that goes on."""
    from shoal.verbs.why import tell

    with answering(as_json):
        story = tell(run)
    print_json(story.as_dict()) if as_json else typer.echo(str(story))


@app.command("test")
def self_test(as_json: Json = False) -> None:
    """Test this machine in half a minute: start, collectives, the same training in dp2 as in one process."""
    from shoal.verbs.selftest import command

    with answering(as_json):
        report = command(quiet=as_json)
    if as_json:
        print_json(report.as_dict())
    raise typer.Exit(report.exit_code)
