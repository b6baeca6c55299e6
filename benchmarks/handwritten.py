"""The script that a careful person writes by hand: DDP around the same model, data, batch, clipping and optimizer.

Run it under torchrun, or alone for one process. Prints one JSON line from rank 0. The other scripts take its parts.
"""

import argparse
import json
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from shoal.data import StdlibText
from shoal.models.gpt import Decoder

CONTEXT = 128


def decoder(width: int) -> Decoder:
    """The same weights on every rank and in every arm."""
    torch.manual_seed(0)
    return Decoder(width=width, depth=4, heads=4, context=CONTEXT, tied=True, dropout=0.0)


def replicated(model: nn.Module) -> nn.Module:
    """Data parallel where there are several ranks."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.is_initialized() else model


def clip_all(params: list[nn.Parameter]) -> None:
    """By the norm of all gradients."""
    torch.nn.utils.clip_grad_norm_(params, 1.0)


def loop(
    model: nn.Module,
    *,
    batch_size: int,
    steps: int,
    num_data: int,
    data_rank: int,
    clip: Callable[[list[nn.Parameter]], None] = clip_all,
) -> Callable[[], float]:
    """One optimizer step of a model that is already spread; a call returns the loss of the global batch.

    Args:
        num_data: the ranks that share the batch.
        data_rank: this one's place among them.
    """
    params = list(model.parameters())
    kinds: dict[
        tuple[bool, type], list[nn.Parameter]
    ] = {}  # by type too: the fused kernel takes no DTensor with others
    for param in params:
        kinds.setdefault((param.dim() > 1, type(param)), []).append(param)
    groups = [{"params": held, "weight_decay": 0.1 if is_matrix else 0.0} for (is_matrix, _), held in kinds.items()]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), fused=True)
    warm_up = max(1, min(steps // 10, 100))  # the schedule of the job, step by step
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warm_up, total_iters=warm_up)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - warm_up), eta_min=2e-4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warm_up])
    data = StdlibText(CONTEXT)
    sampler = DistributedSampler(data, num_data, data_rank, shuffle=True, seed=0)
    loader = iter(DataLoader(data, batch_size=batch_size // num_data, sampler=sampler))

    def step() -> float:
        tokens, targets = next(loader)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        clip(params)
        optimizer.step()
        scheduler.step()
        shown = loss.detach()
        if num_data > 1:
            dist.all_reduce(shown)  # the loss of the global batch, as a log needs it
        return float(shown) / num_data

    return step


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
    model = replicated(decoder(args.width))
    step = loop(model, batch_size=args.batch_size, steps=args.steps, num_data=size, data_rank=rank)
    times = []
    for number in range(args.steps):
        began = time.perf_counter()
        loss = step()
        if number == 0:
            first_step_at = time.time()
        if number >= args.warm_up:
            times.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps({"first_step_at": first_step_at, "step_times_s": times, "loss": loss}))
    if size > 1:
        del model, step  # torch 2.13: a DDP model that is freed after its group may hang at the end
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
