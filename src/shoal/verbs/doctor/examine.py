"""The order of the measurements: each host, then each pair of hosts, then all together."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shoal.verbs.doctor.facts import Asked, Clock, Collective, Facts, HostFacts, Link, Store
from shoal.verbs.doctor.party import Party, Remote

_TIME_TRIPS = 8
_COLLECTIVE_S = 20.0


def examine(party: Party, asked: Asked, *, job_file: str | None, folder: str) -> Facts:
    """Measure everything.

    Args:
        folder: where the run will be written.

    Raises:
        AbsentError: a host was lost on the way.
    """
    agents = party.agents
    hosts = _hosts(party, asked, job_file)
    links = _links(party, hosts, asked)
    store = _store(agents[:1] if asked.is_local else agents, party, folder)
    clocks = {} if asked.is_local else _clocks(agents)
    together = _collect(party, links, asked)
    flops = {agent.name: told["flops_per_s"] for agent, told in together.items() if "flops_per_s" in told}
    return Facts(
        asked=asked,
        hosts=hosts,
        absent=party.absent,
        links=links,
        clocks=clocks,
        store=store,
        collective=_collective(together, _why_not(agents, links)),
        flops_per_s=flops,
    )


def _hosts(party: Party, asked: Asked, job_file: str | None) -> list[HostFacts]:
    agents = party.agents[:1] if asked.is_local else party.agents
    questions = {}
    for agent in agents:
        others = [other.name for other in agents if other is not agent]
        questions[agent] = ("measure", {"name": agent.name, "others": others, "port": asked.port, "job": job_file})
    return [HostFacts.of(told) for told in party.ask(questions).values()]


def rounds(num: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs of hosts such that no host is in two pairs of a round, and each pair is in one.

    One stands still, the others go round it:   0 1 2    0 3 1    0 2 3
                                                  3        2        1
    """
    places = list(range(num + num % 2))
    for _ in range(len(places) - 1):
        half = len(places) // 2
        across = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in across if max(pair) < num]
        places.insert(1, places.pop())


def _links(party: Party, hosts: Sequence[HostFacts], asked: Asked) -> list[Link]:
    """Both ways of each pair; at once only what shares no host, so that no measurement slows another."""
    agents = party.agents
    ports = {agent: int(told["port"]) for agent, told in party.ask_all("listen", port=0).items()}
    addresses = {agent: ["127.0.0.1"] if asked.is_local else _addresses(hosts[k]) for k, agent in enumerate(agents)}
    links = []
    for pairs in rounds(len(agents)):
        for ways in (pairs, [(b, a) for a, b in pairs]):
            questions = {}
            for source, target in ways:
                there = agents[target]
                questions[agents[source]] = ("reach", {"addresses": addresses[there], "port": ports[there]})
            for (source, target), told in zip(ways, party.ask(questions).values(), strict=True):
                links.append(_link(agents[source].name, agents[target].name, told))
    if not asked.is_local:
        links = _with_port_errors(party, links, asked.port)
    party.ask_all("hush")
    return links


def _addresses(host: HostFacts) -> list[str]:
    """Its name, and then what it says of itself: SSH may know names that nobody else does."""
    outward = [a for each in host.interfaces.values() if each.is_up for a in each.addresses]
    return [host.name, *(a for a in outward if not a.startswith(("127.", "::1", "fe80:", "169.254.")))]


def _with_port_errors(party: Party, links: Sequence[Link], port: int) -> list[Link]:
    """And who reaches node 0, but not at the port where machines meet."""
    first, *others = party.agents
    if "error" in party.ask({first: ("listen", {"port": port})})[first]:
        return list(links)  # somebody else listens there, which is said elsewhere
    reached = {link.source: link.address for link in links if link.target == first.name and not link.error}
    questions = {
        agent: ("knock", {"addresses": [reached[agent.name]], "port": port})
        for agent in others
        if agent.name in reached
    }
    errors = {agent.name: str(told["error"]) for agent, told in party.ask(questions).items()}
    return [
        replace(link, port_error=errors.get(link.source, "")) if link.target == first.name else link for link in links
    ]


def _link(source: str, target: str, told: dict[str, Any]) -> Link:
    lost, told = told.get("lost"), {name: value for name, value in told.items() if name != "lost"}
    told |= {name: [(int(size), float(s)) for size, s in told.get(name, [])] for name in ("there", "back")}
    return Link(source=source, target=target, lost=(int(lost[0]), str(lost[1])) if lost else None, **told)


def _clocks(agents: Sequence[Remote]) -> dict[str, Clock]:
    """Each less the first one, by the shortest of several round trips."""
    readings = {agent.name: offset([_trip(agent) for _ in range(_TIME_TRIPS)]) for agent in agents}
    first = readings[agents[0].name]
    return {
        name: Clock(offset_s=own[0] - first[0], uncertainty_s=own[1] + first[1] if name != agents[0].name else 0.0)
        for name, own in readings.items()
    }


def _trip(agent: Remote) -> tuple[float, float, float]:
    asked, began = time.time(), time.monotonic()
    told = agent.ask("time")["time"]
    return asked, float(told), time.monotonic() - began


def offset(trips: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Of (asked at, its clock, seconds until the answer): how far its clock is ahead, and how sure that is."""
    asked, told, seconds = min(trips, key=lambda trip: trip[2])
    return told - (asked + seconds / 2), seconds / 2


def _store(agents: Sequence[Remote], party: Party, folder: str) -> Store:
    token = secrets.token_hex(8)
    first, *others = agents
    words = {"folder": folder, "token": token}
    try:
        left = party.ask({first: ("leave", words)})[first]
        if "error" in left:
            return Store(folder=folder, error=f"{first.name}: {left['error']}")
        found = party.ask(dict.fromkeys(others, ("find", words))) if others else {}
        speeds = party.ask(dict.fromkeys(agents, ("speed", words)))
    finally:
        party.ask({first: ("clean", words)})
    failed = next((f"{agent.name}: {told['error']}" for agent, told in speeds.items() if "error" in told), "")
    told_of = {name: {a.name: told[name] for a, told in speeds.items() if name in told} for name in _SPEEDS}
    unseen = {agent.name: told.get("unseen", told.get("error", "")) for agent, told in found.items()}
    return Store(
        folder=folder,
        error=failed,
        unseen={name: why for name, why in unseen.items() if why},
        torn=int(left["torn"]),
        **told_of,
    )


_SPEEDS = ("fsync_s", "free_bytes", "bytes_per_s")


def _why_not(agents: Sequence[Remote], links: Sequence[Link]) -> str:
    """Why no collective can work."""
    if bad := next((link for link in links if link.error), None):
        return f"{bad.source} does not reach {bad.target}"
    if bad := next((link for link in links if link.lost), None):
        return f"large messages from {bad.source} to {bad.target} are lost"
    return "" if len(agents) > 1 else "there is one host alone"


def _collect(party: Party, links: Sequence[Link], asked: Asked) -> dict[Remote, dict[str, Any]]:
    """One rank per host, all at once; and how fast each multiplies, where it is a machine of its own."""
    agents = party.agents
    runs = not _why_not(agents, links)
    address = next((link.address for link in links if link.target == agents[0].name and link.address), "127.0.0.1")
    port = 0
    if runs:
        told = party.ask({agents[0]: ("free_port", {"address": address})})[agents[0]]
        runs, port = "port" in told, int(told.get("port", 0))
    size = len(agents) if runs else 1
    questions = {}
    for rank, agent in enumerate(agents):
        on_host = {"local_rank": rank, "local_size": size} if asked.is_local else {"node": rank, "num_nodes": size}
        place = {"rank": rank, "size": size, "rendezvous": f"tcp://{address}:{port}", "source": "flags", **on_host}
        multiplies = rank == 0 or not asked.is_local
        words = {"place": place if runs else {"size": 1}, "limit_s": _COLLECTIVE_S, "multiplies": multiplies}
        questions[agent] = ("collect", words)
    return party.ask(questions)


def _collective(told: dict[Remote, dict[str, Any]], why_not: str) -> Collective:
    if why_not:
        return Collective(not_run=why_not)
    errors = [f"{agent.name}: {each['error']}" for agent, each in told.items() if "error" in each]
    wrong = [agent.name for agent, each in told.items() if not each.get("is_right", True)]
    seconds = max((float(each.get("seconds", 0.0)) for each in told.values()), default=0.0)
    return Collective(size=len(told), error=errors[0] if errors else "", wrong=wrong, seconds=seconds)
