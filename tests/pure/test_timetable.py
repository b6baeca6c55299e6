"""A pipeline's timetable against the definition of a pipeline, and against the formulas of the papers."""

import itertools
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.errors import LayoutError
from shoal.layout import CHOICES, Layout
from shoal.parallel.pipeline.schedule import _MULTI, Schedule, stages_of
from shoal.parallel.pipeline.timetable import Span, actions, bubble, timetable

UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def unit(kind, stage):
    return UNITS[kind]


def layouts():
    """Every schedule with every number of ranks, micro-batches and stages per rank that the grammar lets through."""
    for schedule, pp, micro, virtual in itertools.product(CHOICES["schedule"], range(1, 6), range(1, 13), range(1, 4)):
        if schedule is None and virtual > 1:
            continue  # one of the others
        try:
            yield Layout(pp=pp, micro=micro, schedule=schedule, virtual=virtual)
        except LayoutError:
            continue


LAYOUTS = list(layouts())


def test_a_picture_of_1f1b():
    expected = """
    rank 0  F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3
    rank 1  .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3 .. ..
    rank 2  .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. ..
    """
    rows = [[".."] * 18 for _ in range(3)]
    for span in timetable(Layout.parse("pp3:micro=4,schedule=1f1b"), unit):
        for slot in range(int(span.start_s), int(span.end_s)):
            rows[span.rank][slot] = f"{span.kind}{span.micro}"
    assert [line.split()[2:] for line in expected.strip().splitlines()] == rows


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(LAYOUTS), st.integers(0, 3), st.randoms(use_true_random=False))
@example(Layout.parse("pp2:micro=4,schedule=dualpipev"), 1, None)
def test_every_action_is_done_once_and_as_soon_as_its_rank_and_what_it_needs_are_there(layout, message_s, random):
    costs = {}
    cost = lambda *key: costs.setdefault(key, 1.0 if random is None else float(random.randint(1, 5)))  # noqa: E731
    spans = timetable(layout, cost, message_s=message_s)
    assert_each_once(layout, spans)
    end_s = {(("B" if s.kind == "I" else s.kind), s.stage, s.micro): s.end_s for s in spans}
    rank_of = {stage: rank for rank in range(layout.pp) for stage in stages_of(layout, rank)}
    free_s = dict.fromkeys(range(layout.pp), 0.0)
    for span in spans:
        assert span.rank == rank_of[span.stage]
        there_s = [free_s[span.rank]]
        sources = {"F": [("F", -1)], "B": [("F", 0), ("B", 1)], "I": [("F", 0), ("B", 1)], "W": [("B", 0)]}
        for kind, step in sources[span.kind]:
            stage = span.stage + step
            if 0 <= stage < layout.num_stages:
                way_s = message_s if rank_of[stage] != span.rank else 0.0
                there_s.append(end_s[kind, stage, span.micro] + way_s)
        assert span.start_s == max(there_s)
        assert span.end_s == span.start_s + costs[span.kind, span.stage]
        free_s[span.rank] = span.end_s


def assert_each_once(layout, spans):
    done = {kind: Counter((s.stage, s.micro) for s in spans if s.kind in kind) for kind in ("F", "BI", "BW")}
    once = Counter(itertools.product(range(layout.num_stages), range(layout.micro)))
    assert done == {"F": once, "BI": once, "BW": once}


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(0, 12), st.sampled_from([0.5, 1.0, 2.0]))
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_the_formula(pp, more, backward):
    micro = pp + more
    for schedule in ("gpipe", "1f1b") if pp > 1 else (None,):
        spans = timetable(Layout(pp=pp, micro=micro, schedule=schedule), lambda k, s: 1.0 if k == "F" else backward)
        assert bubble(spans, pp) == pytest.approx((pp - 1) / (micro + pp - 1))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 3))
def test_several_stages_per_rank_divide_the_bubble_where_micro_batches_come_in_whole_rounds(pp, rounds, virtual):
    micro = pp * rounds
    for schedule in ("interleaved", "looped-bfs"):
        spans = timetable(Layout(pp=pp, micro=micro, schedule=schedule, virtual=virtual), unit)
        # (p - 1) / v of a step's m: Narayanan et al. 2021, section 2.2
        assert bubble(spans, pp) == pytest.approx((pp - 1) / (virtual * micro + pp - 1))


@pytest.mark.parametrize("pp", [2, 3, 4, 6])
def test_a_backward_in_halves_leaves_a_smaller_bubble(pp):
    def share(options):
        return bubble(timetable(Layout.parse(f"pp{pp}:micro={4 * pp},schedule={options}"), unit), pp)

    assert share("zb") < share("1f1b")
    for options in ("zb,virtual=2", "zbv", "dualpipev"):
        assert share(options) < share("interleaved,virtual=2")


def test_a_slow_stage_makes_all_others_wait():
    spans = timetable(Layout.parse("pp2:micro=100"), lambda kind, stage: unit(kind, stage) * (2 if stage else 1))
    assert bubble(spans, 2) == pytest.approx(1 / 4, abs=0.01)  # of the faster rank a half


def test_the_bubble_counts_from_the_first_start_to_the_last_end():
    spans = [Span(0, 0, "F", 0, 10.0, 11.0), Span(1, 1, "F", 0, 11.0, 12.0), Span(1, 1, "B", 0, 12.0, 14.0)]
    assert bubble(spans, 2) == 1 - 4 / 8


@pytest.mark.parametrize("schedule", _MULTI)
def test_the_order_is_that_of_the_tables_that_torch_runs(schedule):
    """Which hold messages too; tests/gloo/test_pipeline_order.py compares with stages that run."""
    for layout in (layout for layout in LAYOUTS if layout.schedule == schedule and layout.micro % 4 == 0):
        place = {"num_stages": layout.num_stages, "group_rank": 0, "group_size": layout.pp, "submod": None}
        stages = [SimpleNamespace(stage_index=stage, **place) for stage in stages_of(layout, 0)]
        runs = Schedule(layout, stages)._make(layout.micro, has_backward=True).pipeline_order_with_comms
        for rank, order in enumerate(actions(layout)):
            ran = [part for action in runs[rank] for part in action.sub_actions or [action]]
            found = [(part.computation_type.value, part.stage_index, part.microbatch_index) for part in ran]
            assert [action for action in found if action[0] in UNITS] == order, layout


def test_a_large_world_takes_seconds():
    began_s = time.process_time()
    spans = timetable(Layout.parse("pp64:micro=512,schedule=1f1b"), unit)
    assert time.process_time() - began_s < 10  # 1 s; what is quadratic in the ranks takes more than 60
    assert bubble(spans, 64) == pytest.approx(63 / 575)
