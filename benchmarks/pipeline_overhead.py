"""Steady throughput of `gpt` under pp2 against the same by hand, and how long the ranks of a pipeline stand still.

By hand: two stages cut by hand, torch's PipelineStage and schedule, tied weights added over the stages, the norm of
both stages, fused AdamW. Both arms take turns (turns.py). The bubble is measured of shoal's pipeline, and of a model of
equal stages, for which the formula is made:
python benchmarks/pipeline_overhead.py [--rounds 10] [--width 256] [--micro 4]
    [--schedule gpipe] [--picture step.svg]
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import turns
from handwritten import decoder, loop
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from shoal import Job, Sum, World, assemble, mean_loss
from shoal.data import StdlibText
from shoal.launch import start
from shoal.layout import Layout
from shoal.metrics.timeline import draw
from shoal.models.gpt import GPT
from shoal.parallel.pipeline.timetable import Kind, Span, bubble, timetable
from shoal.parallel.place import placement_of
from shoal.run import Run
from shoal.world import Place

BATCH, STEPS = 16, 10_000
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


# -- by hand -----------------------------------------------------------------------------------------------


class First(nn.Module):
    """Bytes -> activations."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.token, self.position = whole.token, whole.position
        self.blocks = nn.Sequential(*whole.blocks[: len(whole.blocks) // 2])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.token(tokens) + self.position(torch.arange(tokens.shape[1])))


class Last(nn.Module):
    """Activations -> logits."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = (
            nn.Sequential(*whole.blocks[len(whole.blocks) // 2 :]),
            whole.norm,
            whole.head,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))


def by_hand(width: int, micro: int, schedule: str) -> turns.Step:
    """The loop of a careful person."""
    rank = dist.get_rank()
    model = (First, Last)[rank](decoder(width))
    tied = model.token.weight if rank == 0 else model.head.weight
    params = list(model.parameters())
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), fused=True)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 100, total_iters=100)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 100, eta_min=2e-4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[100])
    data = StdlibText(128)
    loader = iter(DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, 1, 0, shuffle=True, seed=0)))
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, micro, loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))

    def step() -> float:
        tokens, targets = next(loader)
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if rank == 0:
            pipeline.step(tokens)
        else:
            pipeline.step(target=targets, losses=losses)
        dist.all_reduce(tied.grad)
        own = torch.nn.utils.get_total_norm([p.grad for p in params if rank == 0 or p is not tied]) ** 2
        shown = torch.stack([own, torch.stack(losses).detach().mean() if losses else torch.zeros(())])
        dist.all_reduce(shown)  # the norm of both stages, and the loss, as a log needs it
        torch._foreach_mul_([p.grad for p in params], (1.0 / (shown[0].sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        scheduler.step()
        return float(shown[1])

    return step


def made(args: argparse.Namespace) -> turns.Step:
    """In a rank; the first losses are those of one process."""
    alone = loop(decoder(args.width), batch_size=BATCH, steps=STEPS, num_data=1, data_rank=0)
    hand = by_hand(args.width, args.micro, args.schedule)
    for _ in range(3):
        assert abs(alone() - hand()) < 1e-4, "by hand it is another training"
    return hand


# -- the bubble --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Equal(Job):
    """Sixteen equal layers, so that both stages have the same to do."""

    width: int = 1024
    batch_size: int = 512
    steps: int = STEPS

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(16)))

    def data(self) -> TensorDataset:
        points = torch.randn(2048, self.width, generator=torch.Generator().manual_seed(0))
        return TensorDataset(points, points)

    def loss(self, output: Tensor, batch: Any) -> Sum:
        return mean_loss((output - batch[1]).square().mean(1))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)


def watched(run: Run, num_steps: int) -> list[list[Span]]:
    """The spans of all ranks, step by step."""
    spans: list[Span] = []
    for stage in placement_of(run.model).pipeline.stages:
        watch(stage, run.world.rank, spans)
    found = []
    steps = run.steps()
    for _ in range(num_steps):
        spans.clear()
        next(steps)()
        everywhere: list[Any] = [None] * run.world.size
        dist.all_gather_object(everywhere, spans)
        found.append([span for own in everywhere for span in own])
    return found


def watch(stage: Any, rank: int, spans: list[Span]) -> None:
    def timed(call: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        def run(chunk: int, *args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()  # Linux: one clock for all processes
            output = call(chunk, *args, **kwargs)
            spans.append(Span(rank, stage.stage_index, kind, chunk, began_s, time.perf_counter()))
            return output

        return run

    stage.forward_one_chunk = timed(stage.forward_one_chunk, "F")
    stage.backward_one_chunk = timed(stage.backward_one_chunk, "B")


def show_bubble(layout: Layout, what: str, steps: list[list[Span]]) -> dict[str, list[Span]]:
    """A row; returns the quietest step, predicted and measured."""
    quiet = min(steps, key=lambda spans: max(s.end_s for s in spans) - min(s.start_s for s in spans))

    def cost(kind: Kind, stage: int) -> float:
        return statistics.median(s.end_s - s.start_s for s in quiet if (s.kind, s.stage) == (kind, stage))

    predicted = timetable(layout, cost)
    shares = sorted(bubble(spans, layout.pp) for spans in steps)
    formula = (layout.pp - 1) / (layout.micro + layout.pp - 1)
    print(
        f"| {what}, {layout} | {statistics.median(shares):.3f} | {bubble(quiet, layout.pp):.3f} "
        f"| {bubble(predicted, layout.pp):.3f} | {formula:.3f} |",
        flush=True,
    )
    return {f"{what}, {layout}, predicted": predicted, f"{what}, {layout}, measured": quiet}


# -- ranks and their parent --------------------------------------------------------------------------------


def bubbles(args: argparse.Namespace, layout: Layout) -> dict[str, list[list[Span]]]:
    """Of each model, the spans of all ranks, step by step."""
    jobs = {"gpt": GPT(width=args.width, batch_size=BATCH, steps=STEPS), "equal stages": Equal()}
    with tempfile.TemporaryDirectory() as folder:

        def rank(place: Place) -> None:
            with World.open(layout, place=place) as world:
                found = {}
                for what, job in jobs.items():
                    steps = watched(assemble(job, world, quiet=True), args.warm_up + args.rounds)[args.warm_up :]
                    found[what] = [[asdict(span) for span in step] for step in steps]
                if world.rank == 0:
                    (Path(folder) / "spans.json").write_text(json.dumps(found))

        if start(rank, 2, threads=1, show="none").exit_code:
            sys.exit("no bubble was measured")
        found: dict[str, Any] = json.loads((Path(folder) / "spans.json").read_text())
    return {what: [[Span(**span) for span in step] for step in steps] for what, steps in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    layout = Layout(pp=2, micro=args.micro, schedule=args.schedule)
    arms = {
        "shoal": turns.by_shoal(GPT(width=args.width, batch_size=BATCH, steps=STEPS), str(layout), 2),
        "by hand": turns.by_hand(functools.partial(made, args), 2),
    }
    times = turns.compare(arms, rounds=args.rounds, warm_up=args.warm_up)
    turns.show_header()
    turns.show_arm(str(layout), times, "shoal", against="by hand")
    print(
        "\n| bubble | median step | quietest step | timetable with its times | (p-1)/(m+p-1) |\n|---|---|---|---|---|"
    )
    panels: dict[str, list[Span]] = {}
    for what, steps in bubbles(args, layout).items():
        panels |= show_bubble(layout, what, steps)
    if args.picture:
        args.picture.write_text(draw(panels))


if __name__ == "__main__":
    main()
