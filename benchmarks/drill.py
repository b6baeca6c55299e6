"""Harm done to small runs, on this machine and on hosts made of network namespaces; writes the table of docs/faults.md.

Every row is measured: python benchmarks/drill.py [--quick] (as root, for the hosts; the whole takes about an hour)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from shoal.verbs.drill.command import Card, Row, drill
from shoal.verbs.drill.follow import Measured

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- made by benchmarks/drill.py -->", "<!-- end -->"


def on_hosts(repeats: int) -> list[Row]:
    """The tests of tests/hosts/test_faults.py, each of which notes what it has measured."""
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        settings = os.environ | {"SHOAL_DRILL": "1", "SHOAL_DRILL_NOTES": str(notes)}
        for number in range(repeats):
            words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/hosts/test_faults.py"]
            done = subprocess.run(words, cwd=ROOT, env=settings, check=False)
            print(f"hosts ({number + 1} of {repeats}): pytest ended with {done.returncode}", file=sys.stderr)
        for line in notes.read_text().splitlines() if notes.exists() else ():
            note = json.loads(line)
            row = rows.setdefault(note["name"], Row(note["name"], [], []))
            if note["wrong"]:
                row.wrong.append(note["wrong"])
                row.num_silent += note["is_silent"]
            else:
                row.trials.append(Measured(told_s=note["told_s"], again_s=note["again_s"], lost=note["lost"]))
    return list(rows.values())


def page(card: Card) -> str:
    """The table, and what was measured where and when."""
    head, *rows = card.table()
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    silent, total = sum(row.num_silent for row in card.rows), sum(row.count for row in card.rows)
    wrong = [f"- {row.name}: {text}" for row in card.rows for text in row.wrong]
    where = f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {os.cpu_count()} cores, CPU (gloo)"
    said = f"{total} trials, {len(wrong)} not as they must be, {silent} silent. Measured {where}."
    return "\n".join([BEGIN, "", said, "", *lines, "", *wrong, *([""] if wrong else []), END])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="each fault once")
    args = parser.parse_args()
    card = drill(say=lambda text: print(text, file=sys.stderr, flush=True), whole=not args.quick)
    card.rows += on_hosts(1 if args.quick else 3)
    print(card)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + page(card) + rest.partition(END)[2])
    sys.exit(card.exit_code)


if __name__ == "__main__":
    main()
