"""Files for batch systems: what they start, every choice a line of its own, and what cannot be written so."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

import shoal.cli
from shoal.errors import LaunchError
from shoal.launch.asked import Asked, names_job
from shoal.launch.kubernetes import manifest
from shoal.launch.slurm import sbatch

ROOT = Path(__file__).parents[2]
JOB = "from shoal import Job\nclass Mine(Job):\n    pass\n"
RUNS = "if __name__ == '__main__':\n    print(1)\n"


@pytest.mark.parametrize(
    ("what", "is_job"),
    [
        ("digits", True),
        ("module:Name", True),
        ("jobs/any.py:Name", True),
        (str(ROOT / "examples/my_job.py"), True),
        (str(ROOT / "examples/own_loop.py"), False),
        (str(ROOT / "examples/ddp_script.py"), False),
    ],
)
def test_a_job_is_told_from_a_script_without_running_either(what, is_job):
    assert names_job(what) is is_job


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (JOB + RUNS, r"also does something when it runs. To train a job of it, name that: x.py:Name"),
        ("from base import Mine\nclass Big(Mine):\n    pass\n", r"holds no class X\(Job\) and does nothing"),
        ("class", "is no Python"),
    ],
)
def test_a_file_that_could_be_either_is_refused(tmp_path, monkeypatch, text, reason):
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(text)
    with pytest.raises(LaunchError, match=reason):
        names_job("x.py")
    with pytest.raises(LaunchError, match=r"Did you mean 'x\.py'"):
        names_job("y.py")
    with pytest.raises(LaunchError, match="no job and no script"):
        names_job("script")


def asked(*arguments: str, what: str = "digits", **changes: object) -> Asked:
    return Asked.of(what, list(arguments), **{"nnodes": "2", "processes": "4", "wrote": "shoal launch ..."} | changes)


def directives(text: str) -> dict[str, str]:
    """`--nodes=2   # why` -> nodes: 2; each line says why."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            told, why = line.removeprefix("#SBATCH --").split(" # ")
            assert why
            name, _, value = told.strip().partition("=")
            assert name not in found
            found[name] = value
    return found


def test_the_file_for_sbatch_says_every_choice_once_and_is_a_script_that_bash_can_read(tmp_path):
    request = asked("--layout", "dp8", "--set", "text=it's $HOME", gpus=4)
    text = sbatch(request, folder=Path("/a folder"), time="04:00:00", partition="gpu", options=["account=x"])
    assert directives(text) == {
        "job-name": "digits",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "4",
        "gpus-per-node": "4",
        "time": "04:00:00",
        "partition": "gpu",
        "output": "%x-%j.out",
        "open-mode": "append",
        "signal": "B:USR1@120",
        "requeue": "",
        "account": "x",
    }
    assert "cd '/a folder' ||" in text
    assert "--run runs/digits --resume auto" in text
    assert """--set 'text=it'"'"'s $HOME'""" in text
    assert "trap 'kill -USR1" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_plain_script_is_asked_to_end_and_not_queued_again():
    told = directives(sbatch(asked(what=str(ROOT / "examples/ddp_script.py")), folder=Path("/x")))
    assert told["job-name"] == "ddp-script"
    assert told["signal"] == "TERM@120"
    assert ("no-requeue" in told, "requeue" in told, "time" in told) == (True, False, False)


def test_what_sbatch_could_not_be_told_is_refused():
    with pytest.raises(LaunchError, match="--cpus-per-node"):
        sbatch(asked(processes="gpu"), folder=Path("/x"))
    assert directives(sbatch(asked(processes="gpu"), folder=Path("/x"), cpus=16))["cpus-per-task"] == "16"
    with pytest.raises(LaunchError, match="--sbatch nodes: that line is there already"):
        sbatch(asked(), folder=Path("/x"), options=["nodes=4"])
    for changes in ({"nnodes": "1:4"}, {"nnodes": "0"}, {"processes": "2,1"}):
        with pytest.raises(LaunchError, match="must be a"):
            asked(**changes)


def test_the_manifest_is_a_pytorchjob_of_the_training_operator():
    """Facts of kubeflow.org/v1, in its pytorch_types.go and envvar.go, and of a pod's own."""
    text = manifest(asked("--set", "text=$(RANK): 'x'", gpus=4), image="registry/shoal:1", volume="claim:/work/runs")
    told = yaml.safe_load(text)
    assert (told["apiVersion"], told["kind"], told["metadata"]) == ("kubeflow.org/v1", "PyTorchJob", {"name": "digits"})
    replicas = told["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    assert all(each["restartPolicy"] == "OnFailure" for each in replicas.values())
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert told["spec"]["runPolicy"] == {"cleanPodPolicy": "Running", "backoffLimit": 10}
    assert "nprocPerNode" not in told["spec"]  # with it, WORLD_SIZE would count processes while RANK counts pods
    pod = replicas["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["name"], container["image"]) == ("pytorch", "registry/shoal:1")
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 23456}]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]} == {
        "/dev/shm": "shm",
        "/work/runs": "run",
    }
    shm, run = pod["volumes"]
    assert shm == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    assert run == {"name": "run", "persistentVolumeClaim": {"claimName": "claim"}}
    assert container["args"][-1] == "text=$$(RANK): 'x'"  # what is the job's own is not filled in


def test_one_pod_has_no_workers_and_what_kubernetes_would_not_take_is_refused():
    told = yaml.safe_load(manifest(asked(nnodes="1"), image="x"))
    replicas = told["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master"]
    assert [volume["name"] for volume in replicas["Master"]["template"]["spec"]["volumes"]] == ["shm"]
    with pytest.raises(LaunchError, match="needs an image"):
        manifest(asked(), image=None)
    with pytest.raises(LaunchError, match="no name for Kubernetes"):
        manifest(asked(name="My_Run"), image="x")
    with pytest.raises(LaunchError, match="CLAIM:/path"):
        manifest(asked(), image="x", volume="claim")


def commands_of(page: str) -> list[str]:
    """From `shoal` on, in the shell blocks and in the tables."""
    text = (ROOT / "docs" / page).read_text()
    lines = [
        line
        for block in re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    lines += [cell for line in text.splitlines() if line.startswith("|") for cell in re.findall(r"`([^`]+)`", line)]
    found = [re.search(r"\bshoal (?:train|launch) [^#>]*", line) for line in lines]
    return [match[0].removeprefix("shoal ").replace("...", "") for match in found if match]


@pytest.mark.parametrize("page", ["places.md", "nodes.md"])
def test_the_command_line_knows_every_command_of_the_page(page):
    verbs = typer.main.get_command(shoal.cli.app).commands
    told = [shlex.split(line) for line in commands_of(page)]
    assert len(told) > 3
    for verb, *words in told:
        verbs[verb].make_context(verb, list(words))
