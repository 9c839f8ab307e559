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
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from frontier_llm.cli.console import wide_console
from frontier_llm.cli.goodput_comparison import (
    Assumptions,
    Outcome,
    assumptions_table,
    compare,
    draw,
    outcome_json,
    outcomes_table,
)
from frontier_llm.cli.options import at_least, json_file, new_file, positive, tool_parser
from frontier_llm.cli.unused_keys import configured
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.planner.effective_time import RATES, Recovery
from frontier_llm.planner.estimate import estimate
from frontier_llm.units import counted

NODES = (128, 1024, 2048, 9408)
"""Numbers of nodes if neither an option nor an experiment gives them."""
GROWTH = (1, 4, 16)
"""Numbers of nodes relative to that of an experiment."""
DEFAULTS: dict[str, tuple[float, str]] = {
    "step": (15.0, "seconds of a step"),
    "stall": (1.0, "seconds that training waits for a checkpoint of the run directory"),
    "local-stall": (1.0, "seconds that training waits for a node-local checkpoint"),
    "detect": (20.0, "seconds until a failure is detected"),
    "restart": (220.0, "seconds to replace nodes and to start all processes again"),
    "replace": (10.0, "seconds to replace ranks in place and to restore their states"),
    "restore": (60.0, "seconds to load a checkpoint of the run directory"),
    "local-restore": (10.0, "seconds to load a node-local checkpoint"),
    "unmendable": (0.05, "share of failures that cannot be repaired in place: the run restarts"),
    "local-lost": (0.05, "share of failures that destroy node-local checkpoints and their copies"),
    "drain-every": (5.0, "node-local checkpoints per checkpoint of the run directory"),
    "spares": (0.0, "spare nodes for recovery in place; they count as idle"),
}
"""Default and meaning of each assumption; all of these defaults are estimates."""
SHARES = ("unmendable", "local-lost")
"""Assumptions between 0 and 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print the tables and write the files that options name; return the exit code."""
    options = _parse(arguments)
    config = decode(configured(_with_cluster(options.overrides)))
    node_counts = options.nodes or NODES
    assumed: Assumptions = {name: (value, "estimate") for name, (value, _) in DEFAULTS.items()}
    if _names_model(options.overrides):
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
    meanings = {name: meaning for name, (_, meaning) in DEFAULTS.items()}
    console.print(assumptions_table(assumed, meanings))
    console.print(outcomes_table(outcomes, config.cluster.ranks_per_node))
    if options.json:
        _write_json(options.json, assumed, outcomes)
    if options.chart:
        draw(outcomes, values["step"], options.seed).savefig(options.chart, dpi=150)
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
    for name, (default, meaning) in DEFAULTS.items():
        kind = _share if name in SHARES else at_least(0) if name == "spares" else _not_negative
        kind = positive if name == "step" else at_least(1) if name == "drain-every" else kind
        parser.add_argument(
            f"--{name}", type=kind, metavar="X", help=f"{meaning} (default {default:g})"
        )
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


def _with_cluster(overrides: Sequence[str]) -> list[str]:
    """Choose the cluster of Llama 3's kind of node if the command line chooses none."""
    chosen = any(word.startswith(("cluster=", "experiment=")) for word in overrides)
    return [*overrides] if chosen else ["cluster=h100_8", *overrides]


def _names_model(overrides: Sequence[str]) -> bool:
    return any(word.startswith(("model=", "experiment=")) for word in overrides)


def _planned(config: RunConfig) -> tuple[Assumptions, int]:
    """Return step and stall as the planner predicts them, and the number of nodes.

    The stall remains an estimate if the planner predicts none: it knows storage, but not copies.
    """
    ranks, per_node = ranks_to_plan(config)
    config = choose(config, ranks, per_node)
    found = estimate(Candidate.of(config, ranks, per_node))
    if found.refused:
        raise ConfigError(
            "experiment", config.model.name, f"a layout that can run; refused for {found.refused}",
            "choose a layout with frontier-llm plan, or give only a cluster, and --step",
        )  # fmt: skip
    nodes = -(-ranks // per_node)
    source = (
        f"the planner, {config.model.name} on {counted(nodes, 'node')} of {config.cluster.name}"
    )
    stall = found.time.parts["checkpoint"]
    planned = {"step": (found.time.seconds - stall, source)}
    if stall:
        planned["stall"] = (stall * config.checkpoint.every_steps, source)
    return planned, nodes


def _failures(options: argparse.Namespace, config: RunConfig) -> tuple[float, str]:
    """Return the failures per node-day, and their source."""
    if options.failures is not None:
        return options.failures
    if options.mtbf is not None:
        return 24 / options.mtbf, "--mtbf"
    operation = config.cluster.operation
    if operation and operation.node_hours_per_failure:
        source = f"cluster {config.cluster.name}: {operation.source.strip()}"
        return 24 / operation.node_hours_per_failure, source
    return RATES["llama3"], f"llama3, because cluster {config.cluster.name} gives no rate"


def _write_json(target: str, assumed: Assumptions, outcomes: Sequence[Outcome]) -> None:
    """Write assumptions and results to a file, or to standard output for `-`."""
    named = {name: {"value": value, "source": source} for name, (value, source) in assumed.items()}
    results = [outcome_json(outcome) for outcome in outcomes]
    text = json.dumps({"assumptions": named, "results": results}, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


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


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value
