"""assemble(job, world) -> Run: everything between a job and its first step, once, for every verb."""

import contextlib
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from shoal.agreement import check_fits_parts, check_optimizer, check_same_model
from shoal.checkpoint.pack import pack
from shoal.data import Shared, share
from shoal.data.digest import digest
from shoal.dry import convert, is_dry, numbers
from shoal.errors import DataError, JobError
from shoal.evaluate import evaluate, num_parts
from shoal.folder import RunFolder
from shoal.job import Job, Params, Scheduler, check_job, identity
from shoal.metrics.flops import count_flops
from shoal.metrics.ledger import Ledger
from shoal.metrics.recorder import Recorder
from shoal.parallel.mode import without_trace
from shoal.parallel.place import place, placement_of
from shoal.parallel.recipe import Recipes
from shoal.parallel.replicate import check_replicable
from shoal.parallel.tensor import Sample
from shoal.parallel.zero import OwnedStates
from shoal.run.enter import enter_folder, take_weights
from shoal.run.run import Run
from shoal.step import Step, call_of, on_device, seed_everything, use_fused
from shoal.units import show_bytes
from shoal.world import World


def assemble(
    job: Job,
    world: World,
    *,
    folder: Path | str | None = None,
    resume: Literal["auto", "never"] | Path | str = "never",
    save_every: int | None = None,
    log_every: int | None = None,
    keep: int = 3,
    tensorboard: bool = False,
    quiet: bool = False,
    weights: Path | str | None = None,
    memory_copies: int | None = None,
    apart: Mapping[str, Any] | None = None,
) -> Run:
    """Everything between a job and its first step, in the one right order; collective.

    Args:
        folder: the run's folder (checkpoints, metrics, logs); none is written without it.
        resume: `auto` takes the newest good checkpoint of the folder; a path, that of another run.
        save_every: steps between checkpoints, besides the one at the end.
        log_every: steps between logged ones; 1 in short runs.
        keep: checkpoints to keep.
        tensorboard: write TensorBoard's files too.
        quiet: show nothing.
        weights: to start from: a .safetensors or .pt file, a folder of them, or a run.
        memory_copies: steps between copies in shared memory, where the launcher keeps any; 0: as often as they cost
            less than a twentieth of the time; None: none.
        apart: fields that hosts have values of their own for, with what stands for them where jobs are compared.

    Raises:
        ShoalError: whatever cannot obey the law, before the first step.
    """
    check_job(job)
    world.layout.require_available()
    world.agree(_must_be_equal(job, world, apart or {}))
    recipes = Recipes() if job.init == "by-name" else None
    model = _build_model(job, world, recipes)
    with numbers():
        data = _build_data(job, world)
    _check_evaluation(model, data.held_out, world)
    flops_scale = _place(job, world, model, data.train, recipes)
    taken = take_weights(Path(weights), model, world) if weights is not None else ""
    optimizer, scheduler = _build_optimizer(job, model, world)
    run_folder = RunFolder(Path(folder)) if folder is not None else None
    owned = OwnedStates(optimizer, world) if world.layout.zero == 1 else None
    run = Run(
        job=job,
        world=world,
        model=model,
        optimizer=optimizer,
        data=data.train,
        evaluation=data.held_out,
        ledger=Ledger.of(
            job, world, data.train, lr=float(optimizer.param_groups[0]["lr"]), tokens_per_sample=data.tokens
        ),
        recorder=Recorder(
            job,
            world,
            folder=None if run_folder is None else run_folder.path,
            log_every=log_every,
            tokens=data.tokens,
            tensorboard=tensorboard,
            quiet=quiet,
            flops_scale=flops_scale,
        ),
        folder=run_folder,
        save_every=save_every,
        _owned=owned,
        _apart=apart or {},
        _engine=Step(job, model, world, optimizer=optimizer, scheduler=scheduler, usual_count=data.tokens or 1),
    )
    if not is_dry():
        _try_out(run, data.rehearsal)
    _say_what_is_odd(run, data.note, taken)
    if (path := enter_folder(run, resume, keep)) is not None:
        run._resume(path)
    run.recorder.start(run.step)
    run._begin(memory_copies)
    return run


def _try_out(run: Run, rehearsal: Shared | None) -> None:
    """What would fail after hours of training fails now: the metrics, on two samples per rank, and the first save."""
    if rehearsal is not None:
        evaluate(run.job, run.model, rehearsal, run.world, num_steps=1)
        check_optimizer(run.optimizer, run.model)  # a forward may have put new parameters in the places of old ones
    pack(run._state())


def _must_be_equal(job: Job, world: World, apart: Mapping[str, Any]) -> dict[str, Any]:
    told = {**identity(job), **apart}
    return {"job": told, "steps": job.steps, "layout": str(world.layout), "torch": torch.__version__}


def _place(job: Job, world: World, model: nn.Module, data: Shared, recipes: Recipes | None) -> float:
    """Spread the model; returns what FLOPs counted on a rank are to be multiplied with.

    Ranks count what they compute: those of pp their stages, those of tp their part and what each of them computes.
    """
    looks = world.layout.pp > 1 or (world.mesh.sizes["tp"] > 1 and recipes is None)
    sample = _sample_call(job, world, data) if looks else None
    counts_flops = recipes is None and not is_dry()
    whole_flops = _forward_flops(model, sample) if counts_flops else 1.0
    place(
        model,
        world,
        batch_norm=job.batch_norm,
        plan=job.tensor_plan(),
        sample=sample,
        value=None if recipes is None else lambda name: recipes.value(name, functools.partial(_seed_for, job)),
        stages=_stages(job, model),
        costs=functools.partial(_flops_of, model, sample) if recipes is None else None,
    )
    if sample is None or not counts_flops:
        return 1.0
    counted = math.fsum(row[0] for row in world.gather_floats([_forward_flops(model, sample)]))
    return whole_flops * world.num_data / counted


def _stages(job: Job, model: nn.Module) -> list[list[str]]:
    """The modules of each pipeline stage, where the job or the model states them."""
    own = getattr(model, "stages", None)  # a convention of shoal's; in many models a list of modules
    told = job.stages(model) or (own() if callable(own) and not isinstance(own, nn.Module) else ())
    return [list(names) for names in told]


def _flops_of(model: nn.Module, sample: Sample | None, names: Sequence[str]) -> dict[str, float]:
    """The FLOPs of each of these modules in a forward of the sample."""
    found: dict[str, float] = dict.fromkeys(names, 0.0)
    begun: dict[str, int] = {}
    assert sample is not None, "place has refused a pipeline without a sample"
    with without_trace(model), torch.no_grad(), count_flops() as count, contextlib.ExitStack() as hooks:

        def begin(name: str, *_: Any) -> None:
            begun[name] = count.model

        def end(name: str, *_: Any) -> None:
            found[name] += count.model - begun[name]

        for name in names:
            module = model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(functools.partial(begin, name)).remove)
            hooks.callback(module.register_forward_hook(functools.partial(end, name)).remove)
        model(*sample[0], **sample[1])
    return found


def _say_what_is_odd(run: Run, note: str, taken: str) -> None:
    for text in filter(None, (note, taken)):
        run.say(text)
    placement, mesh = placement_of(run.model), run.world.mesh
    split, pipeline = placement.split, placement.pipeline
    if split is not None:
        run.say(str(split))
    for line in str(pipeline).splitlines() if pipeline is not None else ():
        run.say(line)
    if split is not None and mesh.crosses_nodes("tp"):
        run.say(
            f"warning: tp{mesh.sizes['tp']} crosses nodes: {show_bytes(split.bytes_per_sample)} per sample and step go "
            "over the network, and every layer waits for them. Keep tp within a node."
        )
    _warn_of_lonely_samples(run)
    left_out = check_optimizer(run.optimizer, run.model)
    if left_out:
        run.say(f"not in the optimizer, so never updated: {', '.join(left_out[:5])}")


def _build_model(job: Job, world: World, recipes: Recipes | None) -> nn.Module:
    """The model as one process would build it: the same seed, then the same draws, on every rank.

    With `recipes` its parameters are on `meta`, and what would have been done to them is written down.
    """
    seed_everything(job.seed)
    torch.manual_seed(job.seed)
    with recipes.writing() if recipes is not None else contextlib.nullcontext():
        model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(f"{type(job).__name__}.model() returned {type(model).__name__}, not a torch.nn.Module.")
    check_replicable(model)
    if recipes is not None:
        recipes.know(model)
    if not model.training:
        model.train()  # as a whole in evaluation mode, as loaded weights often are; a part that is, is meant so
    convert(model, lambda tensor: tensor if tensor.device.type == "meta" else tensor.to(world.device))
    if job.precision == "fp64":
        convert(model, _widen)
    check_same_model(model, world)
    return model


def _seed_for(job: Job, name: str) -> None:
    seed_everything(job.seed, "init", name)


def _widen(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@dataclass(frozen=True, kw_only=True)
class _Data:
    """What a run reads: its data, the held-out data, a few of those to rehearse with, and what was seen of them."""

    train: Shared
    held_out: Shared | None
    rehearsal: Shared | None
    tokens: int | None  # per sample
    note: str


def _build_data(job: Job, world: World) -> _Data:
    seed_everything(job.seed, "data")
    options: dict[str, Any] = {
        "batch_size": job.batch_size,
        "seed": job.seed,
        "collate": _collate(job),
        "num_workers": world.layout.workers,
    }
    dataset = job.data()
    data = share(dataset, world, micro=world.layout.num_parts, **options)
    # Seeded alike: a random_split in data() and in evaluation() draws the same two parts.
    seed_everything(job.seed, "data")
    held_out = job.evaluation()
    once = options | {"shuffle": False, "epochs": 1}
    evaluation = None if held_out is None else share(held_out, world, micro=num_parts(world.layout), **once)
    rehearsal = None
    if held_out is not None and not isinstance(held_out, IterableDataset):  # a stream might be used up
        few = once | {"batch_size": 2 * world.num_data, "num_workers": 0}
        rehearsal = share(held_out, world, **few)
    tokens, samples, note = _look_at_samples(job, world, dataset, data)
    # A data set that a rank has cut, split or drawn by itself would be cut a second time.
    world.agree(
        {
            "the length of the data": data.num_samples,
            "the data": data.fingerprint(),
            "the first, middle and last sample of the data": samples,
            "the length of the evaluation data": evaluation and evaluation.num_samples,
        }
    )
    return _Data(train=data, held_out=evaluation, rehearsal=rehearsal, tokens=tokens, note=note)


def _check_evaluation(model: nn.Module, evaluation: Shared | None, world: World) -> None:
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    without = [name for name, norm in norms.items() if norm.running_mean is None]
    if without and evaluation is not None and world.num_data * evaluation.micro > 1:
        raise JobError(
            f"{without[0]} keeps no running statistics (track_running_stats=False), so evaluation normalises each "
            "batch by itself, and its result would depend on into how many parts the layout cuts it "
            f"({world.num_data * evaluation.micro}). Keep running statistics, or leave Job.evaluation() out."
        )


def _collate(job: Job) -> Any:
    # torch's own draws nothing, so that nothing need be seeded for it.
    return None if type(job).collate is Job.collate else job.collate


def _look_at_samples(job: Job, world: World, dataset: Any, data: Shared) -> tuple[int | None, str, str]:
    """Tokens per sample (None: the input is no row of token ids), a fingerprint of three samples, and a warning."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not data.num_samples:
        return None, "", ""  # a stream: reading from it might use it up
    sample = _read(job, dataset, 0)
    note = "" if digest(sample) == digest(_read(job, dataset, 0)) else _OWN_GENERATOR
    if note and (world.num_data > 1 or world.layout.workers):
        raise DataError(note)
    middle, last = (_read(job, dataset, index) for index in (data.num_samples // 2, data.num_samples - 1))
    row = sample[0] if isinstance(sample, tuple | list) and sample else sample
    is_tokens = isinstance(row, Tensor) and row.dim() == 1 and row.dtype in (torch.int32, torch.int64)
    return (row.numel() if is_tokens else None), "" if note else digest([sample, middle, last]), note


def _sample_call(job: Job, world: World, data: Shared) -> Sample | None:
    """What the model is called with for two samples of the data, the same on every rank; None for a stream."""
    dataset = data.dataset
    if isinstance(dataset, IterableDataset) or not data.num_samples:
        return None
    batch = job.collate([_read(job, dataset, index % data.num_samples) for index in range(2)])
    return call_of(job, on_device(batch, job, world))


def _forward_flops(model: nn.Module, sample: Sample | None) -> float:
    """FLOPs of a forward of the sample; 1 without any."""
    if sample is None:
        return 1.0
    with without_trace(model), torch.no_grad(), count_flops() as count:
        model(*sample[0], **sample[1])
    return float(max(count.model, 1))


def _read(job: Job, dataset: Any, index: int) -> Any:
    seed_everything(job.seed, "sample", index)
    return dataset[index]


_OWN_GENERATOR = (
    "dataset[0] holds other values when it is read a second time under the same seeds: it draws from a generator of "
    "its own, so what it gives depends on the ranks, the workers and a resume. Let it draw from torch, numpy.random "
    "or random: shoal seeds those for each sample."
)


def _build_optimizer(job: Job, model: nn.Module, world: World) -> tuple[torch.optim.Optimizer, Scheduler | None]:
    seed_everything(job.seed, "optimizer")
    params = Params(dict(model.named_parameters()))
    if not any(param.requires_grad for param in params):
        raise JobError(f"{type(job).__name__}.model() has no trainable parameter: nothing would be trained.")
    optimizer = job.optimizer(params)
    check_optimizer(optimizer, model)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise JobError(
            f"{type(optimizer).__name__} wants to compute the loss several times in one step (a closure), and a step "
            "here computes it once. Take another optimizer, or write the loop yourself (docs/jobs.md)."
        )
    is_split = placement_of(model).split is not None
    if is_split or world.layout.pp * world.layout.fsdp > 1:
        check_fits_parts(optimizer, world.layout, cuts_matrices=is_split)
    use_fused(optimizer)
    scheduler = job.scheduler(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise JobError(
            "ReduceLROnPlateau waits for a figure, and a step has none that the job could choose. Take a schedule by "
            "step, or write the loop yourself (docs/jobs.md) and feed it `run.evaluate()['loss']`, which is the same "
            "on every rank."
        )
    return optimizer, scheduler


def _warn_of_lonely_samples(run: Run) -> None:
    """BatchNorm needs two values per channel; a last batch of one sample may not have them."""
    norms, num_samples = placement_of(run.model).global_norms, run.data.num_samples
    if norms and num_samples and num_samples % run.job.batch_size == 1:
        run.say(
            f"the last batch of every epoch has 1 sample ({num_samples} samples in batches of {run.job.batch_size}); "
            f"{norms[0]} cannot normalise it unless it sees several positions. Another batch_size avoids it."
        )
