"""`shoal train` as people start it: from a shell, under a launcher, from Python; stopped, killed, and taken up again.

The command line runs in processes forked from this one, which has torch already; a new interpreter only where the
start itself is the claim.
"""

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import psutil
import pytest
import torch
from forked import Done, Started, fork, run, start, well
from torch.utils._pytree import tree_flatten_with_path

import shoal
import shoal.cli
from shoal.checkpoint import newest_good, read
from shoal.errors import LaunchError
from shoal.settings import TrainSettings, resolve
from shoal.verbs.train import command

JOB = """
    from dataclasses import dataclass
    import torch
    from torch import nn
    from shoal import Job, mean_loss

    class Noisy:
        def __len__(self):
            return 22

        def __getitem__(self, index):
            return torch.randn(4) + index % 3, index % 3

    @dataclass(frozen=True, kw_only=True)
    class Mine(Job):
        batch_size: int = 5
        steps: int = 4
        lr: float = 0.1
        width: int = 8

        def model(self):
            width = self.width
            return nn.Sequential(nn.Linear(4, width, bias=False), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3))

        def data(self):
            return Noisy()

        def loss(self, output, batch):
            return mean_loss(nn.functional.cross_entropy(output, batch[1], reduction="none"))

        def optimizer(self, params):
            return torch.optim.SGD(params, lr=self.lr, momentum=0.9)
"""
ENDLESS = 1_000_000  # steps: the run ends because the test ends it


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a job of a user's."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(JOB))
    return tmp_path


def losses(run_folder: Path) -> list[float]:
    events = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [event["train/loss"] for event in events if "train/loss" in event]


def steps_in(run_folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in run_folder.glob("checkpoints/step_??????"))


def tensors(run_folder: Path, step: int) -> dict[str, Any]:
    """Everything that a checkpoint holds, by path."""
    leaves, _ = tree_flatten_with_path(read(run_folder / "checkpoints" / f"step_{step:06d}").tree)
    return {"".join(map(str, path)): leaf for path, leaf in leaves}


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert any(isinstance(leaf, torch.Tensor) for leaf in expected.values())
    for name, leaf in expected.items():
        same = torch.equal(found[name], leaf) if isinstance(leaf, torch.Tensor) else found[name] == leaf
        assert same, name


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the job in dp2, started by shoal itself."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "mine.py").write_text(textwrap.dedent(JOB))
    well(run("train mine.py --layout dp2", folder))
    found = losses(folder / "runs" / "mine")
    assert len(found) == 4
    assert found[-1] != found[0]
    return found


# --- started in every way, the same run


def test_the_origin_of_each_value_is_printed_and_kept(folder: Path) -> None:
    (folder / "run.toml").write_text("save-every = 2\nkeep = 9\n[set]\nlr = 0.2\n")
    done = well(
        run("train mine.py --nproc_per_node 2 --config run.toml --steps 3", folder, SHOAL_KEEP=1, SHOAL_SET="seed=7")
    )
    rows = [line.split(maxsplit=2) for line in done.out.splitlines()[:20]]
    for row in (
        ["layout", "dp2", "--nproc-per-node"],
        ["steps", "3", "--steps"],
        ["save-every", "2", "run.toml"],
        ["keep", "1", "SHOAL_KEEP"],
        ["resume", "never", "default"],
        ["set.lr", "0.2", "run.toml"],
        ["set.seed", "7", "SHOAL_SET"],
    ):
        assert row in rows
    kept = json.loads((folder / "runs/mine/run.json").read_text())
    assert ["keep", "1", "SHOAL_KEEP"] in kept["settings"]
    assert (kept["job"]["lr"], kept["job"]["seed"], kept["job"]["steps"], kept["layout"]) == (0.2, 7, 3, "dp2")
    assert steps_in(folder / "runs/mine") == [3]
    assert sorted(path.name for path in (folder / "runs/mine/logs").iterdir()) == ["rank_0.log", "rank_1.log"]


def test_lone_and_dp2_are_the_same_training(folder: Path, expected: list[float]) -> None:
    well(run("train mine.py", folder))
    assert losses(folder / "runs/mine") == pytest.approx(expected, rel=1e-5)


def torchrun(*words: str, folder: Path) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    with (folder / "out").open("ab") as out:
        return subprocess.Popen([*launcher, *words], cwd=folder, stdout=out, stderr=subprocess.STDOUT)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_torchrun_starts_the_same_run(folder: Path, expected: list[float]) -> None:
    process = torchrun("--standalone", "--nproc-per-node", "2", "-m", "shoal", "train", "mine.py", folder=folder)
    assert process.wait(90) == 0, (folder / "out").read_text()
    assert losses(folder / "runs/mine") == expected
    table = [line.split(maxsplit=2) for line in (folder / "out").read_text().splitlines()]
    assert table.count(["layout", "dp2", "torchrun, 2 processes"]) == 1


@pytest.mark.drill
def test_two_agents_of_torchrun_start_the_same_run(folder: Path, expected: list[float]) -> None:
    meet = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    agents = [
        torchrun(*meet, "--node-rank", str(node), "-m", "shoal", "train", "mine.py", folder=folder) for node in (0, 1)
    ]
    assert [agent.wait(90) for agent in agents] == [0, 0], (folder / "out").read_text()
    assert losses(folder / "runs/mine") == expected


def open_mpi(rank: int) -> dict[str, object]:
    names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}


def slurm(rank: int) -> dict[str, object]:
    step = {"STEP_ID": 0, "JOB_ID": os.getpid(), "STEP_NUM_TASKS": 2, "STEP_NUM_NODES": 1, "STEP_NODELIST": "localhost"}
    mine = {"PROCID": rank, "LOCALID": rank, "NODEID": 0, "NTASKS": 2, "STEP_TASKS_PER_NODE": 2}
    return {f"SLURM_{name}": value for name, value in {**step, **mine}.items()}


@pytest.mark.parametrize("launcher", [open_mpi, slurm])
def test_mpirun_and_srun_start_the_same_run(
    launcher: Callable[[int], dict[str, object]], folder: Path, expected: list[float]
) -> None:
    ranks = [start("train mine.py --json", folder, **launcher(rank)) for rank in (0, 1)]
    done = [well(rank.wait()) for rank in ranks]
    assert losses(folder / "runs/mine") == expected
    assert json.loads(done[0].out)["figures"]["train/loss"] == expected[-1]
    assert done[1].out == ""


def test_python_starts_the_same_run(folder: Path, expected: list[float]) -> None:
    code = "import shoal; print(shoal.train('mine.py', 'dp2', steps=4).folder)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "runs/mine"
    assert losses(folder / "runs/mine") == expected


def test_a_notebook_trains_a_class_of_its_own_again_and_again(folder: Path, expected: list[float]) -> None:
    """Cells run in a thread here, and the class lives in __main__, of which there is no file."""
    cells = (
        textwrap.dedent(JOB),
        "import shoal; torch.set_num_threads(3); first = shoal.train(Mine(), 'dp2', device='cpu')",
        "threads_left = torch.get_num_threads(); torch.set_num_threads(1)",
        "second = shoal.train(Mine(), set={'lr': '0.2'}, device='cpu')",
        "third = shoal.train(Mine(), 'dp2', device='cpu')",
    )

    def notebook() -> None:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        shell = threading.Thread(target=lambda: [exec(cell, main.__dict__) for cell in cells])
        shell.start()
        shell.join()
        print(main.threads_left, main.first.folder, main.second.folder, main.third.folder)

    done = well(fork(notebook, folder).wait())
    assert done.out.splitlines()[-1] == "3 runs/mine runs/mine-2 runs/mine-3"
    assert losses(folder / "runs/mine") == losses(folder / "runs/mine-3") == expected
    assert losses(folder / "runs/mine-2")[-1] != pytest.approx(expected[-1], rel=1e-3)


def fresh(job: Any, **flags: Any) -> Callable[[], None]:
    """As where the device is a GPU: each rank is a new interpreter, and is told everything in JSON."""
    settings = resolve(TrainSettings, flags={"layout": "dp2", "device": "cpu", **flags})
    return lambda: sys.exit(command(job, settings, fresh=True).exit_code)


@pytest.mark.parametrize(
    "which",
    [pytest.param("mine.py:Mine", marks=pytest.mark.drill, id="name"), pytest.param(jobs.Points(steps=4), id="object")],
)
def test_fresh_processes_make_the_same_run(which: Any, folder: Path, expected: list[float]) -> None:
    if not isinstance(which, str):
        well(fork(lambda: shoal.train(which, "dp2", run="forked"), folder).wait())
        expected = losses(folder / "forked")
    well(fork(fresh(which, run="fresh"), folder).wait())
    assert losses(folder / "fresh") == expected


@dataclass(frozen=True, kw_only=True)
class Unspeakable(jobs.Points):
    thing: object = object


def test_a_job_that_fresh_processes_cannot_import_is_refused_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))

    @dataclass(frozen=True, kw_only=True)
    class Local(jobs.Points):
        pass

    with contextlib.chdir(folder):
        with pytest.raises(
            LaunchError, match=r"Local is defined in test_cli_train, in a function.*jobs/mine\.py:Local"
        ):
            fresh(Local())()
        with pytest.raises(LaunchError, match="JSON serializable"):
            fresh(Unspeakable())()
        with pytest.raises(LaunchError, match="rebuilt from its fields it is another one"):
            fresh(Unspeakable(thing=(1, 2)))()  # JSON has lists alone
        assert not (folder / "runs").exists()


def test_two_runs_at_once_have_two_folders_and_equal_losses(folder: Path, expected: list[float]) -> None:
    both = [start("train mine.py --layout dp2", folder) for _ in range(2)]
    for one in both:
        well(one.wait())
    assert losses(folder / "runs/mine") == losses(folder / "runs/mine-2") == expected


# --- the flags of a run


def test_checkpoints_are_saved_as_often_and_kept_as_many_as_told(folder: Path) -> None:
    words = "train mine.py --steps 7 --save-every 2 --keep 2 --log-every 3 --run here --json"
    told = json.loads(well(run(words, folder)).out)
    assert (told["folder"], told["exit_code"], told["figures"]["step"]) == ("here", 0, 7)
    assert steps_in(folder / "here") == [6, 7]
    logged = [json.loads(line)["step"] for line in (folder / "here/metrics.jsonl").read_text().splitlines()]
    assert logged == [1, 3, 6, 7]


def test_resume_takes_the_newest_run_or_the_one_that_is_named(folder: Path) -> None:
    for steps in (2, 3):
        well(run(f"train mine.py --steps {steps}", folder))
    well(run("train mine.py --steps 5 --resume auto", folder))
    assert steps_in(folder / "runs/mine-2") == [3, 5]
    done = well(run("train mine.py --steps 4 --resume runs/mine", folder))
    assert "resumed from runs/mine/checkpoints/step_000002" in done.out
    assert steps_in(folder / "runs/mine-3") == [4]
    assert not (folder / "runs/mine-4").exists()


def test_nothing_left_to_train_is_said_and_too_few_steps_are_refused(folder: Path) -> None:
    well(run("train mine.py --steps 3 --run here", folder))
    again = well(run("train mine.py --steps 3 --run here --resume auto", folder))
    assert "nothing left to train: all 3 steps are done" in again.out
    elsewhere = well(run("train mine.py --steps 3 --resume here --run other", folder))
    assert "nothing left to train" in elsewhere.out
    fewer = run("train mine.py --steps 2 --run here --resume auto", folder)
    assert (fewer.code, "is of step 3, and 2 steps are asked for" in fewer.err) == (2, True)
    first = well(run("train mine.py --steps 3 --run new --resume auto", folder))
    assert "no checkpoint to resume from in new: starts at step 0" in first.out


def test_a_checkpoint_is_listed_and_exported(folder: Path) -> None:
    assert run("checkpoint ls .", folder).code == 1
    well(run("train mine.py --run here", folder))
    (row,) = json.loads(well(run("checkpoint ls here --json", folder)).out)
    assert (row["step"], row["state"]) == (4, "good")
    told = json.loads(well(run("checkpoint export here --to model.pt --json", folder)).out)
    assert told["step"] == 4
    model = torch.load(folder / "model.pt", weights_only=True)
    assert set(model) >= {"0.weight", "1.running_mean", "3.weight"}
    (path,) = (folder / "here").glob("checkpoints/step_*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    damaged = run("checkpoint ls here", folder)
    assert (damaged.code, "damaged" in damaged.out) == (1, True)
    refused = run("checkpoint export here --to other.pt --json", folder)
    assert (refused.code, json.loads(refused.out)["exit_code"]) == (2, 2)
    assert not (folder / "other.pt").exists()


def test_launch_gives_the_exit_code_and_the_failures(folder: Path) -> None:
    (folder / "script.py").write_text(
        "import os, sys\nprint(sys.argv[1:])\nif os.environ['RANK'] == '1':\n    raise ValueError('no')\n"
    )
    done = run("launch --json --nproc-per-node 2 script.py", folder)
    told = json.loads(done.out)
    assert (done.code, told["exit_code"]) == (1, 1)
    assert [(f["rank"], f["type"], f["message"]) for f in told["failures"]] == [(1, "ValueError", "no")]
    assert well(run("launch script.py -- --lr 3", folder)).out == "['--lr', '3']\n"


# --- failures


def test_an_error_in_the_job_file_is_found_before_a_process_or_a_folder_is_made(folder: Path) -> None:
    (folder / "bad.py").write_text("def f():\n    return 1 / 0\n\nf()\n")
    done = run("train bad.py --layout dp2", folder)
    assert done.code == 2
    assert done.err.count("ZeroDivisionError: division by zero") == 1
    assert 'bad.py", line 4, in <module>' in done.err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("layout", ["lone", "dp2", "lone:workers=1", "dp2:workers=1"])
def test_an_error_in_a_step_is_code_1_with_the_users_line(layout: str, folder: Path) -> None:
    text = (folder / "mine.py").read_text().replace("index % 3, index % 3", "index % 3, {0: 0, 11: 1, 21: 0}[index]")
    (folder / "mine.py").write_text(text)
    done = run(f"train mine.py --layout {layout}", folder)
    assert done.code == 1
    assert "KeyError" in done.err
    assert "mine.py" in done.err
    assert "in __getitem__" in done.err
    if layout != "lone:workers=1":  # Python's own traceback, with all that torch says
        assert "DataLoader worker" not in done.err


@pytest.mark.parametrize("layout", ["lone:workers=1", "dp2:workers=1"])
def test_a_lesson_of_a_loader_worker_is_shown_without_a_traceback(layout: str, folder: Path) -> None:
    text = "from shoal.errors import DataError\n" + (folder / "mine.py").read_text()
    lesson = "        if index == 3:\n            raise DataError('sample 3 is torn.')\n"
    (folder / "mine.py").write_text(text.replace("        return torch.randn", lesson + "        return torch.randn"))
    done = run(f"train mine.py --layout {layout} --steps 5 --json", folder)  # a whole epoch
    assert done.code == 2
    assert [line.partition(": ")[2] for line in done.err.splitlines() if line] == ["sample 3 is torn."]


def test_a_job_that_is_refused_alone_leaves_no_folder(folder: Path) -> None:
    frozen = (
        (folder / "mine.py").read_text().replace("nn.Linear(width, 3))", "nn.Linear(width, 3)).requires_grad_(False)")
    )
    (folder / "mine.py").write_text(frozen)
    done = run("train mine.py", folder)
    assert (done.code, "no trainable parameter" in done.err) == (2, True)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("layout", ["lone", "dp2"])
def test_a_job_that_is_refused_in_its_first_step_leaves_no_folder(layout: str, folder: Path) -> None:
    text = (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(text.replace('reduction="none"))', 'reduction="none")).value'))
    done = run(f"train mine.py --layout {layout}", folder)
    assert (done.code, "not a Sum(value, count)" in done.err) == (2, True)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("run_folder", ["mine.py", "mine.py/deeper", "/proc/nowhere"])
def test_a_run_folder_that_cannot_be_made_is_a_mistake(run_folder: str, folder: Path) -> None:
    for layout in ("lone", "dp2"):
        done = run(f"train mine.py --layout {layout} --run {run_folder}", folder)
        assert done.code == 2
        assert f"CheckpointError: the run folder {run_folder} cannot be made: " in done.err
        assert "Choose another: --run DIR" in done.err


def limited(words: str, folder: Path, num_bytes: int) -> Done:
    """With files that cannot grow beyond a size: what a full disk looks like to a program."""

    def main() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        sys.argv = ["shoal", *words.split()]
        shoal.cli.main()

    return fork(main, folder).wait()


@pytest.mark.parametrize("layout", ["lone", "dp2"])
def test_a_full_disk_keeps_the_old_checkpoint_and_is_told(layout: str, folder: Path) -> None:
    words = f"train mine.py --layout {layout} --set width=2000 --run here"
    well(run(f"{words} --steps 2", folder))
    (data,) = (folder / "here").glob("checkpoints/step_*/*.safetensors")
    done = limited(f"{words} --steps 5 --save-every 1 --resume auto", folder, data.stat().st_size // 2)
    assert steps_in(folder / "here") == [2]
    assert "training goes on" in done.out
    assert "step 5/5" in done.out
    assert "step 5 is done, but its checkpoint could not be written" in done.err
    assert done.code == 2
    well(run(f"{words} --steps 5 --resume auto", folder))


# --- stopped


def wait_for_a_step(started: Started, run_folder: Path, step: int = 2) -> None:
    """Until the run is in the midst of its steps."""
    end = time.monotonic() + 60
    while time.monotonic() < end and started.process.is_alive():
        with contextlib.suppress(FileNotFoundError):
            if len((run_folder / "metrics.jsonl").read_bytes().splitlines()) >= step:
                return
        time.sleep(0.01)
    raise AssertionError(f"no step {step} was logged: {(started.folder / 'err').read_text()}")


def assert_resumes_bit_equal(folder: Path, run_folder: Path, options: str, *, more: int = 2) -> None:
    """What was left is the uninterrupted run's state at that step, and so is what comes of it."""
    found, skipped = newest_good(run_folder / "checkpoints")
    assert found is not None
    assert skipped == []
    last = found.step + more
    left = tensors(run_folder, found.step)
    well(run(f"train mine.py {options} --steps {last} --run {run_folder} --resume auto --json", folder))
    well(run(f"train mine.py {options} --steps {last} --run whole --save-every {found.step} --json", folder))
    assert_same_state(left, tensors(folder / "whole", found.step))
    assert_same_state(tensors(run_folder, last), tensors(folder / "whole", last))


@pytest.mark.parametrize("layout", ["lone", "dp2:workers=1"])
def test_sigterm_saves_and_ends_with_143_and_the_run_goes_on_bit_equal(layout: str, folder: Path) -> None:
    options = f"--layout {layout} --log-every 1"
    started = start(f"train mine.py {options} --steps {ENDLESS} --run here", folder)
    wait_for_a_step(started, folder / "here")
    os.kill(started.pid, signal.SIGTERM)
    done = started.wait(20)
    assert done.code == 143
    assert "stopped on request at step" in done.out
    assert steps_in(folder / "here") == [len(losses(folder / "here"))]
    assert_resumes_bit_equal(folder, folder / "here", options)


def test_sigterm_to_torchrun_saves_too(folder: Path) -> None:
    words = f"-m shoal train mine.py --steps {ENDLESS} --run-dir here --log-every 1"  # torchrun trips over --run
    process = torchrun("--standalone", "--nproc-per-node", "2", *words.split(), folder=folder)
    end = time.monotonic() + 60
    metrics = folder / "here/metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes()) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) != 0
    assert steps_in(folder / "here") == [len(losses(folder / "here"))]
    assert_resumes_bit_equal(folder, folder / "here", "--layout dp2")


@pytest.mark.parametrize("layout", ["lone", "dp2"])
def test_sigterm_before_there_are_ranks_ends_at_once_with_a_line(layout: str, folder: Path) -> None:
    waits = "import pathlib, time\npathlib.Path('here').touch()\ntime.sleep(60)\n"
    (folder / "slow.py").write_text(waits + (folder / "mine.py").read_text())
    started = start(f"train slow.py --layout {layout}", folder)
    end = time.monotonic() + 60
    while not (folder / "here").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait(20) == Done(143, "", "SIGTERM: ended; no rank was running.\n")
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("layout", ["lone", "dp2"])
def test_ctrl_c_is_code_130_without_a_traceback(layout: str, folder: Path) -> None:
    started = start(f"train mine.py --layout {layout} --steps {ENDLESS} --run here --log-every 1", folder)
    wait_for_a_step(started, folder / "here")
    os.kill(started.pid, signal.SIGINT)
    done = started.wait(20)  # benchmarks/stopwatch.py has the seconds
    assert done.code == 130
    assert "Traceback" not in done.err


def test_ctrl_c_reaches_a_notebook_as_such(folder: Path) -> None:
    def cell() -> None:
        try:
            shoal.train("mine.py", "dp2", steps=ENDLESS, run="here", log_every=1)
        except KeyboardInterrupt:
            print("interrupted")

    started = fork(cell, folder)
    wait_for_a_step(started, folder / "here")
    os.kill(started.pid, signal.SIGINT)
    assert "interrupted" in well(started.wait(20)).out


# --- killed


def processes_in(folder: Path) -> list[psutil.Process]:
    """Every process that works in a folder: the start, its ranks, their loader workers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def left_over(folder: Path, within_s: float) -> list[psutil.Process]:
    end = time.monotonic() + within_s
    while (found := processes_in(folder)) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def victim(started: Started, draw: random.Random) -> int:
    """The parent, or one of its ranks."""
    ranks = psutil.Process(started.pid).children()
    return draw.choice([started.pid, *(rank.pid for rank in ranks)])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.drill) for seed in range(1, 4))])
def test_killed_at_any_time_no_process_and_no_checkpoint_is_lost(seed: int, folder: Path) -> None:
    """Five kills of one run, each taken up again: nobody survives, and the end is that of a run without any."""
    options, draw = "--layout dp2:workers=1", random.Random(seed)
    newest = 0
    for number in range(5):
        words = f"train mine.py {options} --steps {ENDLESS} --run here --resume auto --save-every 1 --log-every 1"
        started = start(words, folder)
        if number == 4:
            wait_for_a_step(started, folder / "here", newest + 2)
        # A wait that is the experiment: early ones hit the start, late ones the steps and the saves.
        time.sleep(draw.uniform(0.1, 2.0))
        assert started.process.is_alive()
        os.kill(victim(started, draw), signal.SIGKILL)
        assert left_over(folder, within_s=20) == []
        assert started.wait(5).code != 0
        newest = check_newest(folder / "here", newest)
    assert newest > 0
    assert_resumes_bit_equal(folder, folder / "here", options)


def check_newest(run_folder: Path, before: int) -> int:
    """The step of the newest checkpoint: all are whole, none is lost but those of the last two steps."""
    if not (run_folder / "metrics.jsonl").exists():
        assert before == 0
        return 0
    found, skipped = newest_good(run_folder / "checkpoints")
    step = found.step if found else 0
    assert skipped == []
    assert step >= before
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    assert step >= max((json.loads(line)["step"] for line in lines), default=0) - 2
    return step
