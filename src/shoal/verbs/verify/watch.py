"""Looks at a model and its optimizer while they train, and changes nothing: outputs, gradients, state, weights.

Every tensor that is cut over ranks is put together again, so that it can stand beside that of one process.
Collective, wherever it gathers: every rank of the world is there.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shoal.parallel.parts import Part, local_of, parts_of
from shoal.parallel.place import placement_of
from shoal.verbs.verify.stages import Holders, Piece, Streams, Turns
from shoal.world import World


@dataclass
class Seen:
    """One look: tensors by `kind/name`, and what else there is to say."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Watch:
    """Hooks on a model and on its optimizers; `close` takes them off again."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        world: World | None = None,
        outputs: int = 0,
        streams: bool = False,
    ) -> None:
        self._model, self._optimizers, self._world = model, optimizers, world
        self._parts = parts_of(model)
        self._holders = Holders(self._parts, world)
        self._grads: dict[str, Tensor | None] = {}  # as the optimizer was given them, on this rank
        self._without: list[str] = []
        self._seen = Seen()
        self._handles: list[RemovableHandle] = [o.register_step_pre_hook(self._before_update) for o in optimizers]
        self._turns = Turns(model, world)
        self._outputs = _Outputs(model, _split(model, world), self._turns) if outputs else None
        thread = threading.get_ident()
        self._streams = Streams(model, self._turns, lambda: _in_training(model, thread)) if streams else None
        self._handles += self._streams.handles if self._streams is not None else []
        self._steps_with_outputs = outputs

    def start(self) -> Seen:
        """The weights as they are, and who this rank is."""
        seen = Seen(facts=self._identity())
        seen.tensors = self._holders.gather(dict(self._weights()))
        return seen

    def step(self, clip: float | None = None) -> Seen:
        """What was seen since the last call, with the optimizer's state and the weights as they are now.

        Args:
            clip: what this rank multiplied its gradients with, to be taken back before they are put together.
        """
        seen, self._seen = self._seen, Seen()
        if self._streams is not None:
            seen.facts |= self._streams.facts
            self._streams.facts.clear()
        gradients = dict(self._gradients(clip or 1.0))
        seen.facts["without"] = self._without
        self._grads, self._without = {}, []
        seen.tensors |= self._holders.gather({**gradients, **self._state(), **dict(self._weights())})
        if self._outputs is not None:
            self._outputs.hand_over(seen)
            self._steps_with_outputs -= 1
            if not self._steps_with_outputs:
                self._outputs.close()
                self._outputs = None
        self._turns.end_step()
        return seen

    def close(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        if self._outputs is not None:
            self._outputs.close()
        self._turns.close()

    def _identity(self) -> dict[str, Any]:
        mesh = None if self._world is None else self._world.mesh
        facts: dict[str, Any] = {
            "parts": {name: list(part.axes) for name, part in self._parts.items() if not part.is_whole},
            "modules": {n: type(m).__name__ for n, m in self._model.named_modules() if _has_forward(m)},
            "parameters": [name for name, _ in self._model.named_parameters()],
            "weights": list(self._model.state_dict(keep_vars=True)),
        }
        if self._world is not None and mesh is not None:
            facts |= {"sizes": {axis: n for axis, n in mesh.axes if n > 1}, "layout": str(self._world.layout)}
            facts |= {"coordinates": mesh.coordinates(self._world.rank), "data_rank": self._world.data_rank}
        if self._turns.is_pipeline:
            facts |= {"stages": dict(self._turns.owner), "holders": self._holders.shared}
        return facts

    def _weights(self) -> Iterator[tuple[str, Piece]]:
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                yield f"weights/{name}", self._piece(tensor, name)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        names = {id(param): name for name, param in self._model.named_parameters()}
        for param in (p for group in optimizer.param_groups for p in group["params"] if id(p) in names):
            name = names[id(param)]
            self._grads[name] = None if param.grad is None else _dense(param.grad).clone()
        facts = self._seen.facts
        facts["lr"] = [*facts.get("lr", []), *(float(group["lr"]) for group in optimizer.param_groups)]

    def _gradients(self, clip: float) -> Iterator[tuple[str, Piece]]:
        """Of parameters that have one; of one that ranks share, some rank's suffices."""
        self._without = [name for name, grad in self._grads.items() if grad is None]
        if self._world is not None and self._world.kind == "real":
            rows = [set(json.loads(row)) for row in self._world.gather_text(json.dumps(self._without))]
            spread = (name for name in self._without if self._holders.is_spread(name))
            held = {name for name in spread if not all(name in row for row in rows)}
            self._without = [name for name in self._without if name not in held]
        for name, grad in self._grads.items():
            if name not in self._without:
                local = torch.zeros_like(local_of(self._model.get_parameter(name))) if grad is None else grad
                piece = self._piece(local / clip, name)
                is_there = grad is not None
                yield f"gradients/{name}", self._holders.owned(piece.local, name, is_there=is_there)

    def _state(self) -> dict[str, Piece]:
        names = {id(param): name for name, param in self._model.named_parameters()}
        states = {
            names[id(param)]: {
                key: local_of(_dense(value)) for key, value in state.items() if isinstance(value, Tensor)
            }
            for optimizer in self._optimizers
            for param, state in optimizer.state.items()
            if id(param) in names
        }
        return {f"state/{entry}": piece for entry, piece in self._holders.pieces_of_state(states).items()}

    def _piece(self, tensor: Tensor, name: str) -> Piece:
        dense = _dense(tensor)
        if isinstance(dense, DTensor) and self._parts[name].is_whole:  # cut by a loop of one's own
            return self._holders.piece(dense.full_tensor(), name)
        return self._holders.piece(local_of(dense), name)


def _split(model: nn.Module, world: World | None) -> Mapping[str, Part]:
    """What tensor parallelism cut: that alone shows in outputs, since shards are whole again when they are used."""
    split = None if world is None else placement_of(model).split
    return {} if split is None else split.parts


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward  # lists of modules are never called


def _in_training(model: nn.Module, thread: int) -> bool:
    """In a forward that will be followed by a backward, not in one that a backward computes again.

    Replicas in threads have the hooks of their master; what it does itself it does in the thread of the caller.
    """
    is_here = threading.get_ident() == thread
    return is_here and model.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


class _Outputs:
    """Outputs of modules, call by call, in the order in which the calls end: the inner before the outer."""

    def __init__(self, model: nn.Module, parts: Mapping[str, Part], turns: Turns) -> None:
        self._model, self._parts, self._turns = model, parts, turns
        self._thread = threading.get_ident()
        self._seen = _nothing()
        self._kept: dict[Any, tuple[Tensor, str]] = {}  # outputs that are handed upward are stored once
        self._calls: dict[tuple[str, str], int] = {}
        self._under_way: list[tuple[str, str]] = []  # name and number of each call, the outermost first
        self._random = torch.default_generator.get_state()
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._begin)]
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter(name)),
                module.register_forward_hook(self._note(name)),
            ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def hand_over(self, seen: Seen) -> None:
        """Move what was seen into a look."""
        seen.tensors |= self._seen.tensors
        seen.facts |= self._seen.facts
        self._seen = _nothing()
        self._kept.clear()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if _in_training(self._model, self._thread):
            self._turns.begin()
            self._calls, self._under_way = {}, []
            self._random = torch.default_generator.get_state()

    def _enter(self, name: str) -> Any:
        """Calls of a module are counted within the call that they are made in.

        A stage does not see what the modules of other stages call, so that a count over the forward would be another.
        """

        def hook(module: nn.Module, args: Any) -> None:
            if not self._is_on():
                return
            outer, number = self._under_way[-1] if self._under_way else ("", "")
            place = (f"{outer}/{number}/" if outer else "", name)
            count = self._calls[place] = self._calls.get(place, -1) + 1
            self._under_way.append((name, f"{place[0]}{count}"))
            if name not in self._seen.facts["begun"]:
                self._seen.facts["begun"].append(name)

        return hook

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            call = self._ended(name) if self._is_on() else None
            if call is None:
                return
            with torch._C.DisableTorchFunction():  # a pipeline must not take it for a part of the forward
                for index, leaf in enumerate(tree_leaves(output)):
                    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not _is_elsewhere(leaf):
                        key = f"outputs/{name}@{call}.{index}@{self._turns.micro}"
                        self._keep(key, local_of(leaf), self._spans(name, module, args, local_of(leaf)))
            if not self._turns.is_pipeline:  # there each stage has a stream of its own
                self._look_for_chance(name)

        return hook

    def _ended(self, name: str) -> str | None:
        """The number of the call that ends, and off with those inside, which an exception has ended."""
        for index in reversed(range(len(self._under_way))):
            if self._under_way[index][0] == name:
                _, number = self._under_way[index]
                del self._under_way[index:]
                return number
        return None

    def _is_on(self) -> bool:
        return self._turns.micro >= 0 and _in_training(self._model, self._thread)

    def _keep(self, key: str, output: Tensor, spans: list[list[int]]) -> None:
        self._seen.facts["calls"].append(key)
        memory = _memory(output)
        if output.numel() and memory in self._kept:
            self._seen.facts["same"][key] = first = self._kept[memory][1]
            spans = spans or self._seen.facts["spans"].get(first, [])
        else:
            # The original is kept alive too, so that no other output takes its address.
            self._kept[memory] = (output, key)
            self._seen.tensors[key] = output.detach().clone()
        if spans:
            self._seen.facts["spans"][key] = spans

    def _spans(self, name: str, module: nn.Module, args: Any, output: Tensor) -> list[list[int]]:
        """Of a split layer; and of a function without parameters (an activation) that follows one."""
        prefix = f"{name}." if name else ""
        spans = _spans(output, module, self._parts.get(f"{prefix}weight"), self._parts.get(f"{prefix}bias"))
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if (
            spans
            or first is None
            or _is_elsewhere(first)
            or first.shape != output.shape
            or any(True for _ in module.parameters())
        ):
            return spans
        source = self._kept.get(_memory(first))
        return [] if source is None else self._seen.facts["spans"].get(source[1], [])

    def _look_for_chance(self, name: str) -> None:
        now = torch.default_generator.get_state()
        if not torch.equal(now, self._random):
            self._random = now
            if name not in self._seen.facts["draws"]:
                self._seen.facts["draws"].append(name)


def _is_elsewhere(tensor: Tensor) -> bool:
    """In another stage of a pipeline: here it is a shape."""
    return hasattr(tensor, "fake_mode")


def _memory(tensor: Tensor) -> Any:
    """What tells two tensors apart while both live.

    A wrapper has no memory of its own: split logits would be gathered to answer, and the address of what was gathered
    differs by rank, so that one rank would gather a second time while the other does not.
    """
    place = tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else id(tensor)
    return place, tensor._version, tensor.shape, tensor.stride(), tensor.dtype


def _nothing() -> Seen:
    return Seen(facts={"calls": [], "same": {}, "spans": {}, "draws": [], "begun": []})


def _spans(output: Tensor, module: nn.Module, weight: Part | None, bias: Part | None) -> list[list[int]]:
    """Where the features of a split layer lie in those of the whole: [dim, in this rank's, in the whole, number].

    A bias tells; without one the weight does, by its rows (a table's width is its columns).
    """
    part, side = (bias, 0) if bias is not None else (weight, 1 if isinstance(module, nn.Embedding) else 0)
    if part is None or part.is_whole or len(part.shape) <= side:
        return []
    channels = isinstance(module, nn.modules.conv._ConvNd | nn.modules.batchnorm._NormBase)
    dim = 1 if channels else output.dim() - 1
    local, whole = part.local_shape[side], part.shape[side]
    if local == whole or not 0 <= dim < output.dim() or output.shape[dim] != local:
        return []
    return [list(row) for row in sorted({(dim, b.local[side], b.whole[side], b.size[side]) for b in part.boxes})]
