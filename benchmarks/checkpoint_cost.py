"""What a checkpoint costs a training loop, against `torch.save` of the same state.

    python benchmarks/checkpoint_cost.py            # 30 M parameters with Adam, 355 MiB a save
    python benchmarks/checkpoint_cost.py --million-params 5 --rounds 3

Three loops take turns, round by round: without saves, with `torch.save` (which syncs nothing to the disk and checks
nothing), with shoal's writer. Both keep the newest two files. `tail` is what the writer's thread still had to do when
the loop had ended. Medians over the rounds.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from shoal.checkpoint import Writer


def model_of(million_params):
    """Blocks of Linear layers: a few hundred tensors, like a small transformer."""
    width = 512
    layers = max(1, round(million_params * 1e6 / (width * width + width)))
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


class Loop:
    def __init__(self, million_params, batch):
        self.model = model_of(million_params)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(batch, 512)
        self.step()

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def run(self, steps, every, save):
        """Seconds the loop stood still for saves, seconds of the whole loop, seconds after it."""
        blocked_s, started = 0.0, time.perf_counter()
        for step in range(1, steps + 1):
            self.step()
            if save is not None and step % every == 0:
                before = time.perf_counter()
                save(step)
                blocked_s += time.perf_counter() - before
        return blocked_s, time.perf_counter() - started, 0.0


def measure(args, folder):
    loop = Loop(args.million_params, args.batch)
    counter = itertools.count()
    rows = {"no save": [], "torch.save": [], "shoal": []}
    with Writer(folder / "shoal", keep=2) as writer:

        def with_torch(step):
            number = next(counter)
            torch.save(loop.state(), folder / f"{number}.pt")
            (folder / f"{number - 2}.pt").unlink(missing_ok=True)

        def with_shoal(step):
            offset = 1000 * len(rows["shoal"])
            writer.submit(loop.state(), step=offset + step, job={}, layout="lone")

        for number in range(args.rounds + 1):
            rows["no save"].append(loop.run(args.steps, args.every, None))
            rows["torch.save"].append(loop.run(args.steps, args.every, with_torch))
            blocked_s, total_s, _ = loop.run(args.steps, args.every, with_shoal)
            before = time.perf_counter()
            writer.wait()
            rows["shoal"].append((blocked_s, total_s, time.perf_counter() - before))
            if number == 0:  # warm-up: files, pages, caches
                rows = {name: [] for name in rows}
        saved = writer.saved[-1]
    return rows, saved


def report(args, rows, saved):
    num_saves = args.steps // args.every
    medians = {name: [statistics.median(column) for column in zip(*pairs, strict=True)] for name, pairs in rows.items()}
    plain_s = medians["no save"][1]
    result = {"state_bytes": saved.num_bytes, "saves_per_loop": num_saves, "threads": torch.get_num_threads()}
    print(f"{saved.num_bytes / 2**20:.0f} MiB a save, {num_saves} saves in {args.steps} steps, {args.rounds} rounds")
    print(f"{'loop':12} {'stood still, s/save':>20} {'loop, s':>9} {'added, s/save':>14} {'tail, s':>8}")
    for name, (blocked_s, loop_s, tail_s) in medians.items():
        blocked_s, added_s = blocked_s / num_saves, (loop_s - plain_s) / num_saves
        result[name] = {"blocked_s": blocked_s, "loop_s": loop_s, "added_s": added_s, "tail_s": tail_s}
        print(f"{name:12} {blocked_s:20.3f} {loop_s:9.2f} {added_s:14.3f} {tail_s:8.2f}")
    for key in ("blocked_s", "added_s"):
        result[f"ratio_{key}"] = result["shoal"][key] / result["torch.save"][key]
    print(f"shoal / torch.save: stood still {result['ratio_blocked_s']:.2f}, added {result['ratio_added_s']:.2f}")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million-params", type=float, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = report(args, *measure(args, Path(folder)))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
