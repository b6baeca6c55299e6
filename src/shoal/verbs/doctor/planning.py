"""What a plan needs of these hosts, as a cluster file: how many, of what, and how fast the slowest link is."""

from shoal.cluster import Cluster, ClusterError
from shoal.metrics.links import Fit, fit_line
from shoal.verbs.doctor.facts import Facts, Link


def cluster_of(facts: Facts) -> Cluster:
    """Nodes of equal devices; the link is the slowest between hosts, or two processes' over the loopback of one.

    Raises:
        ClusterError: no link was measured, or hosts are too unlike to be one cluster.
    """
    counts = {len(host.gpus.found) for host in facts.hosts}
    if len(counts) > 1:
        raise ClusterError(f"no cluster file: hosts have {', '.join(map(str, sorted(counts)))} GPUs.")
    first, has_gpus = facts.hosts[0], counts != {0}
    per_node = counts.pop() if has_gpus else facts.asked.ranks_per_host
    memory = min(host.memory_bytes for host in facts.hosts) / per_node
    where = "intra" if facts.asked.is_local else "inter"
    link: dict[str, float | None] = {}
    if len(facts.hosts) > 1 or facts.asked.is_local:
        fit = slowest(facts)
        link = {
            f"{where}_node_gb_per_s": _rounded((fit.bytes_per_s or 0.0) / 1e9),
            f"{where}_node_latency_us": _rounded(fit.latency_s * 1e6),
        }
    return Cluster(
        nodes=len(facts.hosts),
        devices_per_node=per_node,
        device=first.gpus.found[0].name if has_gpus else None,
        memory_gb=None if has_gpus else _rounded(memory / 1e9),
        **link,
    )


def slowest(facts: Facts) -> Fit:
    """The line through the times of the link that is slowest with large messages.

    Raises:
        ClusterError: nothing came through, or times do not grow with sizes.
    """
    fits = [(fit.bytes_per_s, fit) for link in facts.links if (fit := fit_of(link)) is not None]
    known = [(speed, fit) for speed, fit in fits if speed is not None]
    if not known or len(fits) < len(facts.links):
        raise ClusterError("no cluster file: not all links could be measured. Mend what is named above.")
    return min(known, key=lambda each: each[0])[1]


def fit_of(link: Link) -> Fit | None:
    """time = latency + size / bandwidth of what went there."""
    if link.latency_s is None:
        return None
    return fit_line([(1, link.latency_s), *((size, seconds + link.latency_s) for size, seconds in link.there)])


def _rounded(figure: float) -> float:
    return float(f"{figure:.4g}")
