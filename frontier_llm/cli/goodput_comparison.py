"""Compare ways to recover from failures, in a table, a chart and JSON: `frontier-llm goodput`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from frontier_llm.cli.plain_table import plain_table
from frontier_llm.errors import ConfigError
from frontier_llm.planner.effective_time import (
    Recovery,
    Shares,
    curve,
    daly_share,
    job_mtbf,
    optima,
    simulate,
    steps_of,
)
from frontier_llm.units import format_seconds

Assumptions = dict[str, tuple[float, str]]
"""Value and source of each assumption, by the name of its option without dashes at its start."""
COLOURS = ("#d97706", "#2f81f7", "#1a7f64")
"""Colours of the ways to recover, which are readable on light and dark pages."""
OPTIMA_COLOUR = "#8b949e"
LONGEST_RECOVERY = 3.0
"""Longest recovery relative to the mean time between failures; exp(3) attempts complete one."""


@dataclass(frozen=True)
class Outcome:
    """The effective time of one way to recover on one number of nodes."""

    recovery: Recovery
    nodes: int
    mtbf: float
    """Mean seconds between failures of the job."""
    interval: float
    """Seconds of training between checkpoints, a whole number of steps."""
    young: float
    """Young's interval, seconds."""
    daly: float
    """Daly's interval, seconds."""
    shares: Shares
    formula: float | None
    """The effective share by Daly's model; None = the model does not describe this recovery."""

    @property
    def of_all_nodes(self) -> float:
        """The effective share, in which waiting spare nodes count as idle."""
        return self.shares.effective * self.nodes / (self.nodes + self.recovery.spares)


def compare(
    recoveries: Sequence[Recovery],
    node_counts: Sequence[int],
    failures_per_node_day: float,
    step: float,
    *,
    interval: float | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Simulate every way to recover on every number of nodes.

    Args:
        recoveries: ways to recover.
        node_counts: numbers of nodes.
        failures_per_node_day: failures that interrupt a run, per node-day.
        step: seconds of a step, on any number of nodes.
        interval: seconds of training between checkpoints; None = the best interval of each.
        seed: seed of the random numbers.

    Raises:
        ConfigError: failures are so frequent that a run would hardly ever train.
    """
    outcomes: list[Outcome] = []
    for nodes in node_counts:
        mtbf = job_mtbf(failures_per_node_day, nodes)
        _check_recoveries_end(recoveries, nodes, mtbf)
        for recovery in recoveries:
            if interval is None:
                found = curve(recovery, mtbf, step, seed)
                steps, shares = max(found, key=lambda point: point[1].effective)
            else:
                steps = steps_of(interval, step)
                shares = simulate(recovery, mtbf, step, steps, seed)
            taken, formulas = steps * step, optima(recovery, mtbf)
            share = daly_share(recovery, mtbf, taken)
            outcomes.append(Outcome(recovery, nodes, mtbf, taken, *formulas, shares, share))
    return outcomes


def _check_recoveries_end(recoveries: Sequence[Recovery], nodes: int, mtbf: float) -> None:
    longest = max(max(way.seconds, way.fallback_seconds) for way in recoveries)
    if longest > LONGEST_RECOVERY * mtbf:
        raise ConfigError(
            "nodes", f"{nodes}, on which a failure comes every {mtbf:.3g} s",
            f"at least {longest / LONGEST_RECOVERY:.3g} s between failures: recoveries take up to "
            f"{longest:g} s, and the next failure would interrupt nearly all of them",
            "choose fewer nodes, a lower rate of failures, or faster recoveries",
        )  # fmt: skip


def assumptions_table(assumed: Assumptions, meanings: Mapping[str, str]) -> Table:
    """Return the table of all assumptions with their values and sources."""
    table = plain_table("Assumptions", ["option", "value", "meaning", "source"])
    for name, (value, source) in assumed.items():
        meaning = meanings.get(name, "failures per node-day")
        table.add_row(f"--{name}", f"{value:.5g}", meaning, source)
    return table


def outcomes_table(outcomes: Sequence[Outcome], devices_per_node: int) -> Table:
    """Return the table of all ways to recover on all numbers of nodes."""
    columns = ["nodes", "devices", "failure every", "recovery", "effective time", "Daly's model"]
    columns += ["stalls", "repeated", "recovering", "interval", "Young", "Daly"]
    table = plain_table("Effective training time", columns)
    table.caption = "interval: training between two checkpoints; Young, Daly: their optima of it"
    nodes = 0
    for found in outcomes:
        job = ("", "", "")
        if found.nodes != nodes:
            table.add_section()
            nodes = found.nodes
            every = format_seconds(found.mtbf) if math.isfinite(found.mtbf) else "never"
            job = (f"{nodes:,}", f"{nodes * devices_per_node:,}", every)
        shares = found.shares
        table.add_row(
            *job,
            found.recovery.name,
            f"{found.of_all_nodes:.4f}",
            "" if found.formula is None else f"{found.formula:.4f}",
            *(f"{share:.2%}" for share in (shares.stalled, shares.repeated, shares.recovering)),
            *(f"{seconds:.0f} s" for seconds in (found.interval, found.young, found.daly)),
        )
    return table


def outcome_json(found: Outcome) -> dict[str, Any]:
    """Return an outcome as plain values; times in seconds, and null for an infinite time."""
    return {
        "nodes": found.nodes,
        "recovery": found.recovery.name,
        "effective": found.of_all_nodes,
        "daly_model": found.formula,
        "mtbf_seconds": found.mtbf if math.isfinite(found.mtbf) else None,
        "interval_seconds": found.interval,
        "young_seconds": found.young,
        "daly_seconds": found.daly,
        "spares": found.recovery.spares,
        "shares": asdict(found.shares),
    }


def draw(outcomes: Sequence[Outcome], step: float, seed: int = 0) -> Any:
    """Draw the effective time over the number of nodes, and over the interval of checkpoints.

    The second panel is of the largest number of nodes. Its vertical lines are Young's and Daly's
    interval of the first way to recover.

    Args:
        outcomes: those of all ways to recover, for each number of nodes.
        step: seconds of a step.
        seed: seed of the simulation.

    Returns:
        A figure of matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure((10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    largest = max(found.nodes for found in outcomes)
    last = [found for found in outcomes if found.nodes == largest]
    for found, colour in zip(last, COLOURS, strict=True):
        same = [other for other in outcomes if other.recovery == found.recovery]
        effective = [other.of_all_nodes for other in same]
        left.plot(
            [other.nodes for other in same], effective, "o-", color=colour,
            label=found.recovery.name,
        )  # fmt: skip
        points = list(curve(found.recovery, found.mtbf, step, seed))
        idle = found.of_all_nodes / found.shares.effective if found.shares.effective else 1.0
        shares = [point.effective * idle for _, point in points]
        right.plot([steps * step for steps, _ in points], shares, ".-", color=colour)
    for name, interval, style in (("Young", last[0].young, "--"), ("Daly", last[0].daly, ":")):
        label = f"{name}, {last[0].recovery.name}: {interval:.1f} s"
        right.axvline(interval, linestyle=style, color=OPTIMA_COLOUR, label=label)
    left.set_xlabel("nodes")
    right.set_xlabel(f"seconds between checkpoints, on {largest:,} nodes")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")  # labels between powers of 10 would overlap
        axes.set_ylabel("effective training time")
        axes.grid(color="#76839055")
        axes.legend(frameon=False)
    counts = sorted({found.nodes for found in outcomes})
    left.set_xticks(counts, list(map(str, counts)))
    return figure
