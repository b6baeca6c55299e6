"""One checkpoint from many processes: any layout reads what any other wrote; what fails is told on all ranks."""

import itertools
import os
import random
import shutil
import signal
import time

import pytest
import torch
from ranks import RankError, run_processes
from safetensors.torch import save_file
from torch import nn

from shoal.checkpoint import Writer, list_checkpoints, load_weights, newest_good, read, read_manifest, verify
from shoal.checkpoint.pack import Shard
from shoal.checkpoint.state import capture, reading_plan, restore
from shoal.errors import CheckpointError
from shoal.layout import Layout
from shoal.parallel.parts import Part, cut, keep_parts, local_of, parts_of
from shoal.parallel.shard import Shards
from shoal.world import Place, World

LAYOUTS = ["lone", "dp2", "fsdp3", "tp2", "dp2.fsdp2", "fsdp2.tp2"]
FACTS = {"job": {}, "layout": "any"}


class Tied(nn.Module):
    """Tied weights, a fused projection, buffers, a frozen parameter, sizes that divide by nothing."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 5)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.out.bias.requires_grad_(False)


SPLIT = {  # how tp cuts: dim, and the spans of each of two ranks
    "embed.weight": (0, [[(0, 4)], [(4, 7)]]),
    "head.weight": (0, [[(0, 4)], [(4, 7)]]),
    "qkv.weight": (0, [[(0, 2), (4, 6), (8, 10)], [(2, 4), (6, 8), (10, 12)]]),
    "qkv.bias": (0, [[(0, 2), (4, 6), (8, 10)], [(2, 4), (6, 8), (10, 12)]]),
    "out.weight": (1, [[(0, 3)], [(3, 4)]]),
}


def names(folder):
    """What lies there, besides the number of the start that may write."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".generation"))


def source(seed):
    """A whole model and its optimizer, in which no two numbers are the same."""
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=False)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def placed(seed, world):
    """The same, spread over a world: cut by tp, then into the shards of fsdp."""
    model, optimizer = source(seed)
    named = dict(model.named_parameters())
    whole_state = {name: optimizer.state[param] for name, param in named.items() if param in optimizer.state}
    parts = {name: Part.whole(tensor.shape) for name, tensor in model.state_dict().items()}
    if world.mesh.sizes["tp"] > 1:
        for name, (dim, spans) in SPLIT.items():
            parts[name] = parts[name].take(dim, spans[world.mesh.coordinate(world.rank, "tp")], "tp")
        for name, param in named.items():
            param.data = cut(param.data, parts[name]).clone()
    if world.mesh.sizes["fsdp"] > 1:
        for name, rows in Shards(model, world).rows.items():
            parts[name] = parts[name].take(0, [rows], "fsdp")
    keep_parts(model, parts)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=False)
    for name, param in model.named_parameters():
        if name in whole_state:
            optimizer.state[param] = {key: held(value, param, parts[name]) for key, value in whole_state[name].items()}
    return model, optimizer


def held(value, param, part):
    if value.dim() == 0:
        return value.clone()
    moment = torch.zeros_like(param)  # a DTensor, where the parameter is one
    local_of(moment.detach()).copy_(cut(value, part))
    return moment.detach()


def bits_of(model, optimizer):
    """All that a rank holds, as bytes."""

    def flat(tree):
        if isinstance(tree, Shard):
            return flat(tree.local)
        if isinstance(tree, dict):
            return {key: flat(value) for key, value in tree.items()}
        return tree.contiguous().numpy().tobytes() if isinstance(tree, torch.Tensor) else tree

    return flat(capture(model, optimizer, None, None))


def in_world(layout, function):
    """Run function(world) on every rank of a layout."""

    def rank(rank, size, rendezvous):
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=rendezvous, source="shoal")
        with World.open(layout, place=place) as world:
            return function(world)

    return run_processes(rank, Layout.parse(layout).num_ranks)


def save_once(folder, seed, step=1):
    def save(world):
        model, optimizer = placed(seed, world)
        with Writer(folder, world=world) as writer:
            writer.submit(capture(model, optimizer, None, None), step=step, **FACTS)
            assert writer.wait()
        assert [saved.step for saved in writer.saved] == [step]
        assert writer.events == []

    return save


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of one state under each layout."""
    folders = {layout: tmp_path_factory.mktemp("saved") for layout in LAYOUTS}
    for layout, folder in folders.items():
        in_world(layout, save_once(folder, seed=0))
    return folders


def test_the_whole_is_the_same_whatever_layout_saved_it(saved):
    model, optimizer = source(0)
    for layout, folder in saved.items():
        assert names(folder) == [".lock", "step_000001"]
        assert verify(folder / "step_000001") == []
        other, other_optimizer = source(1)
        restore(read(folder / "step_000001").tree, other, other_optimizer, None, None)
        assert bits_of(other, other_optimizer) == bits_of(model, optimizer), layout


def test_ranks_write_what_they_hold(saved):
    files = {layout: sorted(path.name for path in folder.glob("step_*/rank_*")) for layout, folder in saved.items()}
    assert len(files["fsdp3"]) == 3
    assert len(files["tp2"]) == 2
    assert files["dp2"] == files["lone"] == ["rank_00000.safetensors"]  # small and replicated: as in one process
    assert len(files["dp2.fsdp2"]) == 2  # of two replicas one


def test_a_rank_that_knows_values_which_rank_0_does_not_tells_them(tmp_path):
    """Optimizer state that its owner alone has, in which there is no tensor."""

    def save(world):
        state = {f"w{world.rank}": {"momentum_buffer": None, "count": world.rank}}
        with Writer(tmp_path, world=world) as writer:
            writer.submit({"optimizer": {"state": state}}, step=1, **FACTS)

    in_world("dp2", save)
    state = read(tmp_path / "step_000001").tree["optimizer"]["state"]
    assert state == {f"w{rank}": {"momentum_buffer": None, "count": rank} for rank in (0, 1)}


@pytest.mark.parametrize("after", LAYOUTS)
def test_every_rank_of_any_layout_gets_its_part_bit_by_bit_and_steps_on(after, saved):
    """D125, D136, D141: model and optimizer, from any layout into any."""

    def load(world):
        model, optimizer = placed(0, world)
        for before, folder in saved.items():
            found, skipped = newest_good(folder, world)
            assert (found.step, skipped) == (1, [])
            other, other_optimizer = placed(1, world)
            assert bits_of(other, other_optimizer) != bits_of(model, optimizer)
            plan = reading_plan(read_manifest(found.path), other)
            restore(read(found.path, plan).tree, other, other_optimizer, None, None)
            assert bits_of(other, other_optimizer) == bits_of(model, optimizer), before
            assert other.head.weight is other.embed.weight
        for each in (model, other):
            for param in each.parameters():
                param.grad = torch.ones_like(param)
        optimizer.step()
        other_optimizer.step()
        assert bits_of(other, other_optimizer) == bits_of(model, optimizer)
        return parts_of(model)["embed.weight"].local_shape

    shapes = in_world(after, load)
    assert sum(rows for rows, _ in shapes) >= 7


@pytest.mark.parametrize("layout", ["fsdp3", "fsdp2.tp2"])
def test_ranks_take_their_slices_of_plain_weights_and_of_another_run(layout, saved, tmp_path):
    model, _ = source(0)
    state = model.state_dict()
    save_file({n: t.clone() for n, t in state.items() if n != "head.weight"}, tmp_path / "model.safetensors")

    def load(world):
        for path in (tmp_path / "model.safetensors", saved["dp2.fsdp2"]):
            other, _ = placed(1, world)
            loaded = load_weights(path, other, world)
            assert loaded.num_tensors == len(state) - 1
            parts = parts_of(other)
            for name, tensor in other.state_dict(keep_vars=True).items():
                assert torch.equal(local_of(tensor.detach()), cut(state[name], parts[name])), name

    in_world(layout, load)


# ---- what fails on one rank ----


def fill_disk(monkeypatch, calls):
    """The disk is full at these calls of the question how full it is."""
    usage, count = shutil.disk_usage, itertools.count(1)
    full = usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full if next(count) in calls else usage(path))


@pytest.mark.parametrize("layout", ["fsdp3", "dp2"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("waits", [True, False])
def test_a_full_disk_on_one_rank_is_told_on_all_and_training_goes_on(layout, victim, waits, tmp_path):
    def save(world):
        tree = capture(*placed(0, world), None, None)
        with Writer(tmp_path, world=world) as writer, pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.checkpoint.deal._SHARE_BYTES", 100)  # so that replicas have files, too
            if world.rank == victim:
                fill_disk(patch, calls=(2, 3))  # before the second save, and for its message
            writer.submit(tree, step=1, **FACTS)
            assert writer.wait()
            writer.submit(tree, step=2, **FACTS)
            assert not waits or not writer.wait()  # else they hear of it when the next save begins
            writer.submit(tree, step=3, **FACTS)
            assert writer.wait()
        assert [saved.step for saved in writer.saved] == [1, 3]
        return writer.events

    events = in_world(layout, save)
    assert [found.step for found in list_checkpoints(tmp_path)] == [3, 1]
    assert names(tmp_path) == [".lock", "step_000001", "step_000003"]
    for rank, (event,) in enumerate(events):
        assert event.startswith("checkpoint of step 2 was not written: ")
        assert event.endswith("; the checkpoint of step 1 stands; training goes on")
        if rank in (0, victim):
            assert "No space left on device (needs" in event
        if rank == 0:
            assert ("rank 1: " in event) == (victim == 1)
        if rank not in (0, victim):
            assert "rank 0 has given it up" in event or (not waits and "No space left" in event)


def test_a_rank_that_does_not_see_the_folder_is_told_on_all(tmp_path):
    """D134: nobody waits for a file that nobody will ever see."""

    def save(world):
        folder = tmp_path / ("shared" if world.rank != 1 else "elsewhere")
        folder.mkdir(exist_ok=True)
        with Writer(folder, world=world) as writer:
            writer.submit(capture(*placed(0, world), None, None), step=1, **FACTS)
            assert not writer.wait()
        return writer.events

    started = time.monotonic()
    for (event,) in in_world("fsdp3", save):
        assert "rank 1: does not see" in event
        assert "a run folder must lie where every host sees it" in event
    assert time.monotonic() - started < 20
    assert names(tmp_path / "shared") == [".lock"]


def test_what_one_rank_cannot_store_stops_all(tmp_path):
    def save(world):
        tree = capture(*placed(0, world), None, None)
        if world.rank == 1:
            tree["model"]["hook"] = lambda: 0
        with Writer(tmp_path, world=world) as writer:
            try:
                writer.submit(tree, step=1, **FACTS)
            except CheckpointError as error:
                return str(error)

    texts = in_world("fsdp2", save)
    assert all("model.hook: a function cannot be stored" in text for text in texts)
    assert texts[0].startswith("rank 1: ")
    assert names(tmp_path) == [".lock"]


def test_who_is_in_a_hurry_does_not_wait_for_a_rank_that_is_gone(tmp_path):
    def save(world):
        writer = Writer(tmp_path, world=world)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.checkpoint.writer._HURRY_S", 0.2)
            if world.rank == 1:
                patch.setattr("shoal.checkpoint.writer.hand_over", lambda *_: None)  # as though killed before it
            writer.submit(capture(*placed(0, world), None, None), step=1, **FACTS)
            started = time.monotonic()
            writer.close(hurry=True)
            return time.monotonic() - started, writer.events

    (waited, (event,)), (_, (other,)) = in_world("fsdp2", save)
    assert waited < 10
    assert "rank 1 has not told within 0.2 s that it wrote" in event
    assert "rank 0 has" in other
    assert names(tmp_path) == [".lock"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_it_writes_ends_the_others_at_the_next_save(victim, tmp_path):
    """They do not wait for its file until their patience ends."""

    def save(world):
        tree = capture(*placed(0, world), None, None)
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == victim:
                name = "commit" if victim == 0 else "hand_over"
                patch.setattr(f"shoal.checkpoint.writer.{name}", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            patch.setattr("shoal.checkpoint.writer._HURRY_S", 0.1)
            with Writer(tmp_path, world=world) as writer:
                writer.submit(tree, step=1, **FACTS)
                writer.submit(tree, step=2, **FACTS)

    with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer"):  # not the word of the harness that kills
        in_world("fsdp2", save)
    assert newest_good(tmp_path)[0] is None


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_kill_of_any_rank_at_any_time_leaves_a_committed_state_that_loads(victim, tmp_path, monkeypatch):
    """D129, of several writers."""
    monkeypatch.setattr("shoal.checkpoint.writer._HURRY_S", 0.1)
    draw = random.Random(victim)
    for attempt in range(4):
        folder, last, delay_s = tmp_path / f"{attempt}", draw.randrange(2, 5), draw.uniform(0.0001, 0.03)

        def run(world, folder=folder, last=last, delay_s=delay_s):
            with Writer(folder, keep=2, world=world) as writer:
                model, optimizer = placed(0, world)
                for step in range(1, 10_000):
                    with torch.no_grad():
                        for param in model.parameters():
                            local_of(param.detach()).fill_(step)
                    if world.rank == victim and step == last:
                        assert writer.wait()
                        signal.setitimer(signal.ITIMER_REAL, delay_s)  # which ends the process where it stands
                    writer.submit(capture(model, optimizer, None, None), step=step, **FACTS)

        with pytest.raises((RankError, RuntimeError)):
            in_world("fsdp3", run)
        found, skipped = newest_good(folder)
        assert skipped == []
        assert found.step >= last - 1
        tree = read(found.path).tree
        assert all((tree["model"][name] == found.step).all() for name, _ in Tied().named_parameters())
        Writer(folder).close()
        assert not [path for path in folder.iterdir() if ".tmp" in path.name]


# ---- finding the newest good one together ----


def test_ranks_that_share_the_reading_find_damage_together_and_take_the_one_before(tmp_path):
    for step in (1, 2):
        in_world("fsdp3", save_once(tmp_path, seed=step, step=step))
    damaged = tmp_path / "step_000002" / "rank_00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")

    def find(world):
        found, skipped = newest_good(tmp_path, world)
        return found.step, skipped

    alone = newest_good(tmp_path)
    for layout in ("dp2", "fsdp3"):
        for step, skipped in in_world(layout, find):
            assert (step, skipped) == (1, alone[1])
    assert "step_000002 is damaged: rank_00002.safetensors: tensor" in alone[1][0]


def test_a_rank_that_sees_another_folder_stops_all(tmp_path):
    in_world("lone", save_once(tmp_path / "shared", seed=1))
    (tmp_path / "elsewhere").mkdir()

    def find(world):
        os.chdir(tmp_path / ("shared" if world.rank == 0 else "elsewhere"))
        return newest_good(type(tmp_path)("."), world)

    with pytest.raises(CheckpointError, match=r"rank 1 does not see .*as rank 0 does .*every host sees it"):
        in_world("dp2", find)
