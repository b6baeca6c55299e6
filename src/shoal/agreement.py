"""What every rank must have in common, checked: the start, and the state after the first step."""

import copy
import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.digest import digest
from shoal.dry import has_numbers, numbers
from shoal.errors import JobError, NumericsError, WorldError
from shoal.layout import Layout
from shoal.parallel.clip import dense
from shoal.parallel.parts import local_of, parts_of
from shoal.parallel.place import placement_of
from shoal.world import World

# An update below this share of the largest weight may round to nothing; above it, it must show.
_VISIBLE = 1e-5
_ROW_BYTES = 64 << 10  # a tensor that is smaller is hashed whole


def fingerprints(model: nn.Module, *, leave_out: Iterable[str] = ()) -> dict[str, str]:
    """The `fingerprint` of each parameter and buffer, by name, without the modules in `leave_out`."""
    outside = tuple(f"{name}." for name in leave_out)
    named = [
        *model.named_parameters(),
        *((n, b) for n, b in model.named_buffers() if not n.startswith(outside)),
    ]
    return {name: fingerprint(local_of(tensor)) for name, tensor in named}


def fingerprint(tensor: Tensor) -> str:
    """A fingerprint of dtype, shape and bits, made where the tensor lies, at the speed of memory.

    Words of 64 bits, as a matrix, are added by rows and by columns; these sums are hashed. One word that differs
    changes two of them; for a difference to hide, four words at the corners of a rectangle must differ by the same
    amount, up and down in turn. SHA-256 of all bytes takes five times as long, and every save would stand for it.
    """
    tensor = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.storage_offset():
        flat = flat.clone()  # words are aligned
    raw = flat.view(torch.uint8)
    whole = raw.numel() // _ROW_BYTES * _ROW_BYTES
    rows = raw[:whole].view(torch.int64).view(-1, _ROW_BYTES // 8)
    return digest([str(tensor.dtype), str(tuple(tensor.shape)), rows.sum(0), rows.sum(1), raw[whole:]])


def check_same_model(model: nn.Module, world: World) -> None:
    """Every rank built the same model: names, order, shapes, dtypes, what is trainable, and every weight.

    Raises:
        JobError: naming the first parameter or buffer that differs. torch pairs them by position: two that were
            registered in another order would swap their values in silence.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    facts = [f"{n} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for n, t in named]
    prints = [digest(t) if has_numbers(t) else "" for _, t in named]  # on meta, drawn from (seed, name) later
    rows = world.gather_text(hashlib.sha256(json.dumps([facts, prints]).encode()).hexdigest())
    if len(set(rows)) == 1:
        return
    tables = [json.loads(row) for row in world.gather_text(json.dumps([facts, prints]))]
    for rank, (their_facts, their_prints) in enumerate(tables):
        for index, fact in enumerate(tables[0][0]):
            theirs = their_facts[index] if index < len(their_facts) else "nothing"
            if theirs != fact:
                raise JobError(
                    f"the ranks built different models: entry {index} is {fact!r} on rank 0 and {theirs!r} on rank "
                    f"{rank}. Job.model() must build the same on every rank: no set order, no rank inside it."
                )
            if their_prints[index] != tables[0][1][index]:
                raise JobError(
                    f"{fact.split()[0]} starts with other values on rank {rank} than on rank 0. Job.model() must "
                    "draw from torch's global generator (shoal seeds it with the job's seed), not from time, rank "
                    "or a generator of its own."
                )
    raise JobError(f"the ranks built models of different length: {[len(table[0]) for table in tables]} entries.")


def check_replicas(model: nn.Module, world: World, step: int) -> None:
    """Ranks that hold the same part of a tensor hold it equal bit for bit, parameters and buffers.

    Raises:
        WorldError: naming what differs, and on which ranks. Nothing was saved from here.
    """
    if world.size == 1:
        return
    prints = fingerprints(model, leave_out=placement_of(model).local_norms)
    parts = parts_of(model)
    axes = {name: parts[name].axes if name in parts else () for name in prints}
    digests = {
        repr(cut): hashlib.sha256(json.dumps([prints[n] for n in prints if axes[n] == cut]).encode()).hexdigest()
        for cut in set(axes.values())
    }
    rows = [json.loads(row) for row in world.gather_text(json.dumps(digests))]
    if all(not _odd_ranks([row[repr(cut)] for row in rows], cut, world) for cut in set(axes.values())):
        return
    tables = [json.loads(row) for row in world.gather_text(json.dumps(prints))]
    for name in prints:
        ranks = _odd_ranks([table.get(name) for table in tables], axes[name], world)
        if ranks:
            is_buffer = name in dict(model.named_buffers())
            why = (
                "a buffer that depends on a rank's own samples is another training than on one device: compute it "
                "from the global batch, keep it out of the forward, or make it non-persistent state of the loss"
                if is_buffer
                else "something changed it on some ranks alone, outside of the optimizer step"
            )
            first = world.mesh.group(ranks[0], [axis for axis, _ in world.mesh.axes if axis not in axes[name]])[0]
            raise WorldError(f"after step {step} {name} differs between rank {first} and ranks {ranks}: {why}.")


def _odd_ranks(values: list[str | None], cut: tuple[str, ...], world: World) -> list[int]:
    """The ranks whose value is not that of the first rank that holds the same part."""
    same = [axis for axis, _ in world.mesh.axes if axis not in cut]
    return [rank for rank, value in enumerate(values) if value != values[world.mesh.group(rank, same)[0]]]


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The optimizer holds live parameters of the model; returns the names of trainable ones that it leaves out.

    Raises:
        JobError: it holds a tensor that is no parameter of the placed model, so the model would never learn.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"Job.optimizer() returned {type(optimizer).__name__}; it must be a torch.optim.Optimizer.")
    live = {id(param): name for name, param in model.named_parameters()}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(held):
        if id(param) not in live:
            raise JobError(
                f"the optimizer's tensor {index} of shape {tuple(param.shape)} is no parameter of the model: it was "
                "replaced after the optimizer took it, and would train nothing. Build the optimizer in "
                "Job.optimizer(params), from `params`."
            )
    ids = {id(param) for param in held}
    return [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in ids]


@numbers()  # in a dry run too
def check_fits_parts(optimizer: torch.optim.Optimizer, layout: Layout, *, cuts_matrices: bool) -> None:
    """An optimizer on ranks that each have a part does what it does with all in one place: tried on small matrices.

    Args:
        cuts_matrices: a rank has a part of a matrix, as a tensor of its own (tp).

    Raises:
        JobError: it mixes what lies on different ranks, or keeps state that checkpoints cannot cut.
    """
    draw = torch.Generator().manual_seed(0)
    matrix, other, *grads = (torch.randn(8, 6, dtype=torch.float64, generator=draw) for _ in range(5))
    for group in optimizer.param_groups:
        trial = functools.partial(_stepped, optimizer, group)
        whole, state = trial([matrix], [[grad] for grad in grads])
        for dim in (0, 1) if cuts_matrices else ():
            halves = [
                trial([half], [[grad.chunk(2, dim)[at]] for grad in grads])[0][0]
                for at, half in enumerate(matrix.chunk(2, dim))
            ]
            if not _is_close(torch.cat(halves, dim), whole[0]):
                raise JobError(
                    f"{type(optimizer).__name__} does not update each element by itself: on the halves of a matrix it "
                    f"does something else than on the whole one, and in {layout} a rank has only its part. Take an "
                    "optimizer that goes by element (SGD, Adam, AdamW, ...), or a layout without tp."
                )
        if layout.pp > 1 and not _is_close(_beside(trial, [matrix, other], grads), whole[0]):
            raise JobError(
                f"{type(optimizer).__name__} does not update each parameter by itself: beside others, of which one "
                f"has no elements, it does something else than alone, and in {layout} a rank has only the parameters "
                "of its stages. Take an optimizer that goes by parameter (SGD, Adam, AdamW, ...), or a layout without "
                "pp."
            )
        odd = [key for key, value in state.items() if isinstance(value, Tensor) and value.shape not in ((), (8, 6))]
        if odd and (cuts_matrices or layout.pp * layout.fsdp > 1):
            raise JobError(
                f"{type(optimizer).__name__} keeps state of another shape than its parameter ({', '.join(odd)}), and "
                f"in {layout} a rank has only a part of that: checkpoints could not put it together. Take an "
                "optimizer whose state has the parameter's shape (SGD, Adam, AdamW, ...), or a layout that keeps "
                "parameters whole (dpN)."
            )


_Trial = Callable[[list[Tensor], list[list[Tensor]]], tuple[list[Tensor], dict[str, Any]]]


def _beside(trial: _Trial, values: list[Tensor], grads: Sequence[Tensor]) -> Tensor | None:
    """The first of these parameters, stepped beside the others and one of another stage, which has no elements here."""
    absent = values[0][:0]
    try:
        return trial([*values, absent], [[grad, *(-grad for _ in values[1:]), absent] for grad in grads])[0][0]
    except (ArithmeticError, RuntimeError):  # a mean over nothing
        return None


def _is_close(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def _stepped(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], values: list[Tensor], grads: list[list[Tensor]]
) -> tuple[list[Tensor], dict[str, Any]]:
    """What a twin of the optimizer, with the values of this group, makes of parameters, and the state of the first."""
    twin = copy.copy(optimizer)
    params = [nn.Parameter(value.clone()) for value in values]
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": params}]
    for each in grads:
        for param, grad in zip(params, each, strict=True):
            param.grad = grad.clone()
        twin.step()
    return [param.detach() for param in params], twin.state[params[0]]


def check_first_step(
    before: Mapping[str, str], model: nn.Module, optimizer: torch.optim.Optimizer, lrs: Mapping[int, float]
) -> list[str]:
    """After step one: what got a gradient has moved; returns the names of trainable parameters that got none.

    Args:
        lrs: the learning rate that step one used, by the id of the parameter.

    Raises:
        JobError: the forward replaced a parameter that the optimizer holds.
        NumericsError: a parameter whose update must show (by its gradient and the learning rate) kept every bit.
    """
    check_optimizer(optimizer, model)
    without = []
    for name, param in model.named_parameters():
        if param.grad is None:
            without += [name] if param.requires_grad else []
        elif _must_move(param, lrs.get(id(param), 0.0)) and fingerprint(local_of(param)) == before[name]:
            raise NumericsError(
                f"{name} has a gradient but step 1 (lr {lrs[id(param)]:g}) did not change a single bit of it. The "
                "optimizer does not update the parameter that the model uses."
            )
    return without


def _must_move(param: nn.Parameter, lr: float) -> bool:
    """Whether even the smallest usual update, lr x gradient, is large beside the weights.

    A bias before a BatchNorm has a gradient of rounding noise; a warm-up may start at next to nothing.
    """
    assert param.grad is not None
    grad = dense(param.grad)
    if not grad.numel():
        return False
    return lr * min(1.0, float(grad.abs().max())) > _VISIBLE * float(local_of(param.detach()).abs().max())
