"""shoal why: what became of a run, from what lies in its folder alone."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.checkpoint import list_checkpoints
from shoal.errors import CheckpointError, LaunchError
from shoal.folder import is_in_use
from shoal.history import NAME as HISTORY
from shoal.history import committed, in_words
from shoal.launch.incident import INCIDENTS, ranks_in_words
from shoal.launch.incident import read as read_incidents
from shoal.launch.outcome import FAILURE, Outcome
from shoal.launch.verdict import read_log
from shoal.metrics.events import read_events
from shoal.units import show_seconds

_LOG_LINES = 5
_MESSAGE_LINES = 12
_NOT_AGAIN = ("run", "resume", "layout", "trace", "weights", "preset", "nproc-per-node")  # of settings, on the way on

State = Literal["done", "running", "failed", "ended"]


@dataclass(frozen=True, kw_only=True)
class Story:
    """What became of a run.

    Attributes:
        happened: the first cause first.
        num_lost: steps that were done and are in no checkpoint.
        samples: whether each was there once, over all starts.
        goes_on: the command for it; empty where there is nothing to do.
    """

    folder: Path
    state: State
    layout: str
    step: int
    steps: int
    happened: tuple[str, ...]
    checkpoint: int | None
    num_lost: int
    goes_on: str
    samples: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"exit_code": 0, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.folder}  {self.layout}  {_STATES[self.state]}, {self.step} of {self.steps} steps done", ""]
        for number, text in enumerate(self.happened, start=1):
            first, *rest = text.splitlines()
            lines += [f"  {number}. {first}", *(f"     {line}" for line in rest)]
        lines += ["", *([self._lost()] if self.state in ("failed", "ended") else [])]
        lines += [f"data    {self.samples}"] if self.samples else []
        lines += [f"go on   {self.goes_on}"] if self.goes_on else []
        return "\n".join(lines).rstrip()

    def _lost(self) -> str:
        if self.checkpoint is None:
            return f"lost    all {self.step} steps: there is no checkpoint"
        if self.num_lost == 0:
            return f"lost    nothing: the checkpoint of step {self.checkpoint} is the last step that was done"
        return f"lost    {self.num_lost} steps since the checkpoint of step {self.checkpoint}"


_STATES = {"done": "done", "running": "running", "failed": "failed", "ended": "ended early"}


def tell(folder: Path) -> Story:
    """Read a run's folder.

    Raises:
        CheckpointError: it is not that of a run.
        LaunchError: its failure.json is damaged.
    """
    if not (folder / "run.json").is_file() and not (folder / FAILURE).is_file():
        raise CheckpointError(f"{folder} is no run's folder: it has neither run.json nor {FAILURE}.")
    described, failure = _json(folder / "run.json"), {} if _went_on(folder) else _failure_in(folder / FAILURE)
    saved = [found.step for found in list_checkpoints(folder / "checkpoints")] if _has_checkpoints(folder) else []
    checkpoint, step, steps = max(saved, default=None), _last_step(folder, failure, saved), _steps_of(described)
    state = _state(folder, failure, step, steps)
    began = failure.get("began") or _began(folder)
    incidents = [row for row in read_incidents(folder / INCIDENTS) if row.get("time", 0.0) >= began]
    goes_on = state in ("failed", "ended")
    return Story(
        folder=folder,
        state=state,
        layout=described.get("layout", ""),
        step=step,
        steps=steps,
        happened=(*_incidents(incidents), *_failure(failure), *(_silence(folder) if state == "ended" else [])),
        checkpoint=checkpoint,
        num_lost=max(0, step - (checkpoint or 0)),
        goes_on=_command(folder, described) if goes_on else "",
        samples=in_words(committed(folder / HISTORY)),
    )


def _went_on(folder: Path) -> bool:
    """Whether the failure is of an earlier start: each writes run.json anew."""
    run, failure = folder / "run.json", folder / FAILURE
    return run.exists() and failure.exists() and run.stat().st_mtime > failure.stat().st_mtime


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or cut short by what ended the run
        return {}
    return found if isinstance(found, dict) else {}


def _failure_in(path: Path) -> dict[str, Any]:
    """As `keep_failure` has written it.

    Raises:
        LaunchError: a value is of another type, with the field.
    """
    found = _json(path)
    if not found:
        return {}
    from pydantic import TypeAdapter, ValidationError

    began = found.get("began")
    try:
        told = TypeAdapter(Outcome).validate_json(json.dumps(found), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise LaunchError(f"{path} is damaged: {where}: {first['msg']}. Remove it; the rest is told without.") from None
    return {**asdict(told), "began": began if isinstance(began, int | float) else None}


def _has_checkpoints(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir()


def _steps_of(described: Mapping[str, Any]) -> int:
    job = described.get("job")
    steps = job.get("steps") if isinstance(job, Mapping) else None
    return steps if isinstance(steps, int) else 0  # damaged: then nobody knows how many were asked for


def _last_step(folder: Path, failure: Mapping[str, Any], saved: Sequence[int]) -> int:
    """The last that was done, as far as anybody noted it."""
    metrics = folder / "metrics.jsonl"
    logged = [int(event["step"] or 0) for event in read_events(metrics)] if metrics.exists() else []
    failed = [int(one["step"]) - 1 for one in failure.get("failures", ())]
    return max(0, *logged, *saved, *failed)


def _state(folder: Path, failure: Mapping[str, Any], step: int, steps: int) -> State:
    if is_in_use(folder):
        return "running"
    if failure:
        return "failed"
    return "done" if step >= steps > 0 else "ended"


def _began(folder: Path) -> float:
    run = folder / "run.json"
    return run.stat().st_mtime if run.exists() else 0.0


def _incidents(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One text for each, with how it ended."""
    texts: list[str] = []
    for row in rows:
        if row["kind"] == "goes on" and texts:
            texts[-1] += f"\nit went on after {show_seconds(row['stood_s'])}"
        elif row["kind"] in ("straggler", "restart", "grows"):
            texts.append(row["text"])
        elif row["kind"] in ("standing", "desync", "link"):
            texts.append(_standing(row))
    return texts


def _standing(row: Mapping[str, Any]) -> str:
    ranks = row["ranks"]
    where = [_place(one) for one in ranks]
    if row["kind"] == "desync":
        parted = row.get("parted", "").splitlines()
        return "\n".join(["the ranks were in different collectives", *where, *parted])
    if row["kind"] == "link":
        return "\n".join(["all ranks waited for messages that did not come: the link or the backend stood", *where])
    waited = [f"rank {one['rank']} waited in {one['message']}" for one in row["others"] if one["inside"]]
    return "\n".join([f"{ranks_in_words([one['rank'] for one in ranks])} stood still", *where, *waited])


def _place(one: Mapping[str, Any]) -> str:
    at = f", at {one['frame']}" if one["frame"] else ""
    inside = f" in {one['message']}" if one["inside"] else ""
    state = f" ({one['state']})" if one["state"] else ""
    host = f" on {one['host']}" if one.get("host") else ""
    return f"rank {one['rank']}{host}: step {one['step']}, {one['phase']}{inside}{state}{at}"


def _failure(failure: Mapping[str, Any]) -> list[str]:
    if not failure.get("failures"):
        return []
    first = failure["failures"][0]
    error = f"{first['type']}: {first['message']}" if first["type"] else first["message"]
    lines = [f"rank {first['rank']} failed, {show_seconds(first['at_s'])} after the start"]
    lines += error.strip().splitlines()[:_MESSAGE_LINES]
    if first["doing"]:
        lines.append(f"in {first['doing']}")
    if first["user_frame"]:
        lines.append(f"at {first['user_frame']}" + (f":  {first['source_line']}" if first["source_line"] else ""))
    if first["log"]:
        lines.append(f"log: {first['log']}")
    return ["\n".join(lines), *failure["others"]]


def _silence(folder: Path) -> list[str]:
    """No rank reported a failure: what rank 0 said last."""
    log = folder / "logs" / "rank_0.log"
    if "stopped on request at step" in read_log(log):
        return ["it was asked to end (SIGTERM), and all ranks stopped after the same step"]
    lines = [line.rpartition("\r")[2] for line in read_log(log).splitlines() if line.strip()][-_LOG_LINES:]
    cause = (
        "it ended before its last step, and no rank has failed: it was asked to end (SIGTERM, Ctrl-C), or all of its "
        "processes were killed at once"
    )
    return ["\n".join([cause, *(["last lines of rank 0:"] if lines else []), *lines])]


def _command(folder: Path, described: Mapping[str, Any]) -> str:
    """What goes on, from what was set when it began."""
    name = described.get("command", "")
    if not name:
        return f"shoal.train(job, {described.get('layout', '')!r}, run={str(folder)!r}, resume='auto')"
    words = ["shoal", "train", name, "--layout", described.get("layout", "lone")]
    for setting, value, origin in described.get("settings", ()):
        if origin == "default" or setting in _NOT_AGAIN or value == "-":
            continue
        if setting.startswith("set."):
            words += ["--set", f"{setting.removeprefix('set.')}={value}"]
        elif value in ("true", "false"):
            words += [f"--{setting}"] if value == "true" else []
        else:
            words += [f"--{setting}", value]
    return shlex.join([*words, "--run", str(folder), "--resume", "auto"])
