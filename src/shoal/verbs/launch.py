"""shoal launch: any plain distributed script, unchanged."""

from pathlib import Path

from shoal.launch import run_script


def command(
    script: str,
    args: list[str],
    num_ranks: int,
    *,
    module: bool = False,
    log_dir: Path | None = None,
    threads: int | None = None,
) -> int:
    """Start the script in `num_ranks` processes on this machine; returns the exit code."""
    outcome = run_script(script, args, num_ranks, module=module, log_dir=log_dir, threads=threads)
    return outcome.exit_code
