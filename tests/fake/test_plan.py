"""`shoal plan` tells of every rank what a real run would hold, compute and send: compared with sums made by hand.

Letters: B samples of a micro-batch, T tokens, W width, V vocabulary, L layers of a stage, M micro-batches, N ranks.
"""

import json
import sys
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal.cli
from shoal.errors import JobError, LayoutError
from shoal.job import Job, load_job, mean_loss, preset_of
from shoal.layout import Layout
from shoal.run import assemble
from shoal.verbs.plan import PlanError, command
from shoal.verbs.plan.micro import enough, most_alive
from shoal.world import World

FLOAT = 4
WIDTH, TOKENS, BYTES = 32, 16, 256
SMALL = {"width": WIDTH, "heads": 4, "context": TOKENS, "depth": 4, "batch_size": 32, "steps": 3}


def plan(layout, ranks="all", **fields):
    return command("gpt", layout, fields=SMALL | fields, ranks=ranks)


def block_params(width=WIDTH):
    norms, attention = 4 * width, 4 * width**2 + 4 * width
    return norms + attention + 8 * width**2 + 5 * width


TABLE, POSITIONS, LAST_NORM = BYTES * WIDTH, TOKENS * WIDTH, 2 * WIDTH


def forward_flops(samples, layers, head):
    """Of matrix products: 2 for each weight and token; scores and values, each 2 x W for a pair of tokens."""
    tokens = samples * TOKENS
    block = 2 * tokens * 12 * WIDTH**2 + 4 * tokens * TOKENS * WIDTH
    return layers * block + head * 2 * tokens * WIDTH * BYTES


# -- what a rank holds ---------------------------------------------------------------------------------------


def test_one_process_holds_all_and_its_step_is_three_forwards():
    (rank,) = plan("lone").ranks
    params = 4 * block_params() + TABLE + POSITIONS + LAST_NORM
    assert rank.parameter_bytes == rank.gradient_bytes == FLOAT * params
    assert rank.optimizer_bytes == 2 * FLOAT * params + FLOAT * num_tensors(layers=4, beside=4)  # AdamW counts steps
    assert rank.flops == rank.model_flops == 3 * forward_flops(32, layers=4, head=1)
    assert rank.sent_bytes == {}


def num_tensors(layers, beside):
    return 12 * layers + beside


def test_stages_hold_their_layers_and_both_ends_the_tied_table():
    first, last = plan("pp2:micro=4,split=2").ranks
    assert first.parameter_bytes == FLOAT * (2 * block_params() + TABLE + POSITIONS)
    assert last.parameter_bytes == FLOAT * (2 * block_params() + TABLE + LAST_NORM)
    assert first.flops == 3 * forward_flops(32, layers=2, head=0)
    assert last.flops == 3 * forward_flops(32, layers=2, head=1)


def test_replicas_hold_all_and_compute_a_share():
    (rank,) = plan("dp4").ranks
    assert rank.parameter_bytes == rank.gradient_bytes == FLOAT * (4 * block_params() + TABLE + POSITIONS + LAST_NORM)
    assert rank.flops == 3 * forward_flops(8, layers=4, head=1)
    assert rank.sent_bytes == {"dp": 2 * 3 * rank.gradient_bytes // 4}  # a ring: 2 (N - 1) / N


def test_shards_hold_a_share_and_gather_and_reduce_the_rest():
    whole = FLOAT * (4 * block_params() + TABLE + POSITIONS + LAST_NORM)
    (rank,) = plan("fsdp4:reshard=false").ranks
    assert rank.parameter_bytes == rank.gradient_bytes == whole // 4
    assert rank.sent_bytes == {"fsdp": 2 * 3 * whole // 4}  # gathered once, reduced once
    assert rank.peak_bytes["gathered"] == whole
    (resharded,) = plan("fsdp4").ranks
    assert resharded.peak_bytes["gathered"] < whole / 2
    assert resharded.sent_bytes["fsdp"] > rank.sent_bytes["fsdp"]  # blocks are gathered again for backward


def test_tensor_parallel_ranks_hold_a_part_of_each_layer_and_add_up_four_times_a_block():
    (rank,) = plan("tp2", vocabulary=BYTES).ranks
    whole = 4 * block_params() + TABLE + POSITIONS + LAST_NORM
    cut = 4 * (12 * WIDTH**2 + 7 * WIDTH)  # matrices, and the biases of columns
    table = TABLE if "token" not in "".join(rank.shapes) else TABLE // 2
    assert rank.parameter_bytes in (FLOAT * (whole - cut // 2), FLOAT * (whole - cut // 2 - (TABLE - TABLE // 2)))
    activation = FLOAT * 32 * TOKENS * WIDTH
    assert rank.sent_bytes["tp"] >= 4 * 4 * activation  # of 2 ranks each sends as much as it adds up
    assert table


# -- memory over a schedule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("micro", "alive"), [(4, 4), (8, 4), (16, 4)])
def test_of_1f1b_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages(micro, alive):
    first, *_, last = plan(f"pp4:micro={micro},split=1/2/3", batch_size=2 * micro).ranks
    assert (first.alive, last.alive) == (alive, 1)


def test_activations_grow_by_one_micro_batch_for_each_that_is_alive():
    one, two, three = (
        plan(f"pp4:micro={micro},schedule=gpipe,split=1/2/3", ranks="0", batch_size=2 * micro).ranks[0]
        for micro in (4, 5, 6)
    )
    grown = [b.peak_bytes["activations"] - a.peak_bytes["activations"] for a, b in ((one, two), (two, three))]
    assert grown[0] == grown[1] > FLOAT * 2 * TOKENS * WIDTH * 10


def test_more_micro_batches_than_stages_cost_no_more_memory():
    for place in (0, 1, 3):
        few, many = (
            plan(f"pp4:micro={micro},split=1/2/3", ranks=str(place), batch_size=2 * micro).ranks[0] for micro in (8, 16)
        )
        assert {**many.peak_bytes, "inputs": 0} == {**few.peak_bytes, "inputs": 0}
        assert many.peak_bytes["inputs"] == 2 * few.peak_bytes["inputs"] == 16 * 2 * 2 * TOKENS * 8


@pytest.mark.parametrize("layout", ["fsdp2:micro=7", "pp2.dp2:micro=8,split=2"])
def test_what_few_micro_batches_cost_is_scaled_to_what_all_of_them_cost(layout, monkeypatch):
    micro = Layout.parse(layout).micro
    scaled = plan(layout, batch_size=4 * micro).ranks
    monkeypatch.setattr("shoal.verbs.plan.rank.enough", lambda layout, coordinate: layout.micro)
    for few, all_of_them in zip(scaled, plan(layout, batch_size=4 * micro).ranks, strict=True):
        # Of each micro-batch the last stage keeps the loss, one number, to the end of the step.
        left_out = all_of_them.peak_bytes["activations"] - few.peak_bytes["activations"]
        assert 0 <= left_out <= FLOAT * micro
        assert replace(few, peak_bytes=all_of_them.peak_bytes) == all_of_them


def test_enough_is_few_where_a_schedule_comes_to_rest_and_all_where_it_does_not():
    assert enough(Layout.parse("pp64:micro=256"), 0) == 66
    assert enough(Layout.parse("pp4:micro=64,schedule=gpipe"), 0) == 64
    assert enough(Layout.parse("dp8:micro=64"), 0) == 3
    layout = Layout.parse("pp4:micro=32,schedule=interleaved,virtual=2")
    assert most_alive(replace(layout, micro=enough(layout, 0)), 0) == most_alive(layout, 0)


# -- the real thing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["lone", "dp2"])
def test_a_plan_of_what_runs_here_holds_what_a_run_here_holds(layout):
    """Every tensor of a real step, by the address of its memory."""
    (planned,) = plan(layout).ranks
    with World.open(layout, kind=None if layout == "lone" else "fake") as world:
        run = assemble(load_job("gpt", SMALL), world, quiet=True)
        next(run.steps())()
    params = list(run.model.parameters())
    assert planned.parameter_bytes == sum(param.nbytes for param in params)
    assert planned.gradient_bytes == sum(param.grad.nbytes for param in params)
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    assert planned.optimizer_bytes == sum(value.nbytes for value in states)


# -- refusals --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Normed(Job):
    batch_size: int = 8
    steps: int = 1

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def data(self):
        return TensorDataset(torch.ones(64, 4), torch.zeros(64, dtype=torch.int64))

    def loss(self, output, batch):
        return mean_loss(F.cross_entropy(output, batch[1], reduction="none"))

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Deciding(Normed):
    def loss(self, output, batch):
        losses = F.cross_entropy(output, batch[1], reduction="none")
        return mean_loss(losses * 2 if losses.mean() > 1 else losses)


@pytest.mark.parametrize("layout", ["dp2:micro=2", "pp8:micro=8", "fsdp2:zero=1"])
def test_a_plan_refuses_what_a_run_refuses_in_the_same_words(layout):
    with pytest.raises(LayoutError) as planned:
        command(Normed(), layout)
    with pytest.raises(LayoutError) as real, World.open(layout, kind="fake") as world:
        assemble(Normed(), world, quiet=True)
    assert str(planned.value) == str(real.value)


def test_a_job_that_asks_for_numbers_is_told_that_a_plan_has_none():
    with pytest.raises(PlanError, match=r"Deciding asks for numbers .*decide by shapes"):
        command(Deciding(), "dp2")


def test_ranks_that_are_not_there_are_refused():
    with pytest.raises(PlanError, match="dp2 has no rank 2: its ranks run from 0 to 1"):
        plan("dp2", ranks="0,2")
    with pytest.raises(PlanError, match="ranks is 'some'; it must be ends, all, or numbers"):
        plan("dp2", ranks="some")


# -- presets, and the command line -----------------------------------------------------------------------------


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(JobError, match=r"GPT has no preset 'gpt3'. Did you mean 'gpt3-175b'"):
        preset_of("gpt", "gpt3")
    with pytest.raises(JobError, match=r"Normed has no preset 'big'. It has none"):
        preset_of(Normed(), "big")


@pytest.mark.parametrize(("preset", "params"), [("gpt3-175b", 174.6e9), ("megatron-8.3b", 8.3e9)])
def test_presets_have_the_size_that_their_papers_state(preset, params):
    fields = preset_of("gpt", preset)
    width, depth = fields["width"], fields["depth"]
    counted = depth * block_params(width) + (fields["vocabulary"] + fields["context"] + 2) * width
    assert counted == pytest.approx(params, rel=0.01)


def test_the_command_line_prints_a_table_or_json_and_exits_2_at_a_mistake(monkeypatch, capsys):
    def plan(*words):
        monkeypatch.setattr(sys, "argv", ["shoal", "plan", "gpt", "--set", "width=32", "--layout", *words])
        with pytest.raises(SystemExit) as end:
            shoal.cli.main()
        return end.value.code, *capsys.readouterr()

    code, said, _ = plan("pp2:micro=2", "--json")
    told = json.loads(said)
    assert code == 0
    assert [row["stages"] for row in told["ranks"]] == [[0], [1]]
    assert told["num_ranks"] == 2
    code, said, wrong = plan("pp99:micro=99")
    assert (code, said) == (2, "")
    assert wrong.startswith("LayoutError: 99 stages need 99 parts")


def test_gpt3_in_3072_ranks_is_planned_in_a_process_of_a_few_hundred_megabytes():
    """All widths of the paper, a quarter of its layers and stages."""
    fields = preset_of("gpt", "gpt3-175b") | {"depth": 16}
    (rank,) = command("gpt", "pp16.dp24.tp8:micro=64", fields=fields, ranks="0").ranks
    activation = FLOAT * 2048 * 12288
    assert rank.stages == [0]
    assert rank.sent_bytes["pp"] >= 64 * activation
    assert rank.alive == 16
