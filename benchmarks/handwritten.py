"""The script that a careful person writes by hand: DDP around the same model, data, batch, clipping and optimizer.

Run it under torchrun, or alone for one process. Prints one JSON line from rank 0.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from shoal.data import StdlibText
from shoal.models.gpt import Decoder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Decoder(width=args.width, depth=4, heads=4, context=128, tied=True, dropout=0.0)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), fused=True)
    warm_up = max(1, min(args.steps // 10, 100))  # the schedule of the job, step by step
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warm_up, total_iters=warm_up)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, args.steps - warm_up), eta_min=2e-4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warm_up])
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if size > 1 else model
    data = StdlibText(128)
    sampler = DistributedSampler(data, size, rank, shuffle=True, seed=0)
    loader = iter(DataLoader(data, batch_size=args.batch_size // size, sampler=sampler))
    times = []
    for step in range(args.steps):
        began = time.perf_counter()
        tokens, targets = next(loader)
        optimizer.zero_grad(set_to_none=True)
        logits = wrapped(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        shown = loss.detach()
        if size > 1:
            dist.all_reduce(shown)  # the loss of the global batch, as a log needs it
        float(shown)
        if step == 0:
            first_step_at = time.time()
        if step >= args.warm_up:
            times.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps({"first_step_at": first_step_at, "step_times_s": times, "loss": float(shown) / size}))
    if size > 1:
        del wrapped, loss, logits  # torch 2.13: a DDP model that is freed after its group may hang at the end
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
