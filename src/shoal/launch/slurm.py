"""A file for Slurm's sbatch: one parent on each node, which starts the ranks there.

sbatch ─► script ─► srun ─┬─► node 0: shoal train --node-rank 0 ...  ─► ranks
   limit - 120 s: SIGUSR1 └─► node 1: shoal train --node-rank 1 ...  ─► ranks ─► save, end with 143 ─► requeue, resume
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.asked import Asked

_SIGNAL_S = 120  # before the limit: a step, and a checkpoint of it
_COLUMN = 40


def sbatch(
    asked: Asked,
    *,
    folder: Path,
    cpus: int | None = None,
    time: str | None = None,
    partition: str | None = None,
    options: Sequence[str] = (),
) -> str:
    """The file's text.

    Args:
        folder: where it runs, the same on each node.
        cpus: cores of a node for all ranks there; by default one for each.
        time: as sbatch takes it: 04:00:00.
        options: more of sbatch's, without dashes: `account=x`.

    Raises:
        LaunchError: how many cores cannot be told from the number of processes, or an option is set here already.
    """
    if cpus is None and not asked.processes.isdecimal():
        raise LaunchError(f"--nproc-per-node {asked.processes} does not say how many cores to ask for: --cpus-per-node")
    trains = asked.verb == "train"
    chosen = [
        (f"job-name={asked.name}", "what squeue shows"),
        (f"nodes={asked.num_nodes}", "machines"),
        (
            "ntasks-per-node=1",
            "one parent on each: it imports torch once, forks the ranks, tells what failed first",
        ),
        (f"cpus-per-task={cpus or asked.processes}", "cores of a node, for all its ranks together"),
        *([(f"gpus-per-node={asked.gpus}", "seen by the parent, shared out among its ranks")] if asked.gpus else []),
        *([(f"time={time}", "the limit")] if time else []),
        *([(f"partition={partition}", "as asked")] if partition else []),
        ("output=%x-%j.out", "what rank 0 and the parents say; each rank has a file of its own in RUN/logs"),
        ("open-mode=append", "and after a requeue goes on there"),
        *(_ENDS_TRAINING if trains else _ENDS_SCRIPT),
        *((option.lstrip("-"), "as asked") for option in options),
    ]
    _check_once([told.partition("=")[0] for told, _ in chosen])
    head = [f"#SBATCH {f'--{told}':<{_COLUMN - 8}} # {why}" for told, why in chosen]
    lines = ["#!/bin/bash", *([f"# {asked.wrote}"] if asked.wrote else []), *head, "", *_meeting(folder), ""]
    lines += [*_srun(asked), *(_WAIT if trains else ['exit "$?"'])]
    return "\n".join(lines) + "\n"


_ENDS_TRAINING = (
    (f"signal=B:USR1@{_SIGNAL_S}", "this script is told so many seconds before the limit; see trap below"),
    ("requeue", "it may be queued again, which it asks for itself below"),
)
_ENDS_SCRIPT = (
    (f"signal=TERM@{_SIGNAL_S}", "the script is asked to end so many seconds before the limit"),
    ("no-requeue", "nobody knows whether a plain script can go on"),
)


def _check_once(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise LaunchError(f"--sbatch {name}: that line is there already, of this command's own. Edit the file.")


def _meeting(folder: Path) -> list[str]:
    return [
        f"cd {shlex.quote(str(folder))} || exit 1".ljust(_COLUMN) + " # the same folder on every node",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # node 0, where all meet',
        "port=$((20000 + SLURM_JOB_ID % 12000))".ljust(_COLUMN) + " # of this job, below those that systems hand out",
        "SHOAL_SECRET=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n')",
        "export SHOAL_SECRET".ljust(_COLUMN) + " # who does not have it cannot join",
    ]


def _srun(asked: Asked) -> list[str]:
    """The command, a group of words on each line."""
    python = shlex.quote(asked.python)
    there = f'exec {python} -m shoal {asked.verb} --node-rank "$SLURM_NODEID" "$@"'
    trains = asked.verb == "train"
    groups = [
        f'srun --cpus-per-task "$SLURM_CPUS_PER_TASK" bash -c {shlex.quote(there)} node',
        f"--nnodes {asked.num_nodes} --nproc-per-node {asked.processes}",
        '--master-addr "$first" --master-port "$port" --rdzv-conf join_timeout=300',
        *([f"--run runs/{asked.name} --resume auto"] if trains else []),
        shlex.join(asked.words) + (" &" if trains else ""),
    ]
    return (" \\\n    ".join(groups)).splitlines()


_WAIT = (
    "ranks=$!",
    "trap 'kill -USR1 \"$ranks\"' USR1".ljust(_COLUMN) + " # srun, parents, ranks: end the step, save, end with 143",
    "code=0",
    'while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; code=$?; done  # a trap ends a wait, not the ranks',
    'if [ "$code" = 143 ]; then'.ljust(_COLUMN) + " # asked to end, and saved: on from there",
    '    scontrol requeue "$SLURM_JOB_ID"',
    "fi",
    'exit "$code"',
)
