"""What a look at a model must know of a pipeline: which forward runs, who holds what, and what each stage draws."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.data.digest import digest
from shoal.parallel.parts import Part, paste
from shoal.parallel.pipeline.walk import StageWalk
from shoal.parallel.place import placement_of
from shoal.world import World

Forward = Callable[..., Any]


class Turns:
    """Which forward is under way.

    Without a pipeline every forward of the model is that of the next micro-batch. The stages of a pipeline call it in
    the order of a schedule, and say themselves which one it is.

    Attributes:
        micro: of the step, from 0; -1 before its first.
        stage: 0 without a pipeline.
    """

    def __init__(self, model: nn.Module, world: World | None) -> None:
        pipeline = None if world is None else placement_of(model).pipeline
        self.owner: Mapping[str, int] = {} if pipeline is None else pipeline.owner
        self._stages = [] if pipeline is None else list(pipeline.stages)
        self._view = None if pipeline is None else pipeline.view
        self.micro, self.stage = -1, 0
        for stage in self._stages:
            stage.forward_one_chunk = self._told(stage.stage_index, stage.forward_one_chunk)  # type: ignore[method-assign]

    def _told(self, stage: int, forward: Forward) -> Forward:
        def told(chunk: int, *args: Any, **options: Any) -> Any:
            self.micro, self.stage = chunk, stage
            return forward(chunk, *args, **options)

        return told

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is spread over stages."""
        return bool(self._stages)

    def common(self) -> contextlib.AbstractContextManager[None]:
        """Within a forward: the random stream that all stages share is the generator's."""
        walk = None if self._view is None else self._view.walk
        return walk.common() if isinstance(walk, StageWalk) else contextlib.nullcontext()

    @property
    def atoms(self) -> list[str]:
        """The modules that the stages of this rank run whole."""
        ours = {stage.stage_index for stage in self._stages}
        return [name for name, stage in self.owner.items() if stage in ours]

    def begin(self) -> None:
        """A forward of the model in training begins."""
        if not self._stages:
            self.micro += 1

    def end_step(self) -> None:
        """The step is over."""
        self.micro = -1

    def close(self) -> None:
        """Let go of the stages."""
        for stage in self._stages:
            del stage.forward_one_chunk
        self._stages = []


class Streams:
    """The random streams of a step, as digests.

    `facts["random"]`: that of the first forward. In a pipeline `facts["streams"]`, by micro-batch and stage: `1/0` what
    the modules of stage 0 begin with in micro-batch 1, `1/` what lies between the modules, which all stages compute.
    """

    def __init__(self, model: nn.Module, turns: Turns, is_on: Callable[[], bool]) -> None:
        self._turns, self._is_on = turns, is_on
        self.facts: dict[str, Any] = {}
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._note_shared if turns.is_pipeline else self._note_first),
            *(model.get_submodule(atom).register_forward_pre_hook(self._note_own) for atom in turns.atoms),
        ]

    def _note_first(self, *_: Any) -> None:
        if self._is_on():
            self.facts.setdefault("random", _state())

    def _note_shared(self, *_: Any) -> None:
        with self._turns.common():
            self._note(f"{self._turns.micro}/")

    def _note_own(self, *_: Any) -> None:
        self._note(f"{self._turns.micro}/{self._turns.stage}")

    def _note(self, key: str) -> None:
        streams = self.facts.setdefault("streams", {})
        if key not in streams and self._is_on():
            streams[key] = _state()


def _state() -> str:
    return digest(torch.default_generator.get_state())


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What this rank holds of a tensor.

    Attributes:
        holders: the coordinates on pp of those that hold all that can be held there, where they are more than one.
    """

    local: Tensor
    part: Part
    holders: Sequence[int] = ()


class Holders:
    """Puts tensors that are cut over ranks together; of one that several stages hold, the version of each.

    Collective, all of it.

    Attributes:
        shared: the coordinates on pp of those that hold a tensor, where they are more than one.
    """

    def __init__(self, parts: Mapping[str, Part], world: World | None) -> None:
        self._parts, self._world = parts, world
        self._own = 0 if world is None else world.mesh.coordinate(world.rank, "pp")
        self._owners = ("dp",) if world is not None and world.layout.zero == 1 else ()
        self._of: dict[str, list[int]] = {}
        for rank, row in enumerate(self._told([name for name, part in parts.items() if part.boxes])):
            at = 0 if world is None else world.mesh.coordinate(rank, "pp")
            for name in row:
                if at not in (known := self._of.setdefault(name, [])):
                    known.append(at)
        self.shared = {n: at for n, at in self._of.items() if len(at) > 1 and "pp" in parts[n].axes}

    def _told(self, what: Any) -> list[Any]:
        """What every rank says, in rank order."""
        return [what] if self._world is None else [json.loads(row) for row in self._world.gather_text(json.dumps(what))]

    def is_spread(self, name: str) -> bool:
        """Whether ranks hold different parts of a parameter, or of what belongs to it."""
        return not self._parts[name].is_whole or bool(self._owners)

    def piece(self, local: Tensor, name: str) -> Piece:
        """This rank's, of a tensor that is cut as this parameter or buffer."""
        return Piece(local=local, part=self._parts[name], holders=self.shared.get(name, ()))

    def owned(self, local: Tensor, name: str, *, is_there: bool) -> Piece:
        """Of a gradient or a state, which with zero=1 one data rank alone has.

        Args:
            is_there: this rank has it; else `local` is of its shape.
        """
        part, piece = self._parts[name], self.piece(local, name)
        boxes = part.boxes if is_there else ()
        return replace(piece, part=replace(part, axes=(*part.axes, *self._owners), boxes=boxes))

    def pieces_of_state(self, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Piece]:
        """Of an optimizer's state, by `parameter/key`: what has the shape of the parameter is cut as that is.

        All else (counts of steps, factors) is as the first rank that holds the parameter has it.
        """
        own = {
            f"{name}/{key}": [_has_shape_of(value, self._parts[name]), list(value.shape), _name(value.dtype)]
            for name, state in states.items()
            for key, value in state.items()
            if self._parts[name].boxes
        }
        told: dict[str, Any] = {}
        for row in self._told(own):
            told = row | told  # of several ranks, the first
        pieces: dict[str, Piece] = {}
        for entry, (is_shaped, shape, dtype) in told.items():
            name, _, key = entry.rpartition("/")
            part, value = self._parts[name], states.get(name, {}).get(key)
            if value is None and not self.is_spread(name):
                continue
            is_there = value is not None and (_has_shape_of(value, part) or not is_shaped)
            if value is None or not is_there:
                value = torch.zeros(part.local_shape if is_shaped else shape, dtype=getattr(torch, dtype))
            make = self.owned if is_shaped else self._as_held
            pieces[entry] = make(value, name, is_there=is_there)
        return pieces

    def _as_held(self, value: Tensor, name: str, *, is_there: bool) -> Piece:
        part, holders = Part.whole(value.shape), self._of[name] if "pp" in self._parts[name].axes else []
        axes = (*(("pp",) if holders else ()), *self._owners)
        is_there = is_there and (not holders or self._own in holders)
        return Piece(local=value, part=replace(part, axes=axes, boxes=part.boxes if is_there else ()), holders=holders)

    def gather(self, pieces: Mapping[str, Piece]) -> dict[str, Tensor]:
        """The whole tensors, bit for bit: each as this rank holds it, or as the first that does.

        One sum over ranks for all that is cut alike: of one part and zeros, and of bytes, since -0.0 + 0.0 is 0.0.
        """
        whole = {key: piece.local.clone() for key, piece in pieces.items() if piece.part.is_whole}
        cut: dict[tuple[str, ...], dict[str, list[Tensor]]] = {}
        for key, piece in pieces.items():
            if not piece.part.is_whole:
                cut.setdefault(piece.part.axes, {})[key] = self._versions(piece)
        for axes, versions in cut.items():
            self._sum([version for each in versions.values() for version in each], axes)
            for key, each in versions.items():
                whole[key] = each[self._own_version(pieces[key])]
        return {key: whole[key] for key in pieces}

    def _versions(self, piece: Piece) -> list[Tensor]:
        """One for each holder, empty of what this rank does not add to it."""
        versions = []
        for holder in piece.holders or (None,):
            version = torch.zeros(piece.part.shape, dtype=piece.local.dtype, device=piece.local.device)
            if holder in (None, self._own) and piece.part.boxes:
                paste(version, piece.local, piece.part)
            versions.append(version)
        return versions

    def _own_version(self, piece: Piece) -> int:
        return list(piece.holders).index(self._own) if self._own in piece.holders else 0

    def _sum(self, tensors: Sequence[Tensor], axes: tuple[str, ...]) -> None:
        if self._world is None or self._world.kind != "real":
            return
        raw = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        for start in range(0, len(raw), _AT_ONCE):
            some = raw[start : start + _AT_ONCE]
            flat = torch.cat(some)
            dist.all_reduce(flat, group=self._world.axis_group(*axes))
            torch._foreach_copy_(some, list(torch.split(flat, [len(each) for each in some])))


_AT_ONCE = 64  # tensors in one message


def _has_shape_of(value: Tensor, part: Part) -> bool:
    return tuple(value.shape) == part.local_shape


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
