"""shoal train and shoal launch: what starts processes."""

import difflib
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.words import (
    USAGE,
    DryRun,
    Hosts,
    JobName,
    Json,
    MasterAddr,
    MasterPort,
    Nnodes,
    NodeRank,
    NprocPerNode,
    Preset,
    RdzvConf,
    RdzvEndpoint,
    RdzvId,
    answering,
    app,
    print_json,
)
from shoal.errors import JobError, LaunchError
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
_MEETING = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id", "rdzv_conf")


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
    nproc_per_node: NprocPerNode = None,
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
        str | None,
        typer.Option(help="Copies of the state in memory, also the next host's: auto, off, or every N steps."),
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(help="MIN:MAX data replicas: go on with fewer where ranks or hosts are lost; with more again."),
    ] = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    rdzv_conf: RdzvConf = None,
    hosts: Hosts = None,
    dry_run: DryRun = False,
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
    from shoal.launch.machine import num_processes
    from shoal.launch.nodes import Nodes
    from shoal.settings import TrainSettings, resolve

    if hosts is not None:
        there = resolve(TrainSettings, config=config, flags={**flags, "nproc_per_node": None}).values
        raise typer.Exit(_over_ssh(hosts, told, elastic=there.elastic, run=there.run))
    from shoal.verbs.train import command

    with answering(as_json):
        if nproc_per_node is not None:
            flags["nproc_per_node"] = num_processes(nproc_per_node)
        settings = resolve(TrainSettings, config=config, environment=environment("SHOAL_"), flags=flags)
        nodes = Nodes.of(**{name: told[name] for name in _MEETING})
        done = command(job, settings, quiet=as_json, nodes=nodes)
    if as_json and done.speaks:
        print_json({f.name: getattr(done, f.name) for f in fields(done) if f.name != "speaks"})
    raise typer.Exit(done.exit_code)


def _over_ssh(
    named: str,
    told: Mapping[str, Any],
    *,
    num_arguments: int = 0,
    elastic: str | None = None,
    run: str | None = None,
) -> int:
    """The same words on each host; the last `num_arguments` are a script's own."""
    from shoal.launch import hosts
    from shoal.launch.nodes import DEFAULT_PORT

    if elastic is not None and run is None:
        raise LaunchError(
            f"--elastic {elastic} over --hosts needs --run DIR: a host that was lost is started again, and what lies "
            "in the run's folder says where the others are."
        )

    chosen = hosts.parse(named)
    hosts.check_words(chosen, told)
    calls = hosts.commands(
        chosen,
        hosts.without_hosts(sys.argv[1:], num_arguments),
        folder=Path.cwd(),
        address=told["master_addr"],
        port=told["master_port"] or DEFAULT_PORT,
        is_elastic=elastic is not None,
    )
    if told["dry_run"]:
        for call in calls:
            typer.echo(shlex.join(call))
        return 0
    return hosts.run(chosen, calls, is_elastic=elastic is not None)


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A script, or a module with -m; for a batch system a job too.")
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")] = None,
    nproc_per_node: NprocPerNode = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as python -m.")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="One file per process goes here.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads per process; by default cores / processes.")] = None,
    nnodes: Annotated[
        str | None, typer.Option("--nnodes", "--nodes", help="Machines that start together, each with this command.")
    ] = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    rdzv_conf: RdzvConf = None,
    rdzv_backend: Annotated[str | None, typer.Option(help="As for torchrun; all of them mean the same here.")] = None,
    standalone: Annotated[bool, typer.Option("--standalone", help="This machine alone, as by default.")] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often all are started again after a failure.")] = 0,
    use_env: Annotated[bool, typer.Option("--use-env", help="As always: LOCAL_RANK is in the environment.")] = False,
    hosts: Hosts = None,
    dry_run: DryRun = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a file for sbatch instead.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Print a manifest for kubectl.")] = False,
    name: Annotated[str | None, typer.Option(help="Of these: the job's name; by default the script's.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Of these: GPUs to ask for; none.")] = None,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="Slurm: cores to ask for; one per process.")] = None,
    time: Annotated[str | None, typer.Option(help="Slurm: the limit, 04:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm: where to queue.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="Slurm: any other line, account=x (repeatable).")] = None,
    image: Annotated[str | None, typer.Option(help="Kubernetes: the image, with shoal and the job in it.")] = None,
    volume: Annotated[str | None, typer.Option(help="Kubernetes: CLAIM:/path, for the run's folder.")] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the exit code and the failures as JSON, and not what the script prints."),
    ] = False,
) -> None:
    """Start any plain distributed script, unchanged: on this machine, on several, or by a batch system (jobs too)."""
    told, arguments = dict(locals()), args or []
    if hosts is not None and not (slurm or kubernetes):
        raise typer.Exit(_over_ssh(hosts, told, num_arguments=1 + len(arguments)))
    if slurm or kubernetes:
        typer.echo(_for_batch(told, arguments), nl=False)
        return
    _check_is_for_batch(told)
    from shoal.launch.machine import num_processes
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
            rdzv_conf=rdzv_conf,
            standalone=standalone,
        )
        outcome = command(
            script,
            arguments,
            num_processes(nproc_per_node or "1"),
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


# What each says that writes a file, and the other ways to start say themselves.
_OF_BATCH = ("name", "gpus_per_node", "cpus_per_node", "time", "partition", "sbatch", "image", "volume")
_OF_SLURM, _OF_KUBERNETES = ("cpus_per_node", "time", "partition", "sbatch"), ("image", "volume")
_OF_OTHERS = ("hosts", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone")


def _for_batch(told: Mapping[str, Any], arguments: list[str]) -> str:
    """The file for sbatch, or the manifest for Kubernetes."""
    from shoal.launch.asked import Asked
    from shoal.launch.kubernetes import manifest
    from shoal.launch.slurm import sbatch

    if told["slurm"] and told["kubernetes"]:
        raise LaunchError("--slurm and --kubernetes write two different files. Leave one of them out.")
    system, foreign = ("--slurm", _OF_KUBERNETES) if told["slurm"] else ("--kubernetes", _OF_SLURM)
    for name in (*foreign, *_OF_OTHERS, "log_dir", "threads", "max_restarts"):
        if told[name]:
            raise LaunchError(f"--{name.replace('_', '-')} means nothing in a file of {system}. Leave it out.")
    asked = Asked.of(
        told["script"],
        arguments[1:] if arguments[:1] == ["--"] else arguments,
        module=told["module"],
        name=told["name"],
        nnodes=told["nnodes"],
        processes=told["nproc_per_node"] or "1",
        gpus=told["gpus_per_node"],
        python=os.path.abspath(sys.executable) if told["slurm"] else "python",
        wrote=shlex.join(["shoal", *sys.argv[1:]]),
    )
    if told["slurm"]:
        only = {name: told[name] for name in ("time", "partition")}
        return sbatch(asked, folder=Path.cwd(), cpus=told["cpus_per_node"], options=told["sbatch"] or [], **only)
    return manifest(asked, image=told["image"], volume=told["volume"])


def _check_is_for_batch(told: Mapping[str, Any]) -> None:
    for name in _OF_BATCH:
        if told[name]:
            raise LaunchError(f"--{name.replace('_', '-')} is for a batch system: add --slurm or --kubernetes.")


# torchrun's words that say nothing about a training, and what there is instead.
_OF_LAUNCH = {
    "--log-dir": "here each rank's log is in the run's folder, RUN/logs.",
    "--standalone": "leave it out: this machine alone is what is meant without --nnodes and --hosts.",
    "--rdzv-backend": "leave it out: machines meet at --master-addr, or --rdzv-endpoint.",
    "--use-env": "leave it out: LOCAL_RANK is in the environment always.",
    "--module": "here a job in a module is named module:Name.",
}


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
            if name in _OF_LAUNCH:
                sys.stderr.write(f"{name} is a flag of shoal launch; {_OF_LAUNCH[name]}\n")
                sys.exit(USAGE)
            hint = f"Did you mean {close[0]}?" if close else f"A value of the job is set so: --set {field}=..."
            sys.stderr.write(f"there is no flag {name}. {hint}\n")
            sys.exit(USAGE)
