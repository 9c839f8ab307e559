"""Predict the steps of our contenders of bench_sharding.py with the planner.

`frontier-llm calibrate` measures this machine with as many processes as there are ranks, so its
speeds are those of ranks that share the cores. The speeds of simulated links are the given ones.
"""

import re

from benchmarks.peers.ours import overrides
from benchmarks.peers.turn import Turn
from benchmarks.testbed.calibrated import calibrated_conf
from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.config.cluster import ClusterConfig, LinkConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import estimate

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
"""Bits per second of the units of a rate."""


def calibrated_cluster(ranks: int) -> ClusterConfig:
    """Measure this machine with a number of processes."""
    with calibrated_conf(ranks) as override:
        cluster: ClusterConfig = decode(compose([override])).cluster
        return cluster


def bytes_per_second(rate: str) -> float:
    """Return a rate of tc, such as `200mbit`, in bytes per second.

    Raises:
        ConfigError: the rate is not in kbit, mbit or gbit.
    """
    match = re.fullmatch(r"([\d.]+)(kbit|mbit|gbit)", rate)
    if match is None:
        raise ConfigError("--link", rate, "a rate such as 200mbit, with --plan", "change its unit")
    return float(match[1]) * UNITS[match[2]] / 8


def planned_seconds(
    turn: Turn, cluster: ClusterConfig, link: str | None, package_link: str | None
) -> float:
    """Predict the seconds of a step of one of our contenders.

    Args:
        turn: what the contender does.
        cluster: this machine, calibrated.
        link: rate of the link of a node in the syntax of tc; None = no simulated links.
        package_link: rate of the link of a package; None = that of the node's link.
    """
    links = _links(turn, cluster.links[0], link, package_link or link)
    here = cluster.model_copy(update={"links": links, "ranks_per_node": turn.ranks_per_node})
    config = decode(compose(overrides(turn))).model_copy(update={"cluster": here})
    return estimate(Candidate.of(config, turn.ranks, turn.ranks_per_node)).time.seconds


def _links(
    turn: Turn, memory: LinkConfig, link: str | None, package_link: str | None
) -> tuple[LinkConfig, ...]:
    """Return the levels of links. The ranks behind a simulated link share its bandwidth."""
    if link is None or package_link is None:
        return (memory.model_copy(update={"ranks": None}),)
    per_node, per_package = turn.ranks_per_node, turn.ranks_per_package
    inner = per_package if per_package > 1 else per_node
    levels = []
    if inner > 1:
        name = "package" if per_package > 1 else "node"
        levels.append(memory.model_copy(update={"name": name, "ranks": inner}))
    if per_package > 1:
        levels.append(_simulated(memory, "node", per_node, package_link, per_package))
    levels.append(_simulated(memory, "network", None, link, per_node))
    return tuple(levels)


def _simulated(
    memory: LinkConfig, name: str, ranks: int | None, rate: str, sharing: int
) -> LinkConfig:
    """Return a level whose links have a given rate, which `sharing` ranks divide."""
    changes: dict[str, object] = {
        "name": name,
        "ranks": ranks,
        "gb_per_second": bytes_per_second(rate) / sharing / 1e9,
        "efficiency": 1.0,
        "collectives": {},
        "source": "simulated",
    }
    return memory.model_copy(update=changes)
