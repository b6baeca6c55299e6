"""The command line: parse, import one verb, call it. Nothing heavy is imported before a verb runs."""

import contextlib
import difflib
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from shoal import __version__
from shoal.errors import JobError, ShoalError
from shoal.launch.hosts import follow_stdin
from shoal.world import before_torch, environment

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
checkpoint = typer.Typer(help="Look at checkpoints, and hand their weights to plain PyTorch.", no_args_is_help=True)
app.add_typer(checkpoint, name="checkpoint")

JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="digits, gpt, jobs/mine.py, jobs/mine.py:Mine, module:Mine")
]
Preset = Annotated[str | None, typer.Option(help="Values that the job sets together: gpt3-175b; --set is stronger.")]
Nnodes = Annotated[str | None, typer.Option(help="Machines that start together, each with this command.")]
NodeRank = Annotated[int | None, typer.Option(help="Which of them this is; 0 is where all meet.")]
MasterAddr = Annotated[str | None, typer.Option(help="An address of node 0 that all can reach.")]
MasterPort = Annotated[int | None, typer.Option(help="A port there that is free; 29500.")]
RdzvEndpoint = Annotated[str | None, typer.Option(help="Both in one, HOST:PORT.")]
RdzvId = Annotated[str | None, typer.Option(help="A name for the run; machines of another one are refused.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command()
def train(
    job: JobName,
    layout: Annotated[str | None, typer.Option(help="Where it runs: lone, dp2, dp4:micro=2,workers=2")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A field of the job: lr=3e-4 (repeatable).")] = None,
    preset: Preset = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with these settings and a table \\[set].")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, over the job's own.")] = None,
    # torchrun takes the first spelling for one of its own flags, even behind `-m shoal`.
    run: Annotated[
        str | None, typer.Option("--run", "--run-dir", help="The run's folder; by default runs/JOB.")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="auto, never, or the folder of another run.")] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; there is always one at the end.")
    ] = None,
    log_every: Annotated[int | None, typer.Option(help="Steps between logged ones; 1 in short runs.")] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints to keep.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default what there is.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads per process; by default cores / processes.")] = None,
    timeout_min: Annotated[float | None, typer.Option(help="Minutes that a collective may take.")] = None,
    nproc_per_node: Annotated[int | None, typer.Option(help="Processes to start on this machine.")] = None,
    tensorboard: Annotated[bool | None, typer.Option("--tensorboard", help="Write TensorBoard files too.")] = None,
    trace: Annotated[
        int | None, typer.Option(help="Steps to record on all ranks: RUN/trace/trace.json.gz, for ui.perfetto.dev.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Weights to start from: a .safetensors or .pt file, a folder of them, a run.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="by-name: no rank ever holds the whole model; short for --set init=by-name.")
    ] = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    hosts: Annotated[
        str | None, typer.Option(help="Start it on these over SSH: a,b or a,b=/path/to/python; a is node 0.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --hosts: print the commands alone.")] = False,
    seed: Annotated[str | None, typer.Option(hidden=True)] = None,
    as_json: Json = False,
) -> None:
    """Train a job in a layout."""
    if seed is not None:
        raise JobError(
            f"--seed is no flag: the seed changes what is computed, so it is a value of the job: --set seed={seed}"
        )
    flags: dict[str, Any] = {
        "layout": layout,
        "set": [*(set_ or []), *([f"init={init}"] if init else [])],
        "steps": steps,
        "run": run,
        "resume": resume,
        "save_every": save_every,
        "log_every": log_every,
        "keep": keep,
        "device": device,
        "threads": threads,
        "timeout_min": timeout_min,
        "nproc_per_node": nproc_per_node,
        "tensorboard": tensorboard,
        "trace": trace,
        "weights": weights,
        "preset": preset,
    }
    if hosts is not None:
        raise typer.Exit(_over_ssh(hosts, master_port, dry_run=dry_run))
    from shoal.launch.nodes import Nodes
    from shoal.settings import TrainSettings, resolve
    from shoal.verbs.train import command

    with _answer(as_json):
        settings = resolve(TrainSettings, config=config, environment=environment("SHOAL_"), flags=flags)
        nodes = Nodes.of(
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
        )
        done = command(job, settings, quiet=as_json, nodes=nodes)
    if as_json and done.speaks:
        _print_json({f.name: getattr(done, f.name) for f in fields(done) if f.name != "speaks"})
    raise typer.Exit(done.exit_code)


def _over_ssh(told: str, port: int | None, *, dry_run: bool) -> int:
    """The same words on each host."""
    from shoal.launch import hosts
    from shoal.launch.nodes import DEFAULT_PORT

    chosen = hosts.parse(told)
    calls = hosts.commands(chosen, hosts.without_hosts(sys.argv[1:]), folder=Path.cwd(), port=port or DEFAULT_PORT)
    if dry_run:
        for call in calls:
            typer.echo(shlex.join(call))
        return 0
    return hosts.run(chosen, calls)


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

    with _answer(as_json):
        report = answer(
            job, layout, set_ or [], steps=steps, runs=runs, self_test=self_test, preset=preset, quiet=as_json
        )
    _print_json(report.as_dict()) if as_json else typer.echo(str(report))
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

    with _answer(as_json):
        values = resolve(TrainSettings, flags={"layout": layout, "set": set_ or []}).values
        found = command(job, layout, fields=values.set, preset=preset, ranks=ranks)
    _print_json(found.as_dict()) if as_json else typer.echo(str(found))


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
    from shoal.verbs.bench import answer, keep

    with _answer(as_json):
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
        _print_json({**told, "folder": folder, "page": page})
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

    with _answer(as_json):
        file = write_page(runs, to)
    _print_json({"exit_code": 0, "file": str(file)}) if as_json else typer.echo(str(file))


@app.command(no_args_is_help=True)
def why(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    as_json: Json = False,
) -> None:
    """Tell what became of a run: what happened first, what was lost, and the command that goes on."""
    from shoal.verbs.why import tell

    with _answer(as_json):
        story = tell(run)
    _print_json(story.as_dict()) if as_json else typer.echo(str(story))


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or a module with -m.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")] = None,
    nproc_per_node: Annotated[int, typer.Option(help="Processes to start on this machine.")] = 1,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as python -m.")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="One file per process goes here.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads per process; by default cores / processes.")] = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    rdzv_backend: Annotated[str | None, typer.Option(help="As for torchrun; all of them mean the same here.")] = None,
    standalone: Annotated[bool, typer.Option("--standalone", help="This machine alone, as by default.")] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="0: a script that fails is not started again.")] = 0,
    use_env: Annotated[bool, typer.Option("--use-env", help="As always: LOCAL_RANK is in the environment.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the exit code and the failures as JSON, and not what the script prints."),
    ] = False,
) -> None:
    """Start any plain distributed script, unchanged: on this machine, or on several that each run this command."""
    from shoal.launch.nodes import Nodes, check_words
    from shoal.verbs.launch import as_dict, command

    with _answer(as_json):
        for word in check_words(rdzv_backend=rdzv_backend, max_restarts=max_restarts, use_env=use_env):
            typer.echo(word, err=True)
        nodes = Nodes.of(
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
            standalone=standalone,
        )
        outcome = command(
            script,
            args or [],
            nproc_per_node,
            module=module,
            log_dir=log_dir,
            threads=threads,
            quiet=as_json,
            nodes=nodes,
        )
    if as_json:
        _print_json(as_dict(outcome))
    raise typer.Exit(outcome.exit_code)


@app.command("test")
def self_test(as_json: Json = False) -> None:
    """Test this machine in half a minute: start, collectives, the same training in dp2 as in one process."""
    from shoal.verbs.selftest import command

    with _answer(as_json):
        report = command(quiet=as_json)
    if as_json:
        _print_json(report.as_dict())
    raise typer.Exit(report.exit_code)


@checkpoint.command("export")
def checkpoint_export(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one checkpoint of it.")],
    to: Annotated[Path, typer.Option("--to", help="model.safetensors or model.pt")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Json = False,
) -> None:
    """Write the model's weights for plain PyTorch, under the keys of its own state_dict()."""
    from shoal.verbs.checkpoint import export

    with _answer(as_json):
        result = export(source, to, force=force)
    _print_json(result) if as_json else typer.echo(result["text"])


@checkpoint.command("ls")
def checkpoint_ls(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, each verified to the last byte."""
    from shoal.verbs.checkpoint import listing

    with _answer(as_json):
        rows = listing(source)
    if as_json:
        _print_json(rows)
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

    with _answer(as_json):
        result = verified(source)
    _finish(result, as_json)


@checkpoint.command("diff")
def checkpoint_diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run's folder, or one checkpoint of it.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: Json = False,
) -> None:
    """Compare two checkpoints, whatever layouts saved them: job, step, and each tensor; exit 1 where they differ."""
    from shoal.verbs.checkpoint import difference

    with _answer(as_json):
        result = difference(first, second)
    _finish(result, as_json)


@checkpoint.command("gc")
def checkpoint_gc(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    keep: Annotated[int, typer.Option(help="Good checkpoints to keep, the newest.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Delete old checkpoints, and what killed writers left; never while a run writes there."""
    from shoal.verbs.checkpoint import make_room

    with _answer(as_json):
        result = make_room(source, keep, dry_run=dry_run)
    _finish(result, as_json)


def _finish(result: dict[str, Any], as_json: bool) -> None:
    told = {name: value for name, value in result.items() if name != "text"}
    _print_json(told) if as_json else typer.echo(result["text"])
    raise typer.Exit(result["exit_code"])


@contextlib.contextmanager
def _answer(as_json: bool) -> Iterator[None]:
    """With --json, stdout holds one JSON value, after a mistake too; what a job prints meanwhile goes to stderr."""
    if not as_json:
        yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ShoalError as error:
        _print_json({"exit_code": USAGE, "error": {"type": type(error).__name__, "message": str(error)}})
        raise


def _print_json(result: Any) -> None:
    typer.echo(json.dumps(result, default=str))


def _check_train_flags(words: list[str]) -> None:
    """A field of the job is no flag; typer would only say that there is none."""
    if words[:1] != ["train"]:
        return
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]  # a group
    known = {name for param in command.params for name in param.opts} | {"--help"}
    for word in words[1:]:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and len(name) > 2 and name not in known:
            field = name[2:].replace("-", "_")
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"Did you mean {close[0]}?" if close else f"A value of the job is set so: --set {field}=..."
            sys.stderr.write(f"there is no flag {name}. {hint}\n")
            sys.exit(USAGE)


def main() -> NoReturn:
    """Run the command line; exit 0 done, 1 failed, 2 a mistake that the message explains, 130 Ctrl-C, 143 SIGTERM."""
    before_torch()
    follow_stdin()
    try:
        _check_train_flags(sys.argv[1:])
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
