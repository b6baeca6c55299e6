"""shoal doctor: what is wrong with these machines, before a run finds out."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cluster import ClusterError, check_target, write_cluster
from shoal.launch.hosts import Host, parse
from shoal.launch.nodes import DEFAULT_PORT
from shoal.layout import Layout
from shoal.verbs.doctor.checks import CHECKS
from shoal.verbs.doctor.examine import examine
from shoal.verbs.doctor.facts import Asked
from shoal.verbs.doctor.party import AbsentError, Party, gather
from shoal.verbs.doctor.picture import svg
from shoal.verbs.doctor.planning import cluster_of
from shoal.verbs.doctor.report import Report
from shoal.verbs.doctor.verdict import fail, listed


def command(
    job: str | None = None,
    *,
    hosts: str | None = None,
    layout: str | None = None,
    fields: Mapping[str, Any] | None = None,
    preset: str | None = None,
    run: Path | None = None,
    checkpoints: int = 3,
    threads: int | None = None,
    port: int | None = None,
    cluster: Path | None = None,
    picture: Path | None = None,
    force: bool = False,
) -> Report:
    """Examine hosts, or this machine.

    Args:
        job: its file is compared, and its checkpoints are counted.
        hosts: as for `shoal train`; None for this machine.
        layout: of the run that is meant.
        run: the folder where runs are written; by default `runs`.
        checkpoints: that are kept.
        cluster: write a cluster file for `shoal plan`.
        picture: write the links between hosts as SVG.
        force: over files that exist.

    Raises:
        ShoalError: what makes no sense, before anything is measured.
    """
    began = time.monotonic()
    for target in (cluster, picture):
        if target is not None:
            check_target(target, force=force)
    party_of = None if hosts is None else parse(hosts)
    spread = Layout.parse(layout or "lone")
    asked = Asked(
        ranks_per_host=_ranks_per_host(spread, party_of or ()),
        threads=threads,
        port=port or DEFAULT_PORT,
        checkpoints=checkpoints,
        job=job,
        is_local=party_of is None,
    )
    if job is not None:
        asked = _sized(asked, job, fields or {}, preset, spread)
    with gather(party_of, Path.cwd()) as party:
        report = _report(party, asked, str(run or "runs"))
    _write(report, cluster, picture, force=force)
    report.seconds = time.monotonic() - began
    return report


def _ranks_per_host(layout: Layout, hosts: Sequence[Host]) -> int:
    """The most on one host: as --hosts says (a:2,b:1), else an equal share."""
    told = [host.processes for host in hosts if host.processes is not None]
    return max(told) if told else -(-layout.num_ranks // max(1, len(hosts)))


def _sized(asked: Asked, name: str, fields: Mapping[str, Any], preset: str | None, layout: Layout) -> Asked:
    """With what the job takes."""
    from shoal.job import load_job, preset_of
    from shoal.verbs.doctor.sizes import checkpoint_bytes, loader_bytes

    known = preset_of(name, preset) if preset is not None else {}
    job = load_job(name, {**known, **fields})
    held = loader_bytes(job, layout, asked.ranks_per_host)
    return replace(asked, checkpoint_bytes=checkpoint_bytes(job), loader_bytes=held)


def _report(party: Party, asked: Asked, folder: str) -> Report:
    file = (asked.job or "").partition(":")[0]
    job_file = file if file.endswith(".py") else None
    if not party.agents:
        return _unreached(party.absent)
    try:
        return Report.of(examine(party, asked, job_file=job_file, folder=folder))
    except AbsentError as error:
        return _unreached({"a host": str(error)})


def _unreached(absent: Mapping[str, str]) -> Report:
    """Nothing is known but this."""
    why = listed(f"{name}: {said}" for name, said in absent.items())
    reach = next(check for check in CHECKS if check.name == "reach")
    return Report(facts=None, judged=[(reach, fail(why, "mend it first; nothing else could be measured"))])


def _write(report: Report, cluster: Path | None, picture: Path | None, *, force: bool) -> None:
    """The files that were asked for; what was measured is told, also where one cannot be written."""
    if report.facts is None:
        return
    if cluster is not None:
        try:
            write_cluster(cluster, cluster_of(report.facts), force=force)
            report.files["cluster"] = str(cluster)
        except ClusterError as error:
            report.notes.append(str(error))
    if picture is not None:
        temporary = picture.with_name(f".{picture.name}.tmp")
        temporary.write_text(svg(report.names, report.speeds), "utf-8")
        os.replace(temporary, picture)
        report.files["picture"] = str(picture)
