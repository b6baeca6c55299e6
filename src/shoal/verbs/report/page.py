"""The page: sections in their order, handed to the template."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.units import show_seconds
from shoal.verbs.report import compared, spent, trained
from shoal.verbs.report.links import collectives
from shoal.verbs.report.parts import Part, Points, Section, Table, Words, several, shown
from shoal.verbs.report.places import mesh_section
from shoal.verbs.report.replicas import replicas
from shoal.verbs.report.schedule import bench_schedules, run_schedules
from shoal.verbs.report.sources import Bench, Collectives, Run, Source

_HERE = Path(__file__).parent
_LEDGER = {
    "global_batch": "samples per step",
    "num_data": "data ranks",
    "micro": "micro-batches of a rank",
    "tokens_per_step": "tokens per step",
    "steps_per_epoch": "steps per epoch",
    "steps": "steps",
    "lr": "learning rate at the start",
}

_LEGEND = (
    "layout: how the job is spread over processes. data ranks: those that each take a part of the batch; "
    "micro-batches: the parts that such a rank takes one after the other. backend: what carries messages between "
    "processes (gloo on CPU, nccl on GPU); one process alone sends none."
)


def page(sources: Sequence[Source]) -> str:
    """All of it, as the text of one file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = [section for section in sections(sources) if section.parts]
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["own"] = _own
    return environment.get_template("page.html").render(
        title=_title(sources),
        sections=found,
        style=(_HERE / "style.css").read_text("utf-8"),
        version=__version__,
    )


def sections(sources: Sequence[Source]) -> list[Section]:
    """As data; those without parts are not shown."""
    benches = [source for source in sources if isinstance(source, Bench)]
    runs = [source for source in sources if isinstance(source, Run)]
    links = [source for source in sources if isinstance(source, Collectives)]
    makers = (
        compared.results,
        compared.loss_section,
        compared.scaling,
        spent.spent,
        spent.memory,
        spent.wire,
        bench_schedules,
        replicas,
    )
    made = [_of(source, make(source), benches) for source in benches for make in makers]
    if runs:
        of_runs = [make(runs) for make in (trained.loss_section, trained.figures, trained.evaluation, run_schedules)]
        made += [replace(part, title=f"{part.title}: runs") for part in of_runs] if benches else of_runs
    made.append(mesh_section(sources))
    made += [_of(source, collectives(source), links) for source in links]
    return [what_ran(sources), *made, conventions(benches)]


def what_ran(sources: Sequence[Source]) -> Section:
    """One column per folder: what was trained, where, with which versions, when."""
    columns = [(source.name, _facts(source)) for source in sources]
    names = list(dict.fromkeys(name for _, facts in columns for name in facts))
    table = Table(
        title="Values",
        heads=["", *(name for name, _ in columns)],
        rows=[[name, *(facts.get(name, "") for _, facts in columns)] for name in names],
        prose=True,
        legend=_LEGEND,
    )
    return Section(title="What ran", parts=[table])


def conventions(benches: Sequence[Bench]) -> Section:
    """How each figure is meant, as the benchmark itself says."""
    lines = dict.fromkeys(line for bench in benches for line in bench.told["conventions"])
    parts: list[Part] = [Points(lines=list(lines))] if lines else []
    parts.append(Words(text="Sizes in KiB, MiB and GiB are powers of 1024; GB/s are 10^9 bytes per second."))
    return Section(title="How the figures are meant", parts=parts)


def _title(sources: Sequence[Source]) -> str:
    names = ", ".join(source.name for source in sources[:3]) + (", ..." if len(sources) > 3 else "")
    jobs = dict.fromkeys(job.partition(":")[0] for source in sources if (job := _facts(source).get("job")))
    return f"{', '.join(jobs)}: {names}" if jobs else names


def _of(source: Source, section: Section, kin: Sequence[Source]) -> Section:
    """With the name of its folder where there are several of its kind."""
    return replace(section, title=f"{section.title}: {source.name}") if len(kin) > 1 else section


def _facts(source: Source) -> dict[str, str]:
    if isinstance(source, Run):
        facts = _run_facts(source)
    elif isinstance(source, Bench):
        facts = _bench_facts(source)
    else:
        told = source.told
        facts = {"layout": str(told["layout"]), "ranks": str(told["num_ranks"]), **_plain(told.get("machine") or {})}
        facts["took"] = _took(told.get("seconds"))
    return {**{name: text for name, text in facts.items() if text}, "last written": source.date}


def _run_facts(run: Run) -> dict[str, str]:
    job = dict(run.facts.get("job") or {})
    ledger = {_LEDGER[name]: text for name, text in _plain(run.facts.get("ledger") or {}).items() if name in _LEDGER}
    return {
        "job": str(job.pop("job", "")),
        "layout": run.layout,
        "fields": ", ".join(f"{name}={value}" for name, value in job.items()),
        **ledger,
        **_world(run),
        **_plain(run.facts.get("versions") or {}),
    }


def _world(run: Run) -> dict[str, str]:
    """Ranks, device and hosts; a lone process has no backend, as it sends nothing."""
    told = dict(run.facts.get("world") or {})
    told.pop("hosts", None)
    hosts: dict[str, int] = {}
    for name, count in run.hosts or ():  # ranks of one host need not follow each other
        hosts[name] = hosts.get(name, 0) + count
    shown = {"ranks" if name == "size" else name: text for name, text in _plain(told).items() if text != "none"}
    return shown | ({"hosts": ", ".join(f"{n} ({several(c, 'rank')})" for n, c in hosts.items())} if hosts else {})


def _bench_facts(bench: Bench) -> dict[str, str]:
    told, first = bench.told, bench.base or {}
    return {
        "job": str(told["job"]),
        "layout": ", ".join(row["layout"] for row in told["measured"]),
        "fields": ", ".join(f"{name}={value}" for name, value in (told.get("fields") or {}).items()),
        "mode": f"{told['mode']} scaling",
        _LEDGER["global_batch"]: str(first.get("batch_size", "")),
        "precision": str(first.get("precision", "")),
        "CPU threads per device": str(first.get("threads", "")),
        "cores": str(told.get("cores", "")),
        **{name: text for name, text in _plain(first.get("versions") or {}).items() if text != "none"},
        "took": _took(told.get("seconds")),
    }


def _plain(told: Mapping[str, Any]) -> dict[str, str]:
    return {name: shown(value, ".6g") for name, value in told.items() if value is not None}


def _took(seconds: float | None) -> str:
    return "" if seconds is None else show_seconds(seconds)


def _own(body: str, number: str) -> str:
    """Ids that no other drawing of the page has."""
    for mark in ('id="', 'href="#', "url(#"):
        body = body.replace(mark, f"{mark}f{number}-")
    return body
