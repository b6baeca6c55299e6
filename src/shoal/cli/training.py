"""shoal train and shoal launch: what starts processes."""

import difflib
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.words import (
    USAGE,
    JobName,
    Json,
    MasterAddr,
    MasterPort,
    Nnodes,
    NodeRank,
    Preset,
    RdzvEndpoint,
    RdzvId,
    answering,
    app,
    print_json,
)
from shoal.errors import JobError
from shoal.world import environment

# Of `train`: what a config file and the environment may say too; and where several machines meet.
_SETTINGS = (
    "layout",
    "steps",
    "run",
    "resume",
    "save_every",
    "log_every",
    "keep",
    "device",
    "threads",
    "timeout_min",
    "nproc_per_node",
    "tensorboard",
    "trace",
    "weights",
    "preset",
    "max_restarts",
    "memory_copies",
    "elastic",
)
_MEETING = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id")


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
    max_restarts: Annotated[
        int | None, typer.Option(help="Failures since the last progress after which all ranks are started again.")
    ] = None,
    memory_copies: Annotated[
        str | None, typer.Option(help="Copies of the state in shared memory: auto, off, or every N steps.")
    ] = None,
    elastic: Annotated[
        str | None, typer.Option(help="MIN:MAX data replicas: go on with fewer, and with more again.")
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
    told = dict(locals())
    flags = {name: told[name] for name in _SETTINGS} | {"set": [*(set_ or []), *([f"init={init}"] if init else [])]}
    if hosts is not None:
        raise typer.Exit(_over_ssh(hosts, master_port, dry_run=dry_run))
    from shoal.launch.nodes import Nodes
    from shoal.settings import TrainSettings, resolve
    from shoal.verbs.train import command

    with answering(as_json):
        settings = resolve(TrainSettings, config=config, environment=environment("SHOAL_"), flags=flags)
        nodes = Nodes.of(**{name: told[name] for name in _MEETING})
        done = command(job, settings, quiet=as_json, nodes=nodes)
    if as_json and done.speaks:
        print_json({f.name: getattr(done, f.name) for f in fields(done) if f.name != "speaks"})
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
    max_restarts: Annotated[int, typer.Option(min=0, help="How often all are started again after a failure.")] = 0,
    use_env: Annotated[bool, typer.Option("--use-env", help="As always: LOCAL_RANK is in the environment.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the exit code and the failures as JSON, and not what the script prints."),
    ] = False,
) -> None:
    """Start any plain distributed script, unchanged: on this machine, or on several that each run this command."""
    from shoal.launch.nodes import Nodes, check_words
    from shoal.verbs.launch import as_dict, command

    with answering(as_json):
        for word in check_words(rdzv_backend=rdzv_backend, use_env=use_env):
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
            max_restarts=max_restarts,
        )
    if as_json:
        print_json(as_dict(outcome))
    raise typer.Exit(outcome.exit_code)


def check_train_flags(words: list[str]) -> None:
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
