"""run_script(): a plain distributed script, unchanged, as under torchrun."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from shoal.errors import LaunchError
from shoal.launch import run_script, warm_up

warm_up()

TELL = """
    import json, os, sys
    told = {"argv": sys.argv, "name": __name__, "path": sys.path[0], "stdin": sys.stdin.read(), "env": dict(os.environ)}
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, f"told_{os.environ['RANK']}.json"), "w") as file:
        json.dump(told, file)
"""
ADD_UP = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    assert value == {total}, value
    dist.destroy_process_group()
"""


def write(folder, code, name="script.py", **values):
    path = folder / name
    path.write_text(textwrap.dedent(code.format(**values) if values else code))
    return path


def run(script, args=(), num_ranks=2, **options):
    shown: list[str] = []
    outcome = run_script(script, args, num_ranks, screen=shown.append, show="none", **options)
    return outcome, "\n".join(shown)


def told(folder, rank):
    return json.loads((folder / f"told_{rank}.json").read_text())


def test_a_script_finds_the_environment_that_torchrun_gives(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        write(folder, TELL)
    outcome, _ = run(ours / "script.py", ["--lr", "0.1", "a b"])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*torchrun, "script.py", "--lr", "0.1", "a b"], cwd=theirs, check=True, timeout=100, stdin=subprocess.DEVNULL
    )

    assert outcome.exit_code == 0
    # Ours to choose: where to meet, the run's name, where `@record` would write, what torchrun's agent listens to.
    chosen = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    chosen |= {"TORCHELASTIC_SIGNALS_TO_HANDLE", "PWD", "OLDPWD", "LINES", "COLUMNS"}
    for rank in (0, 1):
        our, their = told(ours, rank), told(theirs, rank)
        assert our["argv"] == [str(ours / "script.py"), "--lr", "0.1", "a b"]
        assert (our["argv"][1:], our["name"], our["stdin"]) == (their["argv"][1:], their["name"], their["stdin"])
        assert (our["path"], their["path"]) == (str(ours), str(theirs))
        new = {k: v for k, v in their["env"].items() if os.environ.get(k) != v and k not in chosen}
        needed = {k: v for k, v in new.items() if not k.startswith("TORCH_NCCL")}
        assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"} <= set(needed)
        assert {k: our["env"].get(k) for k in needed} == needed


def test_ranks_meet_over_env_while_the_usual_port_is_taken_and_another_run_goes_on(tmp_path):
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        busy.bind(("127.0.0.1", 29500))  # torch's own default
        busy.listen()
        codes = {}

        def one_run(size):
            script = write(tmp_path, ADD_UP, f"add_{size}.py", total=size * (size + 1) / 2)
            codes[size] = run(script, num_ranks=size)[0].exit_code

        threads = [threading.Thread(target=one_run, args=(size,)) for size in (2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert codes == {2: 0, 3: 0}


def test_a_script_that_knows_only_its_own_flags_works(tmp_path):
    code = """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=-1)
        parser.add_argument("--epochs", type=int)
        assert parser.parse_args().epochs == 3
    """
    assert run(write(tmp_path, code), ["--epochs", "3"])[0].exit_code == 0


def test_leftovers_of_slurm_and_mpi_do_not_make_every_rank_rank_0(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    code = """
        import os
        rank = int(os.environ.get("SLURM_PROCID", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ["RANK"])))
        assert rank == int(os.environ["RANK"])
        assert os.environ["SLURM_JOB_ID"] == "77"
    """
    assert run(write(tmp_path, code))[0].exit_code == 0


def test_a_module_is_run_by_name(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    write(package, TELL, "tool.py")
    monkeypatch.chdir(tmp_path)
    assert run("some_package.tool", ["x"], module=True)[0].exit_code == 0
    said = told(package, 1)
    assert (said["name"], said["argv"], said["path"]) == ("__main__", [str(package / "tool.py"), "x"], str(tmp_path))


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [
        ("import sys; sys.exit(7)", 7, "SystemExit: sys.exit(7)"),
        ("import sys; sys.exit('no data')", 1, "SystemExit: sys.exit('no data')"),
        ("import sys; sys.exit(0)", 0, ""),
        ("raise OSError('disk')", 1, "OSError: disk"),
    ],
)
def test_a_scripts_exit_code_is_kept(tmp_path, code, exit_code, error):
    outcome, _ = run(write(tmp_path, code), num_ranks=1)
    assert outcome.exit_code == exit_code
    assert [failure.error for failure in outcome.failures] == ([error] if error else [])


def test_the_screen_shows_the_scripts_frame_and_nothing_of_the_launcher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "def step(x):\n    return x.missing\n\nstep(3)\n")
    outcome, shown = run("script.py")
    assert outcome.failures[0].user_frame == "script.py:2 in step"
    assert "at script.py:2 in step:  return x.missing" in shown
    assert "runpy" not in shown
    assert "shoal/launch" not in shown


def test_a_syntax_error_is_shown_where_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "x = 1\ny = = 2\n")
    failure = run("script.py")[0].failures[0]
    assert (failure.type, failure.user_frame, failure.source_line) == ("SyntaxError", "script.py:2", "y = = 2")


def test_a_scripts_exit_handlers_and_threads_end_as_in_a_process_of_its_own(tmp_path):
    code = f"""
        import atexit, tempfile, threading, time
        words = open({str(tmp_path / "words")!r}, "a")
        atexit.register(lambda: (words.write("handler"), words.close()))
        threading.Thread(target=lambda: (time.sleep(0.2), words.write("thread "))).start()
    """
    assert run(write(tmp_path, code), num_ranks=1)[0].exit_code == 0
    assert (tmp_path / "words").read_text() == "thread handler"


def test_ranks_that_seed_nothing_draw_different_numbers(tmp_path):
    code = """
        import os, random, sys
        import numpy
        with open(os.path.join(sys.path[0], "drawn_" + os.environ["RANK"]), "w") as file:
            file.write(f"{random.random()}\\n{numpy.random.rand()}")
    """
    run(write(tmp_path, code))
    one, two = ((tmp_path / f"drawn_{rank}").read_text().splitlines() for rank in (0, 1))
    assert all(a != b for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [("scrpt.py", "Did you mean 'script.py'"), ("", "is a folder"), ("no/x.py", "There is no script in")],
)
def test_a_script_that_is_not_there_is_refused(tmp_path, name, words):
    write(tmp_path, TELL)
    with pytest.raises(LaunchError, match=words):
        run(tmp_path / name)


def test_fresh_processes_do_the_same_and_tell_their_errors(tmp_path):
    script = write(
        tmp_path, ADD_UP + TELL.replace("{", "{{").replace("}", "}}") + "    raise KeyError('end')", total=3.0
    )
    outcome, _ = run(script, ["--x"], fresh=True)
    assert outcome.failures[0].error == "KeyError: 'end'"
    assert outcome.failures[0].user_frame.startswith(str(script))
    assert told(tmp_path, 1)["argv"] == [str(script), "--x"]
    assert told(tmp_path, 1)["env"]["OMP_NUM_THREADS"] == told(tmp_path, 0)["env"]["OMP_NUM_THREADS"]


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "raise ValueError"])
def test_what_a_script_made_lives_until_its_process_ends_and_its_open_files_are_written(tmp_path, end):
    """A process group that is freed on the way out may wait for its own threads for ever."""
    code = f"""
        import pathlib, sys, weakref
        file = open(sys.path[0] + "/words", "w")
        file.write("not closed")
        made = set()
        weakref.finalize(made, pathlib.Path(sys.path[0], "freed").touch).atexit = False
        {end}
    """
    assert run(write(tmp_path, code), num_ranks=1)[0].exit_code == (1 if "raise" in end else 0)
    assert not (tmp_path / "freed").exists()
    assert (tmp_path / "words").read_text() == "not closed"


def test_a_model_that_outlives_its_process_group_does_not_hang_the_end(tmp_path):
    """Without care every third run hangs, under torchrun too; one in 40 such tests would not notice."""
    code = """
        import faulthandler, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        faulthandler.dump_traceback_later(10, exit=True)

        def main():
            dist.init_process_group("gloo")
            model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
            dist.destroy_process_group()

        main()
    """
    script = write(tmp_path, code)
    assert [run(script)[0].exit_code for _ in range(8)] == [0] * 8
