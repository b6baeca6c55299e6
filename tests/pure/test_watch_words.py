"""What a rank notes, who stands still by it, and in which words it is told; no process is started."""

import json
import os
import time
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import CheckpointError
from shoal.launch.afar import Afar
from shoal.launch.incident import INCIDENTS, Incident, Witness, append
from shoal.launch.outcome import FAILURE, Failure, Outcome, forget_failure, keep_failure
from shoal.launch.process import Kernel, ask_kernel, workers_of
from shoal.launch.straggler import Straggler, Stragglers
from shoal.launch.suspects import Patience, Standing, is_desync, standing
from shoal.record import SIZE, Message, Phase, Record, Seen, Spent, look, prepare
from shoal.verbs.why import tell

NOW = 1000.0
PATIENCE = Patience()
USUAL = {phase: Spent(count=3, usual_s=0.1, total_s=0.3) for phase in Phase}
GRADIENTS = Message("all_reduce", "dp", "0..1x2 ddp", 17)


def rank(phase: Phase, for_s: float, *, inside: Message | None = None, known: bool = True, stage: int = 0) -> Seen:
    """A rank that has been in a phase of step 17 for some seconds."""
    return Seen(
        is_used=True,
        stage=stage,
        step=17,
        phase=phase,
        since_s=NOW - for_s,
        message=inside,
        is_inside=inside is not None,
        message_since_s=NOW - for_s,
        spent=USUAL if known else {},
    )


# -- the record -----------------------------------------------------------------------------------------------


def test_what_is_noted_is_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "record"
    prepare(path)
    record = Record(str(path))
    record.stand(stage=2)
    record.loop(step=16)

    with record.phase(Phase.COMPUTE, step=17):
        record.micro(3)
        record.enter((b"all_reduce", b"dp", b"0..1x2 0", 5))
        inside = look(path)
        record.leave()
        after = look(path)

    assert (inside.step, inside.phase, inside.micro, inside.stage) == (17, Phase.COMPUTE, 3, 2)
    assert inside.message == Message("all_reduce", "dp", "0..1x2 0", 5)
    assert inside.doing == "step 17, compute, micro-batch 4, inside all_reduce dp"
    assert after.doing == "step 17, compute, micro-batch 4, after all_reduce dp"
    done = look(path)
    assert done.phase is Phase.LOOP
    assert done.spent[Phase.COMPUTE].count == 1
    assert 0.0 <= done.spent[Phase.COMPUTE].waited_s <= done.spent[Phase.COMPUTE].total_s


def test_the_usual_time_of_a_phase_is_the_median_so_a_slow_first_one_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "record"
    prepare(path)
    record = Record(str(path))
    for took_s in (0.2, 0.0, 0.0):
        with record.phase(Phase.COMPUTE):
            time.sleep(took_s)

    spent = look(path).spent[Phase.COMPUTE]
    assert spent.count == 3
    assert spent.total_s >= 0.2
    assert spent.usual_s < 0.1


def test_after_an_error_the_record_says_where_it_happened_until_the_next_phase(tmp_path: Path) -> None:
    path = tmp_path / "record"
    prepare(path)
    record = Record(str(path))
    record.loop(step=0)

    def fail() -> None:
        with record.phase(Phase.COMPUTE, step=1):
            record.enter((b"barrier", b"dp", b"", 1))
            record.broke()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    record.enter((b"broadcast", b"dp", b"", 2))  # on the way out
    assert look(path).doing == "step 1, compute, inside barrier dp"

    with record.phase(Phase.SAVE):
        assert look(path).phase is Phase.SAVE
    assert look(path).phase is Phase.LOOP


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * SIZE])
def test_a_file_that_is_no_record_says_nothing(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(data)
    assert not look(tmp_path / "record").is_used
    assert not look(tmp_path / "nowhere").is_used


# -- who stands still -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "seen"),
    [
        # (what it is, rank 0 and rank 1)            compute is usually 0.1 s, so 3 s are too many
        ("the one that waits for nobody", [rank(Phase.COMPUTE, 4, inside=GRADIENTS), rank(Phase.COMPUTE, 4)]),
        ("the one that waits for nobody", [rank(Phase.COMPUTE, 9, inside=GRADIENTS), rank(Phase.DATA, 4)]),
    ],
)
def test_who_waits_for_nobody_stands(who: str, seen: list[Seen]) -> None:
    found = standing(dict(enumerate(seen)), [], NOW, PATIENCE)
    assert (found.ranks, found.waiting, found.is_circle) == ({1}, {0}, False), who


@pytest.mark.parametrize(
    "seen",
    [
        [rank(Phase.COMPUTE, 2.9), rank(Phase.COMPUTE, 2.9)],  # under 3 s, though 29 times the usual
        [rank(Phase.COMPUTE, 500, known=False), rank(Phase.COMPUTE, 500, known=False)],  # first steps
        [rank(Phase.COMPUTE, 500, inside=GRADIENTS), rank(Phase.EVALUATE, 50)],  # waits for one that evaluates
        [rank(Phase.COMPUTE, 500, inside=GRADIENTS), rank(Phase.LOOP, 500, known=False)],  # for the loop of rank 0
        [rank(Phase.SAVE, 50), rank(Phase.SAVE, 50, inside=GRADIENTS)],
        [rank(Phase.SETUP, 500, known=False), rank(Phase.SETUP, 500, inside=GRADIENTS, known=False)],
    ],
)
def test_what_rightly_takes_long_is_no_incident(seen: list[Seen]) -> None:
    assert not standing(dict(enumerate(seen)), [], NOW, PATIENCE).ranks


def test_a_phase_of_four_times_the_usual_is_none_and_of_six_times_is_one() -> None:
    slow = {phase: Spent(count=3, usual_s=2.0) for phase in Phase}
    seen = {0: replace(rank(Phase.COMPUTE, 8), spent=slow)}
    assert not standing(seen, [], NOW, PATIENCE).ranks
    assert standing({0: replace(seen[0], since_s=NOW - 12)}, [], NOW, PATIENCE).ranks == {0}


def test_a_stopped_rank_stands_wherever_it_is_and_whatever_is_usual_there() -> None:
    seen = {0: rank(Phase.COMPUTE, 4, inside=GRADIENTS), 1: rank(Phase.SETUP, 4, inside=GRADIENTS, known=False)}
    assert standing(seen, [1], NOW, PATIENCE).ranks == {1}


def test_a_rank_whose_stack_shows_that_it_waits_is_no_suspect() -> None:
    seen = {0: rank(Phase.COMPUTE, 4), 1: rank(Phase.COMPUTE, 4)}
    assert standing(seen, [], NOW, PATIENCE, waits=[0]).ranks == {1}
    assert standing(seen, [], NOW, PATIENCE, waits=[0, 1]).is_circle


def test_ranks_in_one_collective_blame_the_link_and_in_different_ones_each_other() -> None:
    same = {number: rank(Phase.COMPUTE, 4, inside=GRADIENTS) for number in (0, 1)}
    other = {**same, 1: rank(Phase.COMPUTE, 4, inside=replace(GRADIENTS, operation="broadcast"))}
    later = {**same, 1: rank(Phase.COMPUTE, 4, inside=replace(GRADIENTS, number=18))}
    aside = {**same, 1: rank(Phase.COMPUTE, 4, inside=replace(GRADIENTS, group="0..1x2 3"))}
    assert standing(same, [], NOW, PATIENCE).is_circle
    assert [is_desync(seen) for seen in (same, other, later, aside)] == [False, True, True, True]


def test_two_groups_of_different_ranks_and_messages_to_one_rank_are_no_desync() -> None:
    apart = {
        0: rank(Phase.COMPUTE, 4, inside=GRADIENTS),
        2: rank(Phase.COMPUTE, 4, inside=replace(GRADIENTS, group="2..3x2 ddp", number=16)),
    }
    crossing = {
        0: rank(Phase.COMPUTE, 4, inside=Message("send", "pp", "0..1x2 0")),
        1: rank(Phase.COMPUTE, 4, inside=Message("recv", "pp", "0..1x2 0")),
    }
    assert not is_desync(apart)
    assert not is_desync(crossing)


# -- in words -------------------------------------------------------------------------------------------------


def dump(file: str, line: int, name: str) -> str:
    return f'Current thread 0x1 (most recent call first):\n  File "{file}", line {line} in {name}\n'


def test_the_screen_of_a_rank_that_stands() -> None:
    seen = {0: rank(Phase.COMPUTE, 4, inside=GRADIENTS), 1: rank(Phase.COMPUTE, 4)}
    incident = Incident(
        standing=Standing(ranks=frozenset({1}), waiting=frozenset({0})),
        witnesses={
            0: Witness(seen=seen[0], kernel=Kernel("S")),
            1: Witness(seen=seen[1], kernel=Kernel("R"), cores=1.0, dump=dump("/home/me/train.py", 12, "forward")),
        },
        pids={0: 10, 1: 11},
        at_s=NOW,
    )
    expected = """
──────────────────────────────────────────────────────────────────────────────
rank 1 of 2 stands still: 4 s in step 17, compute (usually 100 ms)

  running, 100 % CPU: a loop, or one long operation
  at /home/me/train.py:12 in forward

stack (your frames and the last):
  File "/home/me/train.py", line 12, in forward

rank 0: waits in all_reduce dp, step 17, compute

Nothing was ended: training goes on if they do, or ends when a collective's time is over.
──────────────────────────────────────────────────────────────────────────────"""
    assert incident.screen() == expected


def test_the_screen_of_a_link_that_stands_names_no_rank_as_the_cause() -> None:
    seen = rank(Phase.COMPUTE, 4, inside=GRADIENTS)
    incident = Incident(
        standing=Standing(ranks=frozenset({0, 1}), is_circle=True),
        witnesses={number: Witness(seen=seen, kernel=Kernel("S")) for number in (0, 1)},
        pids={0: 10, 1: 11},
        at_s=NOW,
    )
    assert incident.kind == "link"
    assert "all 2 ranks wait in the same all_reduce dp, and none has got on for 4 s" in incident.screen()
    assert "the link between them or the backend stands, not a rank" in incident.screen()


def test_the_screen_of_a_link_between_two_machines_names_both() -> None:
    seen = rank(Phase.COMPUTE, 4, inside=GRADIENTS)
    incident = Incident(
        standing=Standing(ranks=frozenset({0, 1}), is_circle=True),
        witnesses={number: Witness(seen=seen, kernel=Kernel("S")) for number in (0, 1)},
        pids={0: 10, 1: 11},
        hosts={1: "node 1 (b)"},
        at_s=NOW,
    )
    assert "rank 1 on node 1 (b): waits in all_reduce dp" in incident.screen()
    assert "the link between this machine and node 1 (b) or the backend stands" in incident.screen()
    assert [row["host"] for row in incident.as_dict()["ranks"]] == ["", "node 1 (b)"]


@pytest.mark.parametrize(
    ("place", "cores", "waits"),
    [
        ("/v/site-packages/torch/autograd/graph.py", 0.0, True),  # DDP waits in backward
        ("/v/site-packages/torch/autograd/graph.py", 0.9, False),  # it computes there
        ("/v/site-packages/torch/distributed/distributed_c10d.py", 0.0, True),
        ("/home/me/train.py", 0.0, False),
    ],
)
def test_a_wait_in_native_code_is_told_from_work_by_stack_and_cpu(place: str, cores: float, waits: bool) -> None:
    seen = rank(Phase.COMPUTE, 4)
    assert Witness(seen=seen, kernel=Kernel("S"), cores=cores, dump=dump(place, 1, "f")).waits is waits


def test_a_rank_that_gets_no_core_is_told_from_one_that_computes_and_one_that_sleeps() -> None:
    found = [
        Witness(seen=rank(Phase.COMPUTE, 4), kernel=Kernel(state), cores=cores).is_starved
        for state, cores in (("R", 0.2), ("R", 0.9), ("S", 0.2))
    ]
    assert found == [True, False, False]


def test_the_kernel_says_how_this_process_is_and_nothing_of_one_that_is_gone() -> None:
    assert ask_kernel(2**22 + 1) == Kernel()
    assert not ask_kernel(2**22 + 1).is_stopped
    assert workers_of(2**22 + 1) == []


# -- ranks of other machines ----------------------------------------------------------------------------------


def test_what_another_machine_tells_is_read_on_the_clock_of_this_one(tmp_path: Path) -> None:
    path, sent = tmp_path / "record", []
    prepare(path)
    record = Record(str(path))
    record.stand(stage=0)
    with record.phase(Phase.COMPUTE, step=17):
        began = look(path).since_s
        afar = Afar(["a", "b"], lambda node, told: sent.append((node, told)))
        row = {"pid": 7, "alive": True, "kernel": ["S", 0.0], "record": b64encode(path.read_bytes()).decode()}
        ahead_s = time.monotonic() - 1000.0  # of a machine that was started later
        afar.hear(1, {"now": ahead_s, "ranks": {"5": row}})
        (far,) = afar.ranks()

    assert (far.rank, far.host, far.pid, far.is_alive) == (5, "node 1 (b)", 7, True)
    assert far.seen().doing == "step 17, compute"
    assert far.seen().since_s == pytest.approx(began + 1000.0, abs=0.5)
    assert not afar.is_stale(time.monotonic())
    assert afar.is_stale(time.monotonic() + 3.0), "its parent says nothing any more"

    assert far.witness(far.seen()) is None
    far.ask()
    far.ask()
    assert sent == [(1, {"look": True})], "once for all ranks of a machine"
    told = {"witness": 5, "kernel": ["T", 1.0], "cores": 0.0, "dump": "", "workers": "", "ring": ""}
    afar.hear(1, told)
    afar.ranks()
    witness = far.witness(far.seen())
    assert witness is not None
    assert witness.kernel.is_stopped


# -- stragglers -----------------------------------------------------------------------------------------------


def walked(
    steps: int, work_s: list[float], *, stages: list[int] | None = None, waited_s: float = 0.0, usual_s: float = 0.0
) -> dict[int, Seen]:
    """Ranks after some steps, each with its own work in compute per step."""

    def spent(own_s: float) -> dict[Phase, Spent]:
        waits = waited_s * steps
        return {
            Phase.COMPUTE: Spent(steps, own_s, own_s * steps + waits, waits, usual_s or own_s),
            Phase.UPDATE: Spent(steps, 0.001, 0.001 * steps, 0.0, 0.001),
        }

    return {
        number: replace(rank(Phase.COMPUTE, 0, stage=stages[number] if stages else 0), spent=spent(own_s))
        for number, own_s in enumerate(work_s)
    }


def found_in(walk: list[dict[int, Seen]], step_s: float = 1.0) -> list[Straggler]:
    stragglers, found = Stragglers(PATIENCE), []
    for number, seen in enumerate(walk):
        found += stragglers.advance(seen, NOW + number * 20 * step_s)
    return found


def test_a_rank_is_a_straggler_after_three_windows_and_is_named_once() -> None:
    slow = [walked(20 * number, [0.5, 0.5, 1.0]) for number in range(1, 9)]
    assert found_in(slow[:3]) == []
    assert [str(one) for one in found_in(slow)] == [
        "rank 2 costs 50 % of each step: its compute takes 2.0 x that of the others"
    ]


def test_time_spent_waiting_makes_no_straggler_and_nor_does_another_stage() -> None:
    waits = [walked(20 * number, [0.5, 0.5], waited_s=3.0) for number in range(1, 9)]
    stages = [walked(20 * number, [0.5, 1.0], stages=[0, 1]) for number in range(1, 9)]
    short = [walked(20 * number, [0.5, 0.7]) for number in range(1, 9)]
    assert [found_in(walk) for walk in (waits, stages, short)] == [[], [], []]


def test_a_few_steps_that_take_very_long_make_no_straggler() -> None:
    few = [walked(20 * number, [0.5, 1.0], usual_s=0.4) for number in range(1, 9)]
    assert found_in(few) == []


def test_windows_that_pass_in_no_time_are_not_judged() -> None:
    fast = [walked(20 * number, [0.001, 0.01]) for number in range(1, 9)]
    assert found_in(fast, step_s=0.01) == []


# -- shoal why ------------------------------------------------------------------------------------------------


def run_folder(tmp_path: Path, *, saved: int | None = 10, last: int = 24) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    settings = [["layout", "dp2", "--layout"], ["save-every", "10", "--save-every"], ["keep", "3", "default"]]
    settings += [["set.lr", "0.1", "--set"], ["resume", "never", "default"]]
    told = {"job": {"steps": 60}, "layout": "dp2", "command": "job.py", "settings": settings}
    (folder / "run.json").write_text(json.dumps(told))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": last, "time": 1.0, "train/loss": 1.0}) + "\n")
    if saved is not None:
        (folder / "checkpoints" / f"step_{saved:06d}").mkdir(parents=True)
    return folder


def failed(folder: Path) -> None:
    failure = Failure(rank=1, exit_code=137, type="", message="killed by SIGKILL (-9)", doing="step 26, data", step=26)
    keep_failure(folder, Outcome(exit_code=137, failures=(failure,), others=("rank 0: ended",)), time.time() - 5)


def test_why_tells_the_first_cause_first_what_was_lost_and_how_to_go_on(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    row = {
        "rank": 1,
        "step": 26,
        "phase": "data",
        "message": None,
        "inside": False,
        "state": "",
        "frame": "a.py:3 in f",
    }
    append(folder / INCIDENTS, {"time": 1.0, "kind": "straggler", "rank": 0, "text": "of an earlier start"})
    append(folder / INCIDENTS, {"time": time.time(), "kind": "standing", "ranks": [row], "others": []})
    failed(folder)

    story = tell(folder)

    assert [text.splitlines()[0] for text in story.happened] == [
        "rank 1 stood still",
        "rank 1 failed, 0 ms after the start",
        "rank 0: ended",
    ]
    assert (story.state, story.step, story.checkpoint, story.num_lost) == ("failed", 25, 10, 15)
    assert story.goes_on == f"shoal train job.py --layout dp2 --save-every 10 --set lr=0.1 --run {folder} --resume auto"
    assert "lost    15 steps since the checkpoint of step 10" in str(story)


def test_why_knows_a_run_that_is_done_and_one_that_ended_without_a_word(tmp_path: Path) -> None:
    done, cut = tmp_path / "a", tmp_path / "b"
    done.mkdir()
    cut.mkdir()
    assert tell(run_folder(done, saved=60, last=60)).state == "done"
    story = tell(run_folder(cut, saved=None))
    assert story.state == "ended"
    assert "lost    all 24 steps: there is no checkpoint" in str(story)
    assert "or all of its processes were killed at once" in str(story)


def test_why_of_another_folder_is_a_lesson(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no run's folder"):
        tell(tmp_path)


def test_a_failure_of_an_earlier_start_is_not_told_again(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    failed(folder)
    os.utime(folder / FAILURE, (1.0, 1.0))
    assert tell(folder).state == "ended"


def test_a_failure_is_forgotten_when_the_run_goes_on(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    failed(folder)
    assert (folder / FAILURE).exists()
    forget_failure(folder)
    assert tell(folder).state == "ended"
