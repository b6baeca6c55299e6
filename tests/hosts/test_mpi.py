"""shoal under a real mpirun, where one is installed."""

import os
import subprocess
import sys

import pytest
from daemons import needs
from test_ssh import EXACT, ROOT, assert_same_training, train_alone


@pytest.mark.drill
def test_mpirun_starts_four_ranks_that_train_what_one_process_does(tmp_path):
    needs("mpirun")
    (tmp_path / "my_job.py").write_text((ROOT / "examples/my_job.py").read_text())
    train = [sys.executable, "-m", "shoal", "train", "my_job.py", *EXACT]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = ["mpirun", *root, "--oversubscribe", "-n", "4", *train, "--layout", "dp4", "--run", "four"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(mpirun, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    train_alone(tmp_path, "lone")
    assert_same_training(tmp_path, "four", "lone")
