"""Ranks that are killed or fail: all start again, and the training is the one that was never interrupted."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from forked import Parent
from jobs import Adamant

from shoal.checkpoint import newest_good, read
from shoal.history import NAME, committed, problems
from shoal.launch import run_script, warm_up
from shoal.settings import TrainSettings, resolve
from shoal.verbs.train import command
from shoal.verbs.why import tell

warm_up()


@dataclass(frozen=True, kw_only=True)
class Stumbles(Adamant):
    """A rank comes to grief in the middle of a step, as often as `falls` says."""

    steps: int = 12
    fall: Callable[[int, Path], None] = field(default=lambda step, folder: None)
    folder: Path = Path()

    def loss(self, output, batch):
        if torch.is_grad_enabled():
            self.fall(_steps_of(self.folder), self.folder)
        return super().loss(output, batch)


def _steps_of(folder: Path) -> int:
    """The step that runs: the one after what the history has."""
    with contextlib.suppress(IndexError):
        return committed(folder / NAME)[-1].step + 1
    return 1


def once(folder: Path, name: str) -> bool:
    """Of all ranks and generations the first that comes."""
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def killed_at(*steps: int) -> Callable[[int, Path], None]:
    def fall(step: int, folder: Path) -> None:
        if step in steps and once(folder, f"killed_{step}"):
            os.kill(os.getpid(), signal.SIGKILL)

    return fall


def fails_at(step_to_fail: int, times: int) -> Callable[[int, Path], None]:
    def fall(step: int, folder: Path) -> None:
        if step == step_to_fail and any(once(folder, f"failed_{time}") for time in range(times)):
            raise ValueError("no batch left")

    return fall


def train(folder: Path, fall: Callable[[int, Path], None] = lambda step, folder: None, layout="dp2", **flags):
    folder.mkdir(parents=True, exist_ok=True)
    job = Stumbles(fall=fall, folder=folder)
    settings = resolve(TrainSettings, flags={"layout": layout, "run": str(folder), "threads": 1, **flags})
    return command(job, settings, quiet=True).exit_code


def state(folder: Path):
    found, skipped = newest_good(folder)
    assert found is not None, skipped
    tree = read(found.path).tree
    assert tree["position"]["step"] == 12
    return {"model": tree["model"], "optimizer": tree["optimizer"]["state"]}


def flat(tree, prefix=""):
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {name: tensor for key, value in items for name, tensor in flat(value, f"{prefix}.{key}").items()}


def assert_equal(one: Path, other: Path, tolerance: float = 0.0):
    ours, theirs = flat(state(one)), flat(state(other))
    assert ours.keys() == theirs.keys()
    assert len(ours) > 8
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


def restarts(folder: Path):
    path = folder / "incidents.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["kind"] == "restart"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder) == 0
    return folder


@pytest.mark.parametrize(("copies", "lost"), [("1", [0, 1]), ("off", [4, 8])])
def test_a_killed_rank_costs_no_more_than_what_is_in_no_copy_and_the_end_is_bit_for_bit_the_same(
    tmp_path, whole, copies, lost, capfd
):
    assert train(tmp_path / "run", killed_at(5, 9), max_restarts=2, memory_copies=copies, save_every=100) == 0
    assert_equal(whole, tmp_path / "run")
    found = restarts(tmp_path / "run")
    assert [row["generation"] for row in found] == [1, 2]
    assert all(low <= row["lost"] <= high for row, (low, high) in zip(found, [lost, lost], strict=True)), found
    assert all("SIGKILL" in row["text"] and "compute" in row["text"] for row in found)
    assert capfd.readouterr().err.count("restart ") == 2
    rows = committed(tmp_path / "run" / NAME)
    assert [row.step for row in rows] == list(range(1, 13))
    assert problems(rows) == []
    assert rows[-1].generation == 3
    assert tell(tmp_path / "run").samples.startswith("samples once each in every epoch, steps 1 to 12")
    assert not list(Path("/dev/shm").glob(f"shoal-memory-{os.getuid()}-*/generation_2")), "freed at the end"


def test_the_disk_is_gone_back_to_where_it_is_newer(tmp_path, whole):
    assert train(tmp_path / "run", killed_at(8), max_restarts=1, memory_copies="5", save_every=3) == 0
    assert [row["step"] for row in restarts(tmp_path / "run")] in ([6], [5])  # or 6 was in flight, and memory has 5
    assert_equal(whole, tmp_path / "run")


def test_shards_and_states_of_every_rank_come_back_from_memory(tmp_path):
    assert train(tmp_path / "whole", layout="fsdp2") == 0
    assert train(tmp_path / "run", killed_at(6), layout="fsdp2", max_restarts=1, memory_copies="1") == 0
    assert restarts(tmp_path / "run")[0]["lost"] <= 1
    assert_equal(tmp_path / "whole", tmp_path / "run")


def test_an_exception_is_tried_again_and_the_same_one_in_the_same_step_is_not(tmp_path, whole, capfd):
    assert train(tmp_path / "once", fails_at(5, times=1), max_restarts=3) == 0
    assert_equal(whole, tmp_path / "once")
    assert "ValueError: no batch left" in restarts(tmp_path / "once")[0]["text"]
    assert train(tmp_path / "always", fails_at(5, times=99), max_restarts=3, memory_copies="1") == 1
    assert len(restarts(tmp_path / "always")) == 1
    assert "the same error in the same step twice" in capfd.readouterr().err


def test_what_fails_before_the_first_step_is_not_tried_again(tmp_path):
    assert train(tmp_path / "run", fails_at(1, times=99), max_restarts=3) == 1
    assert restarts(tmp_path / "run") == []


def test_one_process_is_started_again_too(tmp_path, whole):
    assert train(tmp_path / "run", killed_at(7), layout="lone", max_restarts=1, memory_copies="1") == 0
    assert_equal(whole, tmp_path / "run", tolerance=1e-12)


def test_a_group_that_goes_on_with_fewer_replicas_is_the_same_training(tmp_path, whole):
    """Restarts are used up at once: dp3, then dp2, then one process."""
    assert train(tmp_path / "run", killed_at(4, 8), layout="dp3", elastic="1:3", memory_copies="1") == 0
    assert [row["size"] for row in restarts(tmp_path / "run")] == [2, 1]
    assert_equal(whole, tmp_path / "run", tolerance=1e-12)
    assert problems(committed(tmp_path / "run" / NAME)) == []


def test_a_group_does_not_go_on_with_too_few(tmp_path, capfd):
    assert train(tmp_path / "run", killed_at(4), layout="dp2", elastic="2:2") == 137
    assert "--elastic wants at least 2" in capfd.readouterr().err


def test_a_rank_that_dies_while_it_copies_leaves_a_whole_copy(tmp_path, whole, monkeypatch):
    from shoal.checkpoint import memory

    real = memory.write_whole

    def dies(path, text):
        if json.loads(text)["step"] == 6 and "rank_00001" in path.name and once(tmp_path, "died"):
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, text)

    monkeypatch.setattr(memory, "write_whole", dies)
    assert train(tmp_path / "run", max_restarts=1, memory_copies="1") == 0
    assert [row["step"] for row in restarts(tmp_path / "run")] == [5]
    assert_equal(whole, tmp_path / "run")


SCRIPT = """
import os, sys
from pathlib import Path
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert os.environ["TORCHELASTIC_MAX_RESTARTS"] == "2"
import torch, torch.distributed as dist
dist.init_process_group("gloo")
seen = torch.ones(1)
dist.all_reduce(seen)
Path(sys.argv[1], f"{count}_{dist.get_rank()}").write_text(str(int(seen)))
dist.barrier()
if dist.get_rank() == 1 and count < int(sys.argv[2]):
    sys.exit(7)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("num_failures", "exit_code"), [(2, 0), (3, 7)])
def test_a_plain_script_is_started_again_as_by_torchrun(tmp_path, num_failures, exit_code):
    (tmp_path / "script.py").write_text(SCRIPT)
    shown: list[str] = []
    words = [str(tmp_path), str(num_failures)]
    outcome = run_script(tmp_path / "script.py", words, 2, max_restarts=2, screen=shown.append, show="none")
    assert outcome.exit_code == exit_code, shown
    assert sorted(path.name for path in tmp_path.glob("[0-9]_*")) == ["0_0", "0_1", "1_0", "1_1", "2_0", "2_1"]
    assert [text.partition(":")[0] for text in shown[:2]] == ["restart 1", "restart 2"]


def test_ctrl_c_is_no_failure(tmp_path):
    words = ["train", "digits", "--layout", "dp2", "--run", "run", "--steps", "100000", "--max-restarts", "5"]
    process = Parent(words, tmp_path, tmp_path / "said")
    until = time.monotonic() + 60
    while len(committed(tmp_path / "run" / NAME)) < 3:
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert restarts(tmp_path / "run") == []
