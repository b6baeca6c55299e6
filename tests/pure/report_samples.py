"""Folders as `shoal bench` and `shoal train` leave them, small, without a process, by the code that writes them."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.folder import RunFolder
from shoal.layout import Layout
from shoal.metrics.events import EventWriter
from shoal.metrics.shares import Spent
from shoal.metrics.timeline import draw
from shoal.parallel.pipeline.timetable import bubble, timetable
from shoal.verbs.bench.collectives_report import CollectivesReport
from shoal.verbs.bench.collectives_report import Row as Message
from shoal.verbs.bench.measured import Measured, RankMeasured
from shoal.verbs.bench.report import Report

LAYOUTS = ("lone", "threads2", "dp2", "dp4", "fsdp2.tp2", "pp2:micro=2")
WRITTEN = 1_800_000_000  # when all files were, in seconds since 1970
JOB = {"job": "gpt:GPT", "batch_size": 16, "seed": 0, "steps": 20}
_MIB = 2**20


def bench_folder(folder: Path, **changes: Any) -> Path:
    """With a bench.json."""
    return _folder(folder, "bench.json", bench(**changes).as_dict())


def bench(layouts: tuple[str, ...] = LAYOUTS, **changes: Any) -> Report:
    """As if measured."""
    rows = [measured(text) for text in layouts]
    return Report(**{"job": "gpt", "mode": "strong", "rows": rows, "cores": 2, "seconds": 12.5, **changes})


def measured(text: str, **changes: Any) -> Measured:
    """Of one layout: steps of 0.2 s on one device, of rather less on several."""
    layout = Layout.parse(text)
    num = layout.num_ranks * layout.threads
    spans = timetable(layout, lambda kind, stage: 0.02) if layout.pp > 1 else []
    rows = [[s.rank, s.stage, s.kind, s.micro, s.start_s, s.end_s] for s in spans]
    step_s = 0.2 / num**0.6
    given: dict[str, Any] = {
        "layout": text,
        "num_devices": num,
        "batch_size": 16,
        "tokens_per_sample": 128,
        "precision": "fp32",
        "times_s": [step_s, step_s * 1.1, step_s * 0.95],
        "losses": [5 / (step + 1) * (1 + 1e-8 * (num - 1) * (step % 3)) for step in range(8)],
        "model_flops": 3e9,
        "hardware_flops": 3e9,
        "peak_flops": 9e10,
        "peak_source": "90 GFLOP/s",
        "bubble": bubble(spans, layout.pp) if spans else None,
        "spans": rows,
        "promised": rows,
        "versions": {"torch": "2.13.0", "shoal": "0.1.0", "device": "cpu"},
        "ranks": [_rank(layout, rank, step_s) for rank in range(layout.num_ranks)],
    }
    return Measured(**{**given, **changes})


def _rank(layout: Layout, rank: int, step_s: float) -> RankMeasured:
    axes = [axis for axis in ("pp", "dp", "fsdp", "tp") if getattr(layout, axis) > 1]
    waits_s = {("compute", axis): 0.1 * step_s for axis in axes}
    spent = Spent(
        wall_s=step_s,
        data_s=0.01 * step_s,
        phases_s={"compute": (0.9 + 0.02 * rank) * step_s, "update": 0.03 * step_s},
        waits_s=waits_s,
    )
    return RankMeasured(
        spent=spent,
        peak_bytes={"parameters": 2 * _MIB, "gradients": 2 * _MIB, "optimizer": 4 * _MIB, "activations": 9 * _MIB},
        peak_gib=0.4,
        sent_bytes=dict.fromkeys(axes, 2 * _MIB),
        formula_bytes={axis: 2 * _MIB - 8 for axis in axes if axis == "dp"},
        cpu_s=0.7 * step_s,
    )


def collectives_folder(folder: Path) -> Path:
    """With a collectives.json."""
    rows = [
        Message(
            op=op,
            axis="dp",
            ranks=2,
            bytes=size,
            median_s=2e-4 + size / 1e9,
            min_s=1e-4 + size / 1e9,
            max_s=4e-4 + size / 1e9,
            rounds=7,
            calls=9,
        )
        for op in ("all_reduce", "send_recv")
        for size in (4**k for k in range(5, 12))
    ]
    report = CollectivesReport(layout="dp2", num_ranks=2, rows=rows, machine={"device": "cpu", "cores": 2}, seconds=4.0)
    return _folder(folder, "collectives.json", report.as_dict())


def run_folder(
    folder: Path, layout: str = "lone", *, num_steps: int = 20, odd: Mapping[int, float] | None = None, **job: Any
) -> Path:
    """With run.json, metrics.jsonl and, of a pipeline, schedule.svg; `odd` are losses of some steps."""
    parsed = Layout.parse(layout)
    RunFolder(folder).make()
    facts = {
        "job": {**JOB, **job},
        "layout": layout,
        "world": {"size": parsed.num_ranks, "backend": None, "device": "cpu"},
        "ledger": {"global_batch": 16, "num_data": parsed.num_data, "micro": parsed.micro, "tokens_per_step": 2048},
        "versions": {"torch": "2.13.0", "shoal": "0.1.0"},
    }
    RunFolder(folder).describe(facts)
    writer = EventWriter(folder / "metrics.jsonl", clock=lambda: float(WRITTEN))
    for step in range(1, num_steps + 1):
        loss = 5 / step * (1 + 1e-8 * (parsed.num_ranks - 1))
        writer.write(step, {"train/loss": (odd or {}).get(step, loss), **_figures(step)})
    if num_steps:
        writer.write(num_steps, {"eval/accuracy": 0.75})
    writer.close()
    if parsed.pp > 1:
        (folder / "schedule.svg").write_text(draw({"predicted": timetable(parsed, lambda kind, stage: 0.01)}))
    return _dated(folder)


def _figures(step: int) -> dict[str, float | None]:
    return {
        "train/grad_norm": 3 / step,
        "train/lr": 0.001 * math.exp(-step / 20),
        "perf/step_time_s": 0.7 if step == 1 else 0.2 + 0.01 * (step % 3),
        "perf/samples_per_s": 80.0 + step,
        "perf/tokens_per_s": 10_000.0 + 50 * step,
        "perf/data_wait": 0.01,
        "perf/mfu": None if step == 1 else 0.1 + 0.001 * step,
        "mem/peak_gib": 0.3,
    }


def _folder(folder: Path, name: str, told: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(told))
    return _dated(folder)


def _dated(folder: Path) -> Path:
    for file in folder.iterdir():
        os.utime(file, (WRITTEN, WRITTEN))
    return folder
