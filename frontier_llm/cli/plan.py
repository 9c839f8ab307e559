"""Predict how a run would perform on a cluster, without a GPU: `frontier-llm plan [key=value ...]`.

A layout is a choice of tensor, pipeline and data parallelism, sharding factors and micro-batch.
Prints the fastest layouts for `planner.nodes` nodes of `cluster`, and why other layouts cannot run.
If planner.nodes is a list, prints scaling curves: the fastest layout for each number of nodes. With
planner.objective=nodes it finds the smallest number of nodes in the list that suffices instead.
`--this` estimates only the layout of the configuration. `--table` compares predictions with
measured speeds. Overrides are the same as for frontier-llm train. docs/planner.md describes the
method.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from frontier_llm.cli.compose import compose
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.delayed_progress import DelayedProgress
from frontier_llm.cli.options import json_file, new_file, tool_parser
from frontier_llm.cli.plan_measured import compare
from frontier_llm.cli.plan_tables import (
    cost_table,
    details,
    layouts_table,
    overrides,
    refusals_table,
    scaling_table,
)
from frontier_llm.cli.planned_experiment import experiment_file, experiment_text
from frontier_llm.cli.unused_keys import configured
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.planner.estimate import Estimate, estimate
from frontier_llm.planner.plan_page import make_page
from frontier_llm.planner.run_cost import run_cost
from frontier_llm.planner.scaling import Point, fewest_nodes, scaling_curves
from frontier_llm.planner.search import Found, Goal, search_all
from frontier_llm.units import counted

SEARCHED = ("parallel", "sharding", "collectives")
"""Sections of which the planner tries several values."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print the result and write the files that options name; return the exit code."""
    options = _parse(arguments)
    console = wide_console(stderr=options.json == "-")
    if options.table:
        return compare(options, console)
    config = decode(configured(options.overrides, SEARCHED))
    saved = None if options.save is None else experiment_file(options.save)
    nodes = config.planner.nodes or ()
    if len(nodes) > 1 and config.planner.objective != "nodes" and not options.this:
        _check_one_layout(options)
        points = _scaling(_configs(config, options.overrides), console)
        _write_json(options.json, {"scaling": [point.to_json() for point in points]})
        return 0
    found = (
        _estimate_this(config)
        if options.this
        else _search(_configs(config, options.overrides), console)
    )
    _print(found, console)
    _write_json(options.json, _found_json(found))
    if not found.best:
        raise _nothing_fits(config, found)
    if options.html:
        _write(options.html, _page(config, found))
    if saved:
        _check_can_run(options.save, found.best[0])
        _write(saved, experiment_text(options.save, options.overrides, found.best[0]))
        console.print(f"saved: {saved}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--this", action="store_true", help="estimate the configured layout, do not search"
    )
    parser.add_argument(
        "--json",
        type=json_file,
        metavar="FILE",
        help="write the results; - means standard output",
    )
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a page with charts")
    parser.add_argument(
        "--save", metavar="NAME",
        help="write the best layout to experiment/NAME.yaml in --conf-dir, or else in conf/",
    )  # fmt: skip
    parser.add_argument(
        "--table", metavar="FILE.csv",
        help="predict the measured runs of a table, print the errors and write them next to it",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=new_file, metavar="FILE", help="with --table: write to this CSV or JSON file"
    )
    parser.add_argument(
        "--fit", action="store_true", help="with --table: fit the constants of its cluster"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for train")
    options = parser.parse_intermixed_args(arguments)
    if not options.table and (options.fit or options.out):
        parser.error("--fit and --out need --table")
    return options


def _check_one_layout(options: argparse.Namespace) -> None:
    """Refuse options that need a single layout if several numbers of nodes are planned for."""
    for option, got in (("--save", options.save), ("--html", options.html)):
        if got is not None:
            raise ConfigError(
                option,
                got,
                "one number of nodes: a list gives scaling curves",
                "set planner.nodes to one of them",
            )


def _check_can_run(name: str, best: Estimate) -> None:
    """Refuse to save a layout that cannot run, which `--this` may have estimated."""
    if best.refused:
        raise ConfigError(
            "--save",
            name,
            f"a layout that can run; this one was refused for {best.refused}",
            "change the layout, or leave out --this to search for one",
        )


def _estimate_this(config: RunConfig) -> Found:
    """Estimate the configured layout, as if a search had found only this one."""
    ranks, ranks_per_node = ranks_to_plan(config)
    config = choose(config, ranks, ranks_per_node)  # replaces `auto` in the layout
    estimated = estimate(Candidate.of(config, ranks, ranks_per_node))
    found = Found(best=[estimated], examined=1, timed=1)
    if estimated.refused:
        found.refused[estimated.refused] += 1
    return found


def _configs(config: RunConfig, overrides: Sequence[str]) -> list[RunConfig]:
    """Return one configuration per preset of `planner.collectives`; the search compares them."""
    presets = config.planner.collectives
    if presets is None:
        return [config]
    others = [override for override in overrides if not override.startswith("collectives=")]
    return [decode(compose([*others, f"collectives={preset}"])) for preset in presets]


def _search(configs: Sequence[RunConfig], console: Console) -> Found:
    """Search the layouts of all configurations, with a progress bar on the console."""
    with DelayedProgress(console) as progress:
        if configs[0].planner.objective == "nodes":
            return fewest_nodes(configs, progress)
        ranks, ranks_per_node = ranks_to_plan(configs[0])
        return search_all(configs, Goal(ranks=ranks, ranks_per_node=ranks_per_node), progress)


def _scaling(configs: Sequence[RunConfig], console: Console) -> list[Point]:
    """Search the best layout for every number of nodes, and print the scaling curves."""
    with DelayedProgress(console) as progress:
        points = scaling_curves(configs, progress)
    console.print(scaling_table(configs[0], points))
    return points


def _print(found: Found, console: Console) -> None:
    if found.best:
        console.print(layouts_table(found))
        console.print(f"Layout 1: {overrides(found.best[0])}", soft_wrap=True)
        for part in details(found.best[0]):
            console.print(part)
        tokens = found.best[0].candidate.config.planner.tokens
        if tokens is not None:
            console.print(cost_table(found, tokens))
    if found.refused:
        console.print(refusals_table(found))


def _found_json(found: Found) -> dict[str, Any]:
    return {
        "candidates": [_layout_json(layout) for layout in found.best],
        "refused": dict(sorted(found.refused.items())),
        "refused_examples": dict(sorted(found.examples.items())),
        "examined": found.examined,
        "timed": found.timed,
    }


def _layout_json(layout: Estimate) -> dict[str, Any]:
    tokens = layout.candidate.config.planner.tokens
    cost = {} if tokens is None else {"cost": run_cost(layout, tokens).to_json()}
    return layout.to_json() | cost


def _page(config: RunConfig, found: Found) -> str:
    best: Estimate = found.best[0]
    subtitle = (
        f"{counted(best.candidate.grid.size, 'rank')} of {config.cluster.device.name}; "
        f"{found.examined} legal combinations, step time predicted for {found.timed} layouts"
    )
    title = f"{config.model.name} on {config.cluster.name}"
    return make_page(title, found, subtitle)


def _nothing_fits(config: RunConfig, found: Found) -> ConfigError:
    """Build the error for a search without a result; it names the most frequent reason."""
    model = config.model.name
    if not found.refused:
        ranks, _ = ranks_to_plan(config)
        return ConfigError(
            "planner",
            f"no layout of {model} on {counted(ranks, 'rank')}",
            "tensor and pipeline sizes whose product divides the number of ranks; tensor ranks "
            "must share a node",
            "change planner.tensor or planner.pipeline, or the number of nodes",
        )
    counts: Counter[str] = Counter()
    for reason, number in found.refused.items():  # "memory, most for ..." is one reason here
        counts[reason.partition(",")[0]] += number
    reason, count = counts.most_common(1)[0]
    share = "all" if count == sum(counts.values()) else f"most ({count})"
    batch = "" if reason == "memory" else "another data.global_batch, "
    return ConfigError(
        "planner",
        f"{sum(counts.values())} layouts of {model}, none of which can run",
        "a layout that is legal and fits into memory",
        f"{share} were refused for {reason}: try more nodes (planner.nodes), {batch}or "
        "fewer planner.* constraints",
    )


def _write_json(target: str | None, values: dict[str, Any]) -> None:
    """Write the values to the file of `--json`, to standard output for `-`, or not at all."""
    if target is None:
        return
    text = json.dumps(values, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        _write(Path(target), text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "FILE", path, f"a file that can be written ({error.strerror})", "name another file"
        ) from None
