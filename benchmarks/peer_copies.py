"""What it costs that each host's copies are on the next host too: two parents of this machine as hosts, a rank each.

    python benchmarks/peer_copies.py [ROUNDS]      by default 3

The training of memory_copies.py (38 MiB of state), with no copy, a copy after each step, and as `auto` has it, in turn;
CPU time of all processes, the parents' among them, whose threads carry the copies.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_STEPS = 100
_JOB = Path(__file__).with_name("memory_copies.py")


def trial(copies: str, folder: Path) -> tuple[float, float, str]:
    """CPU seconds of all and milliseconds per step (the median), and what was said of copies on the next host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["train", f"{_JOB}:Wide", "--layout", "dp2", "--steps", str(_STEPS), "--run", str(folder)]
    words += ["--max-restarts", "1", "--memory-copies", copies, "--log-every", "1", "--save-every", "1000000"]
    words += ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--threads", "1"]
    said = folder.with_suffix(".txt")
    with said.open("w") as out:
        command = [sys.executable, "-m", "shoal", *words, "--node-rank"]
        hosts = [subprocess.Popen([*command, rank], stdout=out, stderr=out) for rank in ("0", "1")]
        ends = [os.wait4(host.pid, 0) for host in hosts]
    for host, (_, status, _) in zip(hosts, ends, strict=True):
        host.returncode = os.waitstatus_to_exitcode(status)
        assert host.returncode == 0, said.read_text()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [row["perf/step_time_s"] for row in rows if "perf/step_time_s" in row]
    told = next((line for line in said.read_text().splitlines() if "on the next host too" in line), "")
    return sum(used.ru_utime + used.ru_stime for _, _, used in ends), 1000 * statistics.median(times), told


def main(rounds: int = 3) -> None:
    found: dict[str, list[tuple[float, float, str]]] = {"off": [], "1": [], "auto": []}
    with tempfile.TemporaryDirectory() as above:
        for number in range(rounds):
            for copies, rows in found.items():
                rows.append(trial(copies, Path(above) / f"{copies}_{number}"))
    print("| --memory-copies | ms per step | CPU s, all processes | said |")
    print("|---|---|---|---|")
    for copies, rows in found.items():
        cpu, ms = (statistics.median(row[column] for row in rows) for column in (0, 1))
        print(f"| {copies} | {ms:.1f} | {cpu:.1f} | {rows[-1][2].removeprefix('memory').strip()} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
