"""Simulate the effective training time (goodput, ETTR): `frontier-llm goodput [key=value ...]`.

The effective time is the share of time in which a run makes new steps, on a machine whose nodes
fail. The command compares ways to recover: a restart from the newest checkpoint of the run
directory, a restart from node-local checkpoints, and a recovery in place with spare nodes, which
loses only the step in flight. It finds the best checkpoint interval of each, beside those of Young
and Daly, and prints every assumption with its source. docs/recovery.md describes the recovery in
place (recovery.enabled=true).

`cluster=NAME` gives the devices per node and the rate of failures. With `experiment=NAME` or
`model=NAME` the planner predicts the seconds of a step for the configured layout, on the
configured number of nodes. Options replace these values. docs/reliability.md has the formulas.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from frontier_lab.option_values import json_file, new_file, positive, write_json, written
from frontier_lab.planning.effective_time import (
    RATES,
    Recovery,
    Shares,
    curve,
    daly_share,
    job_mtbf,
    optima,
    simulate,
    steps_of,
)
from frontier_lab.predicted_run import with_known_share
from frontier_llm.cli.compose import configured
from frontier_llm.cli.console import plain_table, wide_console
from frontier_llm.cli.options import at_least, tool_parser
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.planner.estimate import estimate
from frontier_llm.units import counted, format_seconds

NODES = (128, 1024, 2048, 9408)
"""Numbers of nodes if neither an option nor an experiment gives them."""
GROWTH = (1, 4, 16)
"""Numbers of nodes relative to that of an experiment."""


def _number(least: float, most: float, wants: str) -> Callable[[str], float]:
    """Return a parser for the value of an option: a number from `least` to `most`."""

    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not {wants}")
        return value

    return parse


_not_negative = _number(0.0, sys.float_info.max, "a number of 0 or more")
_share = _number(0.0, 1.0, "a share from 0 to 1")


class Assumption(NamedTuple):
    """An option of the command, whose default is an estimate."""

    value: float
    meaning: str
    parse: Callable[[str], float] = _not_negative


DEFAULTS = {
    "step": Assumption(15.0, "seconds of a step", positive),
    "stall": Assumption(1.0, "seconds that training waits for a checkpoint of the run directory"),
    "local-stall": Assumption(1.0, "seconds that training waits for a node-local checkpoint"),
    "detect": Assumption(20.0, "seconds until a failure is detected"),
    "restart": Assumption(220.0, "seconds to replace nodes and to start all processes again"),
    "replace": Assumption(10.0, "seconds to replace ranks in place and to restore their states"),
    "restore": Assumption(60.0, "seconds to load a checkpoint of the run directory"),
    "local-restore": Assumption(10.0, "seconds to load a node-local checkpoint"),
    "unmendable": Assumption(
        0.05, "share of failures that cannot be repaired in place: the run restarts", _share
    ),
    "local-lost": Assumption(
        0.05, "share of failures that destroy node-local checkpoints and their copies", _share
    ),
    "drain-every": Assumption(
        5.0, "node-local checkpoints per checkpoint of the run directory", at_least(1)
    ),
    "spares": Assumption(0.0, "spare nodes for recovery in place; they count as idle", at_least(0)),
}
"""The assumptions by the names of their options."""
Assumed = dict[str, tuple[float, str]]
"""Value and source of each assumption, by the name of its option."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print the tables and write the files that options name; return the exit code."""
    options = _parse(arguments)
    groups = {word.partition("=")[0] for word in options.overrides}
    # the kind of node of Llama 3, whose rate of failures is the default
    default = [] if groups & {"cluster", "experiment"} else ["cluster=h100_8"]
    config = configured([*default, *options.overrides]).config
    node_counts = options.nodes or NODES
    assumed: Assumed = {name: (default.value, "estimate") for name, default in DEFAULTS.items()}
    if groups & {"model", "experiment"}:
        planned, nodes = _planned(config)
        assumed |= planned
        node_counts = options.nodes or tuple(nodes * factor for factor in GROWTH)
    given = {name: getattr(options, name.replace("-", "_")) for name in DEFAULTS}
    assumed |= {name: (v, f"--{name}") for name, v in given.items() if v is not None}
    assumed["failures"] = _failures(options, config)
    values = {name: value for name, (value, _) in assumed.items()}
    recoveries = recoveries_of(values)
    outcomes = compare(
        recoveries, node_counts, values["failures"], values["step"],
        interval=options.interval, seed=options.seed,
    )  # fmt: skip
    console = wide_console(stderr=options.json == "-")
    console.print(_assumptions_table(assumed))
    console.print(_outcomes_table(outcomes, config.cluster.ranks_per_node))
    if options.json:
        named = {
            name: {"value": value, "source": source} for name, (value, source) in assumed.items()
        }
        results = [_outcome_json(outcome) for outcome in outcomes]
        write_json(options.json, {"assumptions": named, "results": results})
    if options.chart:
        figure = draw(outcomes, values["step"], options.seed)
        with written(options.chart, "--chart"):
            figure.savefig(options.chart, dpi=150)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--nodes", type=_node_counts, metavar="N,N", help="numbers of nodes to compare"
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--failures", type=_rate, metavar="RATE",
        help=f"failures per node-day: a number, or a published rate: {', '.join(RATES)}",
    )  # fmt: skip
    rate.add_argument(
        "--mtbf", type=positive, metavar="HOURS", help="mean hours between failures of one node"
    )
    for name, default in DEFAULTS.items():
        words = f"{default.meaning} (default {default.value:g})"
        parser.add_argument(f"--{name}", type=default.parse, metavar="X", help=words)
    parser.add_argument(
        "--interval", type=positive, metavar="SECONDS",
        help="training between checkpoints (default: the best interval of each way)",
    )  # fmt: skip
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="random seed")
    parser.add_argument(
        "--json",
        type=json_file,
        metavar="FILE",
        help="write the results; - means standard output",
    )
    parser.add_argument(
        "--chart", type=_chart_file, metavar="FILE", help="draw to a PNG or SVG file"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for train")
    return parser.parse_intermixed_args(arguments)


def recoveries_of(values: Mapping[str, float]) -> tuple[Recovery, ...]:
    """Return the ways to recover under assumptions, by the names of `DEFAULTS`."""
    begin = values["detect"] + values["restart"]
    restart = begin + values["restore"]
    return (
        Recovery("restart", values["stall"], restart),
        Recovery(
            "node-local", values["local-stall"], begin + values["local-restore"],
            fallback_share=values["local-lost"], fallback_seconds=restart,
            checkpoints_per_durable=int(values["drain-every"]),
        ),
        Recovery(
            "in place", values["stall"], values["detect"] + values["replace"], keeps_steps=True,
            fallback_share=values["unmendable"], fallback_seconds=restart,
            spares=int(values["spares"]),
        ),
    )  # fmt: skip


def _planned(config: RunConfig) -> tuple[Assumed, int]:
    """Return step and stall as the planner predicts them, and the number of nodes.

    The stall remains an estimate if the planner predicts none: it knows storage, but not copies.
    """
    ranks, per_node = ranks_to_plan(config)
    config = choose(with_known_share(config, partial(print, file=sys.stderr)), ranks, per_node)
    found = estimate(Candidate.of(config, ranks, per_node))
    if found.refused:
        raise ConfigError(
            "experiment", f"{config.model.name} on {config.cluster.name}",
            f"a layout that can run; refused for {found.refused}",
            "choose a layout with frontier-llm plan, or give only a cluster, and --step",
        )  # fmt: skip
    nodes = -(-ranks // per_node)
    source = (
        f"the planner, {config.model.name} on {counted(nodes, 'node')} of {config.cluster.name}"
    )
    if note := config.cluster.estimate_note:
        source += f"; {note}"
    stall = found.time.parts["checkpoint"]
    planned = {"step": (found.time.seconds - stall, source)}
    if stall:
        planned["stall"] = (stall * config.checkpoint.every_steps, source)
    return planned, nodes


def _failures(options: argparse.Namespace, config: RunConfig) -> tuple[float, str]:
    if options.failures is not None:
        rate: tuple[float, str] = options.failures
        return rate
    if options.mtbf is not None:
        return 24 / options.mtbf, "--mtbf"
    operation = config.cluster.operation
    if operation and operation.node_hours_per_failure:
        source = f"cluster {config.cluster.name}: {operation.source.strip()}"
        return 24 / operation.node_hours_per_failure, source
    return RATES["llama3"], f"llama3, because cluster {config.cluster.name} gives no rate"


def _chart_file(text: str) -> Path:
    path = new_file(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{path} does not end with .png or .svg")
    return path


def _node_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of nodes that are separated by commas; return them in ascending order."""
    return tuple(sorted({at_least(1)(number) for number in text.split(",")}))


def _rate(text: str) -> tuple[float, str]:
    """Parse failures per node-day: a number, or the name of a published rate."""
    if text in RATES:
        return RATES[text], f"published rate {text}"
    try:
        return _not_negative(text), "--failures"
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: not a number, nor {', '.join(RATES)}") from None


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
        failures_per_node_day: failures that interrupt a run, per node-day.
        step: seconds of a step, on any number of nodes.
        interval: seconds of training between checkpoints; None = the best interval of each.

    Raises:
        ConfigError: failures are so frequent that a run would hardly ever train.
    """
    outcomes: list[Outcome] = []
    for nodes in node_counts:
        mtbf = job_mtbf(failures_per_node_day, nodes)
        longest = max(max(way.seconds, way.fallback_seconds) for way in recoveries)
        if longest > LONGEST_RECOVERY * mtbf:
            raise ConfigError(
                "nodes", f"{nodes}, on which a failure comes every {mtbf:.3g} s",
                f"at least {longest / LONGEST_RECOVERY:.3g} s between failures: recoveries take up "
                f"to {longest:g} s, and the next failure would interrupt nearly all of them",
                "choose fewer nodes, a lower rate of failures, or faster recoveries",
            )  # fmt: skip
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


def _assumptions_table(assumed: Assumed) -> Table:
    table = plain_table("Assumptions", ["option", "value", "meaning", "source"])
    for name, (value, source) in assumed.items():
        meaning = DEFAULTS[name].meaning if name in DEFAULTS else "failures per node-day"
        table.add_row(f"--{name}", f"{value:.5g}", meaning, source)
    return table


def _outcomes_table(outcomes: Sequence[Outcome], devices_per_node: int) -> Table:
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


def _outcome_json(found: Outcome) -> dict[str, Any]:
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
