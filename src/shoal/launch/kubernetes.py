"""A manifest for Kubernetes: a PyTorchJob of the Kubeflow training operator (v1), one parent in each pod.

The operator tells every pod MASTER_ADDR and MASTER_PORT (a headless service of the first pod), and its number as RANK.
"""

import json
import re
from collections.abc import Sequence

from shoal.errors import LaunchError
from shoal.launch.asked import Asked

_JOIN_S = 600  # pods start when there is room, and pull their image first
_PORT = 23456  # the operator's own
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")


def manifest(asked: Asked, *, image: str | None, volume: str | None = None, shm: str = "8Gi") -> str:
    """The file's text.

    Args:
        image: with shoal, and with the job at the same path, relative to its working folder.
        volume: `CLAIM:/path`, a PersistentVolumeClaim that all pods may write to, and where: for the run's folder.
        shm: the size of /dev/shm, which is taken from the pod's memory.

    Raises:
        LaunchError: no image, or a name or volume that Kubernetes would not take.
    """
    if not image:
        raise LaunchError("--kubernetes needs an image with shoal and the job in it: --image registry/name:tag")
    if not _NAME.fullmatch(asked.name):
        raise LaunchError(f"{asked.name!r} is no name for Kubernetes (a-z, 0-9 and -, at most 52): --name my-run")
    claim, _, path = (volume or "").partition(":")
    if volume and not (claim and path.startswith("/")):
        raise LaunchError(f"--volume is {volume!r}; it must be CLAIM:/path, a PersistentVolumeClaim and where it goes.")
    workers = asked.num_nodes - 1
    lines = [
        *([f"# {asked.wrote}"] if asked.wrote else []),
        "apiVersion: kubeflow.org/v1",
        "kind: PyTorchJob",
        "metadata:",
        f"  name: {asked.name}",
        "spec:",
        "  runPolicy:",
        "    cleanPodPolicy: Running  # pods that still run end with the job; the others stay, with their logs",
        "    backoffLimit: 10  # restarts after which it has failed",
        "  pytorchReplicaSpecs:",
        "    Master:",
        *_replicas(1),
        "      template: &pod",
        *_pod(asked, image, claim, path, shm),
    ]
    if workers:
        lines += ["    Worker:", *_replicas(workers), "      template: *pod"]
    return "\n".join(lines) + "\n"


def _replicas(number: int) -> list[str]:
    return [
        f"      replicas: {number}",
        "      restartPolicy: OnFailure  # a pod that fails ends the others, and all of them meet again",
    ]


def _pod(asked: Asked, image: str, claim: str, path: str, shm: str) -> list[str]:
    gpus = [f"                  nvidia.com/gpu: {asked.gpus}"] if asked.gpus else []
    mounts = [("shm", "/dev/shm"), *([("run", path)] if claim else [])]
    volumes = [
        "            - name: shm  # loader workers hand batches over in it; by default it has 64 MiB",
        "              emptyDir:",
        "                medium: Memory",
        f"                sizeLimit: {shm}",
    ]
    if claim:
        volumes += ["            - name: run", "              persistentVolumeClaim:"]
        volumes.append(f"                claimName: {_quoted(claim)}")
    else:
        volumes.append("            # no --volume: the run's folder, checkpoints too, is lost with the first pod")
    return [
        "        spec:",
        "          terminationGracePeriodSeconds: 120  # from SIGTERM on: the step ends, and is saved",
        "          containers:",
        "            - name: pytorch  # the operator looks for this name",
        f"              image: {_quoted(image)}",
        f"              command: {_row([asked.python, '-m', 'shoal', asked.verb])}",
        "              args:",
        *(f"                - {_quoted(word)}{note}" for word, note in _arguments(asked)),
        "              ports:",
        "                - name: pytorchjob-port  # and for this one: it is MASTER_PORT",
        f"                  containerPort: {_PORT}",
        *(["              resources:", "                limits:", *gpus] if gpus else []),
        "              volumeMounts:",
        *(f"                - {{name: {name}, mountPath: {_quoted(place)}}}" for name, place in mounts),
        "          volumes:",
        *volumes,
    ]


def _arguments(asked: Asked) -> list[tuple[str, str]]:
    """Each with a remark; Kubernetes puts the operator's variables in place of $(NAME)."""
    told = [
        (f"--nnodes={asked.num_nodes}", "  # pods"),
        ("--node-rank=$(RANK)", "  # the operator numbers pods, not processes"),
        (f"--nproc-per-node={asked.processes}", "  # ranks that each pod's parent starts"),
        ("--master-addr=$(MASTER_ADDR)", "  # the headless service that the operator makes for the first pod"),
        ("--master-port=$(MASTER_PORT)", ""),
        (f"--rdzv-conf=join_timeout={_JOIN_S}", "  # seconds for all pods to be there"),
    ]
    if asked.verb == "train":
        told.append(("--resume=auto", "  # after a restart, from the newest good checkpoint"))
    return told + [(word.replace("$(", "$$("), "") for word in asked.words]


def _quoted(text: str) -> str:
    """A YAML scalar that is this text, whatever it holds: a JSON string is one."""
    return json.dumps(text, ensure_ascii=False)


def _row(words: Sequence[str]) -> str:
    return "[" + ", ".join(_quoted(word) for word in words) + "]"
