"""shoal bench on live processes: every byte, every planted second, the same loss."""

import functools
import time
from dataclasses import dataclass
from types import SimpleNamespace

import planted
import pytest
import torch.distributed as dist
from planted import Slow
from torch import nn

from shoal.metrics.watch import Watch
from shoal.models.gpt import Decoder
from shoal.parallel.replicate import Replica
from shoal.verbs.bench import arm, command
from shoal.verbs.plan import command as plan

WIDTH, DEPTH, HEADS, CONTEXT, BATCH, VOCABULARY = 32, 2, 4, 16, 8, 256
GPT = {"width": WIDTH, "depth": DEPTH, "heads": HEADS, "context": CONTEXT, "batch_size": BATCH}
LAYOUTS = ["lone", "dp2", "fsdp2", "tp2", "pp2:micro=2"]
TOTALS, NORM, FLAGS = 72, 8, 8  # bytes of small messages: nine float64 of a step; one; of each to a stage


@pytest.fixture(scope="module")
def compared():
    return command("gpt", LAYOUTS, fields=GPT, rounds=2, block=3, quiet=True)


def sent(compared, layout):
    (row,) = (row for row in compared.rows if row.layout == layout)
    return [dict(rank.sent_bytes) for rank in row.ranks]


def sizes():
    """Bytes of all parameters, of those of the blocks, of the table; and how many parameters there are."""
    model = Decoder(width=WIDTH, depth=DEPTH, heads=HEADS, context=CONTEXT, tied=True, dropout=0.0)
    params = list(model.parameters())
    return (
        sum(p.nbytes for p in params),
        sum(p.nbytes for p in model.blocks.parameters()),
        model.token.weight.nbytes,
        len(params),
    )


def test_all_layouts_ran_and_trained_the_same(compared):
    assert [row.layout for row in compared.table()] == LAYOUTS
    assert all(row.is_same and len(row.shares) for row in compared.table())
    assert compared.exit_code == 0


def test_where_a_step_goes_adds_up_to_the_whole_and_nothing_of_it_is_negative(compared):
    for row in compared.table():
        assert sum(row.shares.values()) == pytest.approx(1.0, abs=0.01)
        assert min(row.shares.values()) > -0.01, row.shares
        assert row.shares["compute"] > 0.05
    told = {row.layout: row.shares for row in compared.table()}
    assert "comm dp" in told["dp2"]
    assert "comm fsdp" in told["fsdp2"]
    assert "comm tp" in told["tp2"]
    assert {"comm pp", "bubble"} <= set(told["pp2:micro=2"])
    assert not any(name.startswith("comm") for name in told["lone"])


def test_dp_sends_twice_n_minus_1_over_n_of_the_gradients(compared):
    params, _, _, count = sizes()
    used = 4 * count  # DDP's map of the parameters that were used
    assert sent(compared, "dp2") == [{"dp": params + used + TOTALS}] * 2


def test_fsdp_gathers_blocks_twice_and_the_rest_once_and_scatters_all_gradients(compared):
    params, blocks, _, count = sizes()
    gathered, scattered = (2 * blocks + (params - blocks)) // 2, params // 2
    used = 4 * count
    assert sent(compared, "fsdp2") == [{"fsdp": gathered + scattered + used + NORM + TOTALS}] * 2


def test_tp_sums_activations_four_times_per_block_and_twice_at_its_ends(compared):
    activations = BATCH * CONTEXT * WIDTH * 4
    cross_entropy = 3 * BATCH * CONTEXT * 4  # of each token: the largest logit, the sum, the target's
    assert sent(compared, "tp2") == [{"tp": (4 * DEPTH + 2) * activations + cross_entropy + NORM + TOTALS}] * 2


def test_pp_sends_what_crosses_the_cut_once_each_way_and_sums_the_table_that_is_in_both_stages(compared):
    _, _, table, count = sizes()
    crossing = BATCH * CONTEXT * WIDTH * 4
    used = 8 * count  # how many micro-batches gave each parameter a gradient
    assert sent(compared, "pp2:micro=2") == [{"pp": crossing + table + 2 * FLAGS + used + NORM + TOTALS}] * 2


def test_what_is_sent_is_what_the_textbook_says_and_a_few_numbers(compared):
    for row in compared.rows:
        for rank in row.ranks:
            assert set(rank.sent_bytes) - set(rank.formula_bytes) <= {"tp"}
            for axis, said in rank.formula_bytes.items():
                assert 0 <= rank.sent_bytes[axis] - said <= 512, (row.layout, axis)


def test_memory_is_told_by_category_and_sharding_shows(compared):
    params, _, _, _ = sizes()
    rows = {row.layout: row.ranks for row in compared.rows}
    assert rows["lone"][0].peak_bytes["parameters"] == params
    assert [rank.peak_bytes["parameters"] for rank in rows["fsdp2"]] == [params // 2] * 2
    assert rows["lone"][0].peak_bytes["optimizer"] == pytest.approx(2 * params, rel=0.01)


class Clock:
    """Planted seconds pass at once, and those of the machine count a thousandth: other work is no noise."""

    def __init__(self) -> None:
        self.planted_s, self.real = 0.0, time.perf_counter

    def now(self) -> float:
        return self.planted_s + self.real() / 1000

    def sleep(self, seconds: float) -> None:
        self.planted_s += seconds


@pytest.fixture
def clock(monkeypatch):
    """That of the ranks, which are forked from here. benchmarks/stopwatch.py has real seconds."""
    made = Clock()
    monkeypatch.setattr(planted, "sleep", made.sleep)
    monkeypatch.setattr(arm, "time", SimpleNamespace(perf_counter=made.now, process_time=time.process_time))
    monkeypatch.setattr(arm, "Watch", functools.partial(Watch, now=made.now))
    monkeypatch.setattr(Replica, "exposed_s", lambda self: 0.0)  # on torch's own clock


@pytest.mark.usefixtures("clock")
def test_a_tenth_of_a_second_of_reading_is_a_tenth_of_a_second_of_waiting_for_data():
    found = command(Slow(read_s=0.025), ["lone", "dp2"], rounds=1, block=1, quiet=True)
    for row, samples in zip(found.rows, (4, 2), strict=True):
        for rank in row.ranks:
            assert rank.spent.data_s == pytest.approx(0.025 * samples, abs=0.002)
    assert "waiting for data" in found.sentences()[0]


@pytest.mark.usefixtures("clock")
def test_speed_up_and_efficiency_are_those_of_a_stopwatch():
    """A sample takes 50 ms wherever it is."""
    one, two = command(Slow(sample_s=0.05), ["lone", "dp2"], rounds=2, block=3, quiet=True).table()
    assert one.step_ms == pytest.approx(200, rel=0.02)
    assert two.step_ms == pytest.approx(100, rel=0.02)
    assert two.speed_up == pytest.approx(2.0, abs=0.05)
    assert two.efficiency == pytest.approx(two.speed_up / 2)
    assert one.rate == pytest.approx(4 / 0.2, rel=0.02)


@pytest.mark.usefixtures("clock")
def test_weak_scaling_gives_each_data_rank_the_batch_of_one():
    found = command(Slow(sample_s=0.03), scale=[1, 2], mode="weak", rounds=2, block=3, quiet=True)
    one, two = found.table()
    assert [row.batch_size for row in found.rows] == [4, 8]
    assert two.step_ms == pytest.approx(one.step_ms, rel=0.02)
    assert two.efficiency == pytest.approx(1.0, abs=0.02)


@pytest.mark.usefixtures("clock")
def test_a_slow_rank_is_named():
    found = command(Slow(slow_rank_s=0.05), ["lone", "dp2"], rounds=1, block=4, quiet=True)
    assert found.sentences()[1].startswith("dp2: rank 1 is slow: in each step it works ")


def test_a_layout_that_trains_another_loss_is_no_success():
    found = command(Slow(wrong=True), ["lone", "dp2"], rounds=1, block=3, quiet=True)
    assert not found.table()[1].is_same
    assert found.exit_code == 1


def test_a_refused_layout_does_not_stop_the_others():
    found = command(Slow(), ["lone", "pp4:micro=4", "dp2"], rounds=1, block=2, quiet=True)
    assert [row.layout for row in found.good] == ["lone", "dp2"]
    assert "parts that run one after the other" in found.rows[1].error
    assert found.exit_code == 1


def test_worlds_may_be_made_one_at_a_time():
    found = command(Slow(), ["lone", "dp2"], rounds=2, block=2, apart=True, quiet=True)
    assert [len(row.times_s) for row in found.rows] == [2, 2]
    assert found.exit_code == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_d175_a_rank_holds_and_sends_what_the_plan_says(precision, compared):
    """Split by item. One process to the byte; elsewhere messages are there for a moment longer or shorter."""
    fields = {**GPT, "precision": precision}
    layouts = ["lone", "fsdp4", "pp2:micro=2"]
    found = command("gpt", layouts, fields=fields, rounds=1, block=1, quiet=True) if precision != "fp32" else compared
    for row in found.rows:
        planned = plan("gpt", row.layout, fields=fields, ranks="0").ranks[0]
        held, said = dict(row.ranks[0].peak_bytes), dict(planned.peak_bytes)
        for memory in (held, said):
            memory["activations"] += memory.pop("inputs")
        if row.layout == "lone":
            assert held == said
        else:  # when which message is there is the machine's to say
            assert held["parameters"] == said["parameters"]
            assert held["optimizer"] == pytest.approx(said["optimizer"], rel=1e-3)
            assert sum(held.values()) == pytest.approx(sum(said.values()), rel=0.15)
        small = sum(row.ranks[0].sent_bytes.values()) - sum(planned.sent_bytes.values())
        assert 0 <= small <= 512, "what a plan leaves out are sums of a few numbers"


@pytest.fixture(scope="module")
def digits():
    return command("digits", ["lone", "threads2", "dp2"], rounds=1, block=4, quiet=True)


def test_d161_d162_replicas_in_threads_are_held_against_those_in_processes(digits):
    """Time, traffic and memory of both, measured; the same loss."""
    lone, threads, processes = digits.rows
    assert digits.exit_code == 0
    assert [row.num_devices for row in digits.table()] == [1, 2, 2]
    assert threads.ranks[0].sent_bytes == {}
    assert processes.ranks[0].sent_bytes["dp"] > 0
    assert len(threads.ranks) == 1  # all that threads hold, one process holds
    assert sum(threads.ranks[0].peak_bytes.values()) > sum(processes.ranks[0].peak_bytes.values())
    assert lone.ranks[0].peak_bytes["parameters"] == threads.ranks[0].peak_bytes["parameters"]


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.5), nn.Linear(4, 4))


@dataclass(frozen=True, kw_only=True)
class Drops(Slow):
    def model(self):
        return Dropping()


def test_a_forward_that_draws_is_said_and_its_losses_are_not_compared(digits):
    found = command(Drops(), ["lone", "threads2", "dp2"], rounds=1, block=1, quiet=True)
    assert found.exit_code == 0
    assert [row.draws for row in found.rows] == [True] * 3
    assert all(row.loss_differs is None for row in found.table())
    assert "run one after the other" in found.sentences()[1]
    assert [row.draws for row in digits.rows] == [False] * 3


def test_statistics_of_batch_norms_are_messages_and_no_wait_for_a_slow_rank(digits):
    """Each sum of a BatchNorm's statistics is small, and every rank is in it at the same place."""
    waits = [rank.spent.waits_s for rank in digits.rows[2].ranks]
    assert all(told["compute", "dp"] > 0 for told in waits)


@dataclass(frozen=True, kw_only=True)
class Leaves(Slow):
    """Its own code ends one world."""

    def loss(self, output, batch):
        if dist.is_initialized():
            raise SystemExit(0)
        return super().loss(output, batch)


def test_a_layout_whose_own_code_leaves_does_not_stop_the_others():
    found = command(Leaves(), ["lone", "dp2"], rounds=1, block=2, quiet=True)
    assert "called sys.exit" in found.rows[1].error
    assert [row.layout for row in found.good] == ["lone"]
    assert found.exit_code == 1
