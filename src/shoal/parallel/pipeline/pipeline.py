"""A model over the axis pp: surveyed, cut into stages, run by a schedule."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import JobError, LayoutError, ShoalError
from shoal.parallel.blocks import listed
from shoal.parallel.mode import evaluating
from shoal.parallel.parts import Part
from shoal.parallel.pipeline.atoms import find_atoms, split_as_told
from shoal.parallel.pipeline.holding import Guard, check, emptied, named_tensors, names_below, put
from shoal.parallel.pipeline.program import Cut, Program, balance, holders
from shoal.parallel.pipeline.proof import Proof
from shoal.parallel.pipeline.reduce import LateReduction
from shoal.parallel.pipeline.schedule import Schedule, schedule_name, stages_of
from shoal.parallel.pipeline.skeleton import Skeleton
from shoal.parallel.pipeline.stage import Chunk, Plan, Stage
from shoal.parallel.pipeline.streams import ByHand, Seed, Streams, no_seed
from shoal.parallel.pipeline.values import mapped
from shoal.parallel.pipeline.walk import Finished, StageWalk, View, returned
from shoal.parallel.swap import become
from shoal.units import show_count
from shoal.world import World

if TYPE_CHECKING:
    from shoal.parallel.shard import Shards

Sample = tuple[tuple[Any, ...], dict[str, Any]]
Costs = Callable[[Sequence[str]], Mapping[str, float]]  # the work of these modules in one forward
_KEY = "_shoal_pipeline"


class Pipeline:
    """A model whose modules are spread over stages. Every rank keeps the model, and of its tensors those of its stages.

    Args:
        sample: what the model may be called with.
        stated: the modules of each stage, where the job or the model says them.
        costs: the work of modules; by their parameters, where it is left out.
        is_trial: of a copy, which only trains, and of which nothing is to be proved.

    Attributes:
        stages: of this rank.
        owner: the stage of every atom.
        shares: of every stage, its share of the work, 0 to 1.
        proof: what was proved of it, for a person.
        view: where its atoms find the walk that goes on.

    Raises:
        LayoutError: the model cannot be cut into so many stages; says why.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        sample: Sample,
        *,
        stated: Sequence[Sequence[str]] = (),
        costs: Costs | None = None,
        is_trial: bool = False,
    ) -> None:
        if stated and len(stated) != world.layout.num_stages:
            raise LayoutError(
                f"{world.layout} has {world.layout.num_stages} stages, and stages() names {len(stated)}. Change one."
            )
        check(model)
        self._world, self._model, self._stated = world, model, stated
        self._num_stages = world.layout.num_stages
        self.atoms = find_atoms(model, self._num_stages, stated)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # in evaluation; such tensors have no shape that could be told
        self.view = View()
        self._skeleton = Skeleton(model, world, self.atoms, self.view)
        self._plans: dict[Any, Plan] = {}
        self._seed: Seed = no_seed
        self._by_hand = ByHand(world.data_rank, world.device)
        self._sample_call, self._is_trial = sample, is_trial
        _, self._sample = self._skeleton.program(*sample)
        if self._sample.moves_state and world.layout.num_stages > world.layout.pp:
            raise LayoutError(
                f"{world.layout}: the model's own forward changes attributes of the model (a counter), and a rank with "
                "several stages runs it once for each. Take a schedule with one stage per rank, 1f1b or gpipe."
            )
        self._work = self._measured(costs)
        self.owner: dict[str, int] = {}
        self.shares: list[float] = []
        self.proof = ""
        self._proof = None if is_trial else Proof(model, sample, world)
        self.stages: list[Stage] = []
        self.shards: Shards | None = None

    # -- placement -----------------------------------------------------------------------------------------

    def cut(self, parts: Mapping[str, Part], glued: Sequence[Sequence[str]] = ()) -> dict[str, Part]:
        """Choose the stages, and drop what is of other ranks; returns what this rank holds of each tensor.

        Args:
            parts: what it held of each before.
            glued: layers between which no cut may be: those that tensor parallelism has cut together.
        """
        work = self._work
        self.owner = self._owners(work, glued)
        total = sum(work.values()) or 1.0
        self.shares = [sum(c for a, c in work.items() if self.owner[a] == s) / total for s in range(self._num_stages)]
        self._sample_cut = Cut.of(self._sample, self.owner, self._num_stages)
        held = self._drop(parts)
        self.view.put_on(self._model, self.atoms)
        self._model.__dict__[_KEY] = self
        become(self._model, _Root)
        pp, rank = self._world.layout.pp, self._world.mesh.coordinate(self._world.rank, "pp")
        ours = stages_of(self._world.layout, rank)
        self.stages = [
            Stage(
                index,
                self._num_stages,
                device=self._world.device,
                group=self._group,
                run=self._run,
                params=functools.partial(self._params_of, index),
            )
            for index in ours
        ]
        self._schedule = Schedule(self._world.layout, self.stages)
        self._last_rank = next(r for r in range(pp) if self._num_stages - 1 in stages_of(self._world.layout, r))
        self.reduction = LateReduction(self._model, self._world, self._holders_of_param)
        if self._proof is not None:
            self.proof, self._proof = self._proof.check(self.owner), None
            self._world.at_close(self.close)
        return held

    def close(self) -> None:
        """The world is gone, or this was a trial."""
        self.stages.clear()
        self.reduction.close()

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._world.axis_group("pp")
        assert group is not None, "an axis that is cut has a group"
        return group

    def __str__(self) -> str:
        """Stage by stage: its modules, parameters, and share of the work."""
        layout = self._world.layout
        lines = [f"pipeline  {self._num_stages} stages, {schedule_name(layout)}, {layout.micro} micro-batches"]
        for stage in range(self._num_stages):
            atoms = [atom for atom in self._sample.atoms if self.owner[atom] == stage]
            params = {id(p): p.numel() for a in atoms for p in self._skeleton.model.get_submodule(a).parameters()}
            where = next(rank for rank in range(layout.pp) if stage in stages_of(layout, rank))
            lines.append(
                f"stage {stage:<3} on pp rank {where}: {listed(atoms)}; {show_count(sum(params.values()))} "
                f"parameters, {self.shares[stage]:.0%} of the work"
            )
        return "\n".join([*lines, f"proof     {self.proof}"] if self.proof else lines)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        raise JobError(
            "a model in a pipeline cannot be copied: each rank holds its stages alone. Copy it before it is placed; "
            "or, for an average of the weights, keep `{name: param.detach().clone()}` of the parameters, and lerp_ "
            "them."
        )

    def _measured(self, costs: Costs | None) -> dict[str, float]:
        called = self._sample.atoms
        numel = {a: float(sum(p.numel() for p in self._skeleton.model.get_submodule(a).parameters())) for a in called}
        if costs is None:
            return numel
        flops = costs(called)
        return {atom: flops[atom] + numel[atom] for atom in called}  # each weight is read, and updated, once a step

    def _owners(self, work: Mapping[str, float], glued: Sequence[Sequence[str]]) -> dict[str, int]:
        called = self._sample.atoms
        together = [[a for a in called if any(f"{layer}.".startswith(f"{a}.") for layer in ls)] for ls in glued]
        pairs = [(inside[0], inside[-1]) for inside in together if len(inside) > 1]
        if self._stated:
            owner = {name: stage for stage, names in enumerate(self._stated) for name in names}
        elif self._world.layout.split:
            owner = split_as_told(self._skeleton.model, self._sample.atoms, self._world.layout)
        else:
            owner = balance(self._sample, work, self._num_stages, [*pairs, *self._sample.writers()])
        stage = 0
        for atom in self.atoms:  # one that the sample did not call: where its neighbour is
            stage = owner.setdefault(atom, stage)
        return owner

    def _drop(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """Leave of each tensor that is of other ranks only its number of dims."""
        layout = self._world.layout
        rank = self._world.mesh.coordinate(self._world.rank, "pp")
        rank_of = {stage: r for r in range(layout.pp) for stage in stages_of(layout, r)}
        self._contents = contents = {atom: names_below(self._skeleton.model, atom) for atom in self.atoms}
        self._holders = found = self._all_holders()
        for atom, stage in self.owner.items():
            for name in contents[atom]:
                found.setdefault(name, set()).add(stage)
        named: dict[int, tuple[Tensor, list[str]]] = {}
        for name, tensor in named_tensors(self._model):
            named.setdefault(id(tensor), (tensor, []))[1].append(name)
        shapes = dict(self._skeleton.model.named_parameters(remove_duplicate=False))
        self._stages_of_param: dict[str, set[int]] = {}
        self._holders_of_param: dict[str, list[int]] = {}
        self._shapes: dict[int, Tensor] = {}
        held = dict(parts)
        for tensor, names in named.values():
            stages = set().union(*(found.get(name, set()) for name in names))
            if not isinstance(tensor, nn.Parameter) and (not stages or names[0] not in parts):
                continue  # outside of all atoms, or a table that is not saved: every rank computes with it
            ranks = sorted({rank_of[stage] for stage in stages} or {0})
            if isinstance(tensor, nn.Parameter) and not tensor.dim():
                ranks = list(range(layout.pp))  # it cannot be empty: all hold it, and have its whole gradient
            if isinstance(tensor, nn.Parameter):
                self._holders_of_param[names[0]], self._stages_of_param[names[0]] = ranks, stages
            own = tensor if rank in ranks else emptied(tensor, names[0], parts[names[0]].shape)
            for name in names:
                put(self._model, name, own)
                if name in parts:
                    part = replace(parts[name], axes=(*parts[name].axes, "pp"))
                    if rank not in ranks:
                        part = replace(part, boxes=())
                    held[name] = replace(part, is_copy=rank in ranks[1:])
            if own is not tensor and isinstance(own, nn.Parameter):
                self._shapes[id(own)] = shapes[names[0]]
        return held

    def _all_holders(self) -> dict[str, set[int]]:
        """By name of a tensor its stages: of the sample in training, and as the model runs in evaluation."""
        found = holders(self._sample, self._sample_cut, self._contents)
        if self._is_trial or self._skeleton.is_dry:
            return found
        with evaluating(self._model), torch.no_grad():
            self._skeleton.follow()
            _, program = self._skeleton.program(*self._sample_call)
            cut = Cut.of(program, self.owner, self._num_stages)
            for name, stages in holders(program, cut, self._contents).items():
                found.setdefault(name, set()).update(stages)
        self._skeleton.follow()
        return found

    def _check_holders(self, program: Program, cut: Cut) -> None:
        """A forward of other shapes, or in another mode, uses nothing in a stage that does not have it."""
        for name, stages in holders(program, cut, self._contents).items():
            if beyond := stages - self._holders.get(name, set(range(self._num_stages))):
                raise JobError(
                    f"the model's own forward uses {name} in stage {min(beyond)} for inputs of this shape, and did not "
                    "for shoal's sample of two, by which the pipeline was cut. Use it always, or inside of a module."
                )

    def _params_of(self, stage: int) -> list[nn.Parameter]:
        named = dict(self._model.named_parameters())
        return [named[name] for name, stages in self._stages_of_param.items() if stage in stages and name in named]

    # -- steps ---------------------------------------------------------------------------------------------

    def _plan(self, args: Any, kwargs: Any) -> Plan:
        key, program = self._skeleton.program(args, kwargs)
        if key not in self._plans:
            cut = Cut.of(program, self.owner, self._num_stages)
            self._check_holders(program, cut)
            self._plans[key] = Plan(program, cut)
        return self._plans[key]

    def spans(self) -> list[tuple[int, str, int, float, float]]:
        """What this rank did in the last step: stage, kind of action, micro-batch, begin and end (of time.time)."""
        return [(stage.stage_index, *span) for stage in self.stages for span in stage.spans]

    def settle(self) -> None:
        """After the last backward of a step: add up over stages and data ranks."""
        self.reduction.settle()

    def run(
        self,
        calls: Sequence[Sample],
        on_output: Callable[[Any, int], Any],
        *,
        has_backward: bool,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        seed: Seed = no_seed,
    ) -> None:
        """All micro-batches through all stages; collective.

        Args:
            calls: what the model is called with, micro-batch by micro-batch.
            on_output: called in the last stage alone, with the model's output and the number of the micro-batch; gives
                the loss to go backward from.
            around: put around every forward (autocast).
            seed: seeds the random stream of a micro-batch.
        """
        self._around, self._seed = around, seed
        chunks = self.prepare(calls, has_backward=has_backward, around=around)

        def guarded(output: Any, number: int) -> Any:
            with Guard():
                return on_output(output, number)

        with self._gathered(has_backward):
            self._schedule.run(chunks, guarded, has_backward=has_backward)

    def prepare(
        self,
        calls: Sequence[Sample],
        *,
        has_backward: bool,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> list[Chunk]:
        """What the forwards of these micro-batches do, surveyed where it is new; see `run`."""
        self._skeleton.follow()
        with around(), torch.enable_grad() if has_backward else torch.no_grad():
            return [Chunk(self._plan(*call), *call, number) for number, call in enumerate(calls)]

    def _gathered(self, has_backward: bool) -> contextlib.AbstractContextManager[None]:
        """Shards are gathered once for all micro-batches; gradients stay here until the step is settled."""
        if self.shards is None:
            return contextlib.nullcontext()
        if not has_backward:
            return self.shards.whole()
        self.shards.hold()
        return contextlib.nullcontext()

    def _run(self, stage: int, chunk: Chunk, inputs: list[Tensor]) -> Any:
        received = dict(zip(chunk.plan.cut.enters[stage], inputs, strict=True))
        streams = Streams(self._seed, chunk.number, stage, self._world.device)
        walk = StageWalk(
            chunk.plan.program,
            chunk.plan.cut,
            stage,
            received,
            self._shapes,
            streams.common,
            chunk.plan.likenesses.setdefault(stage, {}),
            is_dry=self._skeleton.is_dry,
        )
        if chunk.plan.cut.last[stage] < 0 and stage < self._num_stages - 1:
            return walk.leaves()  # nothing of it runs for this micro-batch; it passes on
        try:
            with self._around(), self.view.walking(walk):
                # Containers of its own: a forward may take things out of a dict that it is given.
                args, kwargs = mapped(lambda tensor: tensor, (chunk.args, chunk.kwargs))
                output = self._model(*args, **kwargs)
        except Finished:
            return walk.leaves()
        except ShoalError:
            raise
        except Exception as error:
            if not self._is_trial:
                raise
            raise LayoutError(  # a proof, on what has run as a whole
                f"{self._world.layout}: in stage {stage} the model's own forward fails, which ran as a whole "
                f"({type(error).__name__}: {error}). Something of it reaches around what a pipeline sees: a hook or an "
                "object that collects what modules make. Let the modules return it, or take a layout without pp."
            ) from error
        return output if stage == self._num_stages - 1 else walk.leaves()

    def forward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The model's own forward: as a walk sees it, or, without one, over all stages."""
        walk = self.view.walk
        if walk is None:
            return self._whole(args, kwargs)
        assert isinstance(walk, StageWalk)
        with walk:
            output = returned(call(*args, **kwargs))
        return walk.end(output)

    def _whole(self, args: Any, kwargs: Any) -> Any:
        """The output on every rank; collective. Without gradient."""
        if torch.is_grad_enabled() and any(param.requires_grad for param in self._model.parameters()):
            raise JobError(
                "in a pipeline no rank can run the model forward and backward by itself. Let `run.steps()` do it; to "
                "look at outputs, call the model under torch.no_grad(), on all ranks."
            )
        found: list[Any] = []
        with self._by_hand.next() as seed:
            self.run([(args, kwargs)], lambda output, number: found.append(output), has_backward=False, seed=seed)
        result = found[0] if found else self._plan(args, kwargs).program.result
        source = dist.get_global_rank(self._group, self._last_rank)
        return mapped(lambda tensor: self._shared(tensor, source), result)

    def _shared(self, tensor: Tensor, source: int) -> Tensor:
        if self._world.rank == source:
            own = tensor.detach().contiguous()
        else:
            own = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._world.device)
        if own.numel():
            dist.broadcast(own.view(-1).view(torch.uint8), source, group=self._group)
        return own


class _Root:
    """The model itself, in a pipeline."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_KEY].forward(super().forward, args, kwargs)  # type: ignore[misc]  # of the user's class
