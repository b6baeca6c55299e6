"""shoal launch: any plain distributed script, unchanged."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.launch import Outcome, run_script
from shoal.launch.nodes import Nodes


def command(
    script: str,
    args: list[str],
    num_ranks: int,
    *,
    module: bool = False,
    log_dir: Path | None = None,
    threads: int | None = None,
    quiet: bool = False,
    nodes: Nodes | None = None,
    max_restarts: int = 0,
) -> Outcome:
    """Start the script in `num_ranks` processes on this machine, with those of other machines, and see to its end."""
    # The first -- ends our options, as in any command; the script does not see it.
    passed_on = args[1:] if args[:1] == ["--"] else args
    return run_script(
        script,
        passed_on,
        num_ranks,
        module=module,
        log_dir=log_dir,
        threads=threads,
        show="none" if quiet else "rank0",
        nodes=nodes,
        max_restarts=max_restarts,
    )


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """The outcome for --json: the exit code, and every failure, the first cause first."""
    return asdict(outcome)
