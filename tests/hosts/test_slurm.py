"""shoal under a real Slurm of two nodes: srun's ranks, and the file that `shoal launch --slurm` writes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Slurm, until
from netns import Net, why_not
from test_ssh import DRILL, EXACT, ROOT, assert_same_training, train_alone

MANY = ("--set", "precision=fp64", "--steps", "100000", "--save-every", "1000000")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(reason)
    net = Net(2, tmp_path_factory.mktemp("slurm"))
    try:
        (net.shared / "my_job.py").write_text((ROOT / "examples/my_job.py").read_text())
        yield Slurm(net)
    finally:
        net.close()


def write_file(slurm: Slurm, file: str, *words: str) -> str:
    """What `shoal launch --slurm` prints, kept beside the job."""
    command = [sys.executable, "-m", "shoal", "launch", "--slurm", *words]
    done = subprocess.run(command, cwd=slurm.folder, capture_output=True, text=True, timeout=60, check=True)
    (slurm.folder / file).write_text(done.stdout)
    return done.stdout


def submit(slurm: Slurm, file: str) -> str:
    """The job's number."""
    done = slurm.run("sbatch", "--parsable", file)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def logged(folder: Path) -> int:
    """Steps in a run's metrics."""
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.drill
def test_srun_starts_ranks_on_two_nodes_that_train_what_one_process_does(slurm):
    train = [sys.executable, "-m", "shoal", "train", "my_job.py", "--layout", "dp2", *EXACT, "--run", "ranks"]
    done = slurm.run("srun", "-N", "2", "-n", "2", *train, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    train_alone(slurm.folder, "lone")
    assert_same_training(slurm.folder, "ranks", "lone")


@DRILL
@pytest.mark.drill
def test_the_file_for_sbatch_trains_on_two_nodes_and_a_plain_script_runs_too(slurm):
    words = ("--nodes", "2", "--nproc-per-node", "2", "--time", "00:05:00", "--sbatch", "comment=x")
    write_file(slurm, "train.sh", *words, "my_job.py", "--", "--layout", "dp4", *EXACT, "--run", "filed")
    job = submit(slurm, "train.sh")
    until(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), f"end of job {job}")
    said = (slurm.folder / f"my-job-{job}.out").read_text()
    assert slurm.state(job) == "COMPLETED", said
    assert "done at step 6" in said
    train_alone(slurm.folder, "lone4")
    assert_same_training(slurm.folder, "filed", "lone4")

    (slurm.folder / "script.py").write_text("import os\nprint('RANK', os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    write_file(slurm, "script.sh", *words, "script.py")
    job = submit(slurm, "script.sh")
    until(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), f"end of job {job}")
    assert "RANK 0 4" in (slurm.folder / f"script-{job}.out").read_text()


@DRILL
@pytest.mark.drill
@pytest.mark.parametrize("to", [(), ("--batch",)], ids=["steps", "script"])
def test_sigusr1_saves_and_the_job_is_queued_again_and_goes_on(slurm, to):
    """As Slurm sends it before the limit: to the script; and as `scancel --signal=USR1` does, to the ranks' parents."""
    run = slurm.folder / f"asked{len(to)}"
    words = ("--nodes", "2", "--name", run.name, "my_job.py", "--", "--layout", "dp2", *MANY, "--run", run.name)
    write_file(slurm, "long.sh", *words)
    job = submit(slurm, "long.sh")
    until(lambda: logged(run) > 3, "steps")
    done = slurm.run("scancel", "--signal=USR1", *to, job)
    assert done.returncode == 0, done.stderr
    until(lambda: any(run.glob("checkpoints/step_*")), "a checkpoint")
    (first,) = run.glob("checkpoints/step_*")
    saved, before = int(first.name.removeprefix("step_")), logged(run)
    assert saved < 100_000
    out = slurm.folder / f"{run.name}-{job}.out"
    on = f"(step {saved}, saved under layout dp2)"
    until(lambda: on in out.read_text(), "queued again, and resumed")
    until(lambda: logged(run) > before, "steps after the resume")
    slurm.run("scancel", job)
    until(lambda: slurm.state(job) in ("CANCELLED", "gone"), "the end")
    assert len(list(run.glob("checkpoints/step_*"))) == 2  # SIGTERM has saved too, and the end is the end
