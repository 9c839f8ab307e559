"""Predict how a run would perform on a cluster, without a GPU: `frontier-llm plan [key=value ...]`.

A layout is a choice of tensor, pipeline and data parallelism, sharding factors and micro-batch.
Prints the fastest layouts for `planner.nodes` nodes of `cluster`, and why other layouts cannot run.
If planner.nodes is a list, prints scaling curves: the fastest layout for each number of nodes. With
planner.objective=nodes it finds the smallest number of nodes in the list that suffices instead.
`--this` estimates only the layout of the configuration. `--table` compares predictions with
measured speeds. `--from` plans a run of Megatron-LM, torchtitan or DeepSpeed, given by its file.
Overrides are the same as for frontier-llm train. docs/planner.md describes the method.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from frontier_lab.commands.planned_experiment import (
    experiment_file,
    experiment_text,
    keys_without_effect,
)
from frontier_lab.option_values import json_file, new_file, refuse_useless, write_json, write_text
from frontier_lab.planning import search
from frontier_lab.planning.plan_json import found_json, point_json
from frontier_lab.planning.plan_page import make_page
from frontier_lab.planning.run_cost import run_cost
from frontier_lab.planning.search import Found, Goal, Point
from frontier_lab.planning.slow_heads import head_warning
from frontier_lab.predicted_run import assumed_cluster, with_known_share
from frontier_llm.cli.compose import compose, configured
from frontier_llm.cli.console import DelayedProgress, plain_table, wide_console
from frontier_llm.cli.kept_defaults import warn_of_kept_defaults
from frontier_llm.cli.options import tool_parser
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose, format_layers
from frontier_llm.planner.estimate import (
    FREE_COST,
    FREE_SHARE,
    FULL_COST,
    Estimate,
    budget_bytes,
    estimate,
)
from frontier_llm.planner.memory import StageMemory
from frontier_llm.units import (
    GIB,
    counted,
    format_bytes,
    format_count,
    format_figure,
)

SEARCHED = ("parallel", "sharding", "collectives")
"""Sections of which the planner tries several values."""
MOST_STAGES = 8
"""Maximum number of stages whose memory is printed; --json writes all stages."""
NEAR = 0.03
"""Layouts whose step times differ less are not certain to be in the order of the table."""
EXAMPLE_WIDTH = 72
"""Characters per line of the column with examples of refused layouts."""

NEEDS = {**dict.fromkeys(("--fit", "--out"), "--table"), "--model-config": "--from"}
EXCLUDES = {
    "--json": ("--table",),
    **dict.fromkeys(("--this", "--html", "--save"), ("--table", "--from")),
    "--table": ("--from",),
}
"""Options that have no effect without, or with, others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print the result and write the files that options name; return the exit code."""
    options = _parse(arguments)
    console = wide_console(stderr=options.json == "-")
    if options.table:
        from frontier_lab.commands.plan_measured import compare  # most plans do not need it

        return compare(options, console)
    if options.foreign:
        from frontier_lab.commands.plan_foreign import plan_file

        return plan_file(options, console, _short_parts)
    config = _configured(options.overrides, partial(console.print, soft_wrap=True))
    saved = None if options.save is None else experiment_file(options.save)
    nodes = config.planner.nodes or ()
    if options.this:
        found = _estimate_this(config)
    elif len(nodes) > 1 and config.planner.objective != "nodes":
        return _print_scaling(config, options, console)
    else:
        found = _search(_configs(config, options.overrides), console)
    _print(found, console)
    if options.json:
        write_json(options.json, found_json(found))
    if not found.best:
        raise _nothing_fits(config, found)
    best = found.best[0]
    if options.html:
        subtitle = (
            f"{counted(best.candidate.grid.size, 'rank')} of {config.cluster.device.name}; "
            f"{_counts(found)}"
        )
        title = f"{config.model.name} on {config.cluster.name}"
        write_text(options.html, make_page(title, found, subtitle))
    if saved:
        if best.refused:  # `--this` estimates it nevertheless
            wants = f"a layout that can run; this one was refused for {best.refused}"
            todo = "change the layout, or leave out --this to search for one"
            raise ConfigError("--save", options.save, wants, todo)
        write_text(saved, experiment_text(options.save, options.overrides, best))
        console.print(f"saved: {saved}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--this", action="store_true", help="estimate the configured layout, do not search"
    )
    parser.add_argument(
        "--json", type=json_file, metavar="FILE", help="write the results; - means standard output"
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
    parser.add_argument(
        "--from", dest="foreign", metavar="FILE",
        help="plan a run of another program: a script (or 'NAME=VALUE script argument') or log of "
        "Megatron-LM, a TOML file of torchtitan, or a JSON file of DeepSpeed",
    )  # fmt: skip
    parser.add_argument(
        "--model-config", metavar="config.json",
        help="with --from: the Hugging Face model of a DeepSpeed file (default: beside the file)",
    )  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for train")
    options = parser.parse_intermixed_args(arguments)
    return refuse_useless(parser, options, NEEDS, EXCLUDES)


def _configured(overrides: Sequence[str], explain: Callable[[str], None]) -> RunConfig:
    """Return the configuration to plan; print what it assumes."""
    config = configured(overrides, SEARCHED).config
    if assumed := assumed_cluster(config, overrides):
        explain(f"cluster: {assumed[0]}; for another one {assumed[1]}")
    config = with_known_share(config, explain)
    warn_of_kept_defaults(config, overrides, lambda text: explain(f"warning: {text}"))
    return config


def _print_scaling(config: RunConfig, options: argparse.Namespace, console: Console) -> int:
    """Search the best layout for every number of nodes, and print the scaling curves."""
    for option, got in (("--save", options.save), ("--html", options.html)):
        if got is not None:
            wants = "one number of nodes: a list gives scaling curves"
            raise ConfigError(option, got, wants, "set planner.nodes to one of them")
    configs = _configs(config, options.overrides)
    with DelayedProgress(console) as progress:
        points = search.scaling_curves(configs, progress)
    console.print(scaling_table(configs[0], points))
    if options.json:
        write_json(options.json, {"scaling": [point_json(point) for point in points]})
    return 0


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
    configs = [decode(compose([*others, f"collectives={preset}"])) for preset in presets]
    return [each.model_copy(update={"data": config.data}) for each in configs]


def _search(configs: Sequence[RunConfig], console: Console) -> Found:
    with DelayedProgress(console) as progress:
        if configs[0].planner.objective == "nodes":
            return search.fewest_nodes(configs, progress)
        return search.search_all(configs, Goal(*ranks_to_plan(configs[0])), progress)


def _print(found: Found, console: Console) -> None:
    if found.best:
        console.print(layouts_table(found))
        if warning := head_warning(found.best[0].candidate):
            console.print(warning, soft_wrap=True)
        console.print(f"Layout 1: {overrides(found.best[0])}", soft_wrap=True)
        for part in details(found.best[0]):
            console.print(part)
        tokens = found.best[0].candidate.config.planner.tokens
        if tokens is not None:
            console.print(cost_table(found, tokens))
    if found.refused:
        console.print(refusals_table(found))


def _short_parts(found: Found) -> Iterator[Table | str]:
    """Yield the best layouts and the overrides of the first, or why there is none."""
    if not found.best:
        yield refusals_table(found)
        return
    yield layouts_table(found)
    yield f"Layout 1: {overrides(found.best[0])}"


def _nothing_fits(config: RunConfig, found: Found) -> ConfigError:
    """Build the error for a search without a result; it names the most frequent reason."""
    model = config.model.name
    if not found.refused:
        ranks, _ = ranks_to_plan(config)
        wants = "tensor and pipeline sizes whose product divides the number of ranks; tensor ranks "
        wants += "must share a node"
        todo = "change planner.tensor or planner.pipeline, or the number of nodes"
        return ConfigError(
            "planner", f"no layout of {model} on {counted(ranks, 'rank')}", wants, todo
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


def _told_apart(values: Sequence[float]) -> list[str]:
    """Write numbers with as many digits, at least 3, as tell different ones apart."""
    for digits in range(3, 6):
        texts = [format_figure(value, digits) for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


def _counts(found: Found) -> str:
    """Say how much was searched: one combination gives a layout with each set of its factors."""
    return (
        f"{counted(found.examined, 'legal combination')} before the choice of sharding factors; "
        f"with factors, {counted(found.timed, 'layout')} with a predicted time"
    )


def layouts_table(found: Found) -> Table:
    """Return the table of the best layouts, one row per layout.

    Some columns are left out where they say nothing: values that all layouts share, which the
    caption names, seconds of 0 and a CP of 1 in all layouts, and an HFU that equals the MFU.
    """
    rows = [_row(layout) for layout in found.best]
    for row, seconds in zip(rows, _told_apart([b.time.seconds for b in found.best]), strict=True):
        row["step s"] = seconds
    best = found.best[0]
    zero = [
        name for name in rows[0] if name.endswith(" s") and not any(float(r[name]) for r in rows)
    ]
    zero += ["CP"] if all(row["CP"] == "1" for row in rows) else []
    equal_columns = (name for name in rows[0] if len({row[name] for row in rows}) == 1)
    same = [name for name in equal_columns if len(rows) > 1 and name not in (*zero, "HFU")]
    equal = ["HFU"] if all(row["HFU"] == row["MFU"] for row in rows) else []
    columns = [name for name in rows[0] if name not in (*same, *zero, *equal)]
    config = best.candidate.config
    title = (
        f"{config.model.name} on {counted(best.candidate.grid.size, 'rank')} of "
        f"{config.cluster.name}, {config.data.batch_in_words} per step: "
        f"{_counts(found)}"
    )
    table = plain_table(title, ["", *columns])
    by_memory = config.planner.objective == "memory"
    equal_rows = 0 if by_memory else search.nearly_equal(found.best)
    for number, row in enumerate(rows, start=1):
        mark = "~" if number <= equal_rows > 1 else ""
        table.add_row(f"{number}{mark}", *(row[name] for name in columns))
    notes = [
        "PPxC: stages x chunks per stage",
        "schedule: parallel.schedule+parallel.waiting_weights",
        "P/G/OS: data ranks over which parameters, gradients and optimizer states are sharded",
        "columns of links: seconds of communication that does not overlap with computation",
    ]
    if same:
        notes.append("all layouts: " + ", ".join(f"{name} {rows[0][name]}" for name in same))
    if estimates := config.cluster.estimate_note:
        notes.append(f"all times are {estimates}")
    table.caption = "; ".join([*notes, *([] if by_memory else _ranking_notes(found.best))])
    return table


def _ranking_notes(layouts: Sequence[Estimate]) -> Iterator[str]:
    """Yield what a reader must know about the order of layouts that are ranked by their speed."""
    equal_rows = search.nearly_equal(layouts)
    if equal_rows > 1:
        yield f"~: at most {FREE_COST:.0%} slower than the fastest, so the roomiest comes first"
    if any(layout.judged_seconds > layout.time.seconds for layout in layouts):
        yield (
            f"layouts in the last {FREE_SHARE:.0%} of the memory rank as if they were up to "
            f"{FULL_COST:.0%} slower"
        )
    limit = min(layout.judged_seconds for layout in layouts) * (1 + NEAR)
    near = sum(layout.judged_seconds <= limit for layout in layouts)
    if near > max(1, equal_rows):
        yield f"the first {near} differ by less than {NEAR:.0%}, so their order is not certain"


def overrides(layout: Estimate) -> str:
    """Return the overrides that give a layout, without keys that have no effect in it."""
    config = layout.candidate.config
    names = ("tensor", "pipeline", "context", "chunks", "schedule", "waiting_weights", "sequence",
             "layers_per_stage")  # fmt: skip
    chosen = config.parallel.model_dump(mode="json", include=set(names))
    values = {
        **{f"parallel.{name}": str(chosen[name]).lower() for name in names},
        "parallel.layers_per_stage": format_layers(config.parallel.layers_per_stage),
        "data.micro_batch": config.data.micro_batch,
        "recompute": config.recompute,
        **{f"sharding.{name}": factor for name, factor in layout.candidate.factors.by_key.items()},
    }
    if config.planner.collectives is not None:
        values = {"collectives": config.collectives.name, **values}
    idle = keys_without_effect(layout.candidate)
    return " ".join(f"{key}={value}" for key, value in values.items() if key not in idle)


def details(layout: Estimate) -> Iterator[Table]:
    """Yield two tables of a layout: the parts of its step time, and of its peak memory."""
    title = "Layout 1: parts of the step time, for the slowest stage"
    table = plain_table(title, ["part", "seconds", "share"])
    for name, seconds in layout.time.parts.items():
        share = f"{seconds / layout.time.seconds:.1%}"
        table.add_row(name.replace("_", " "), f"{seconds:.3g}", share)
    yield table
    stages = _shown_stages(layout)
    fullest = layout.peak.stage
    columns = ["stage", *(f"{m.stage}{' (fullest)' * (m.stage == fullest)}" for m in stages)]
    device = layout.candidate.config.cluster.device.memory_gib
    usable = budget_bytes(layout.candidate) / GIB
    title = f"Layout 1: peak memory per rank, GiB of {device:.4g}"
    if usable < device:
        title += f", of which {usable:.4g} may be used"
    table = plain_table(title, columns)
    for name in layout.memory[0].by_category:
        if any(memory.by_category[name] for memory in stages):
            sizes = [memory.by_category[name] / GIB for memory in stages]
            table.add_row(name, *map(_short, sizes))
    table.add_row("total", *(_short(memory.total / GIB) for memory in stages))
    if layout.peak.host_bytes:
        host = layout.candidate.config.cluster.host.memory_gib
        table.caption = (
            f"and {format_bytes(layout.peak.host_bytes)} of main memory per rank; a node has "
            f"{host:g} GiB"
        )
    yield table


def _shown_stages(layout: Estimate) -> list[StageMemory]:
    """Return the memory of at most MOST_STAGES stages: the first, fullest, last and some others."""
    stages, last = layout.memory, len(layout.memory) - 1
    count = min(MOST_STAGES, len(stages))
    spread = {round(place * last / max(1, count - 1)) for place in range(count)}
    if layout.peak.stage not in spread:
        spread.remove(min(spread - {0, last}, key=lambda stage: abs(stage - layout.peak.stage)))
    return [stages[stage] for stage in sorted({*spread, layout.peak.stage})]


def cost_table(found: Found, tokens: float) -> Table:
    """Return the table of what a run of `tokens` tokens costs with each layout."""
    columns = ["", "steps", "days", "node-hours", "MWh", "waiting for checkpoints", "failures",
               "days lost to failures"]  # fmt: skip
    table = plain_table(f"Cost of {format_count(tokens)} tokens", columns)
    for number, layout in enumerate(found.best, start=1):
        cost = run_cost(layout, tokens)
        table.add_row(
            str(number),
            f"{cost.steps:,}",
            f"{cost.days:.1f}",
            format_count(cost.node_hours),
            _known(cost.megawatt_hours),
            f"{cost.checkpoint_share:.2%}",
            _known(cost.interruptions),
            _known(cost.lost_days),
        )
    table.caption = (
        "a failure loses half the time between two checkpoints on average; the time of restarts "
        "is not included; unknown: set cluster.operation.node_watts or .node_hours_per_failure"
    )
    return table


def _known(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def refusals_table(found: Found) -> Table:
    """Return the table of refused layouts by reason."""
    table = plain_table("Refused layouts", ["reason", "count"])
    table.add_column("for example", max_width=EXAMPLE_WIDTH)
    for reason, count in sorted(found.refused.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(reason, str(count), found.examples.get(reason, ""))
    return table


def scaling_table(config: RunConfig, points: Sequence[Point]) -> Table:
    """Return the table of the scaling curves."""
    title = (
        f"{config.model.name} on {config.cluster.name}: strong scaling with "
        f"{config.data.batch_in_words} per step; weak scaling starts with the same number"
    )
    columns = ["scaling", "nodes", "ranks", "tokens/s", "efficiency", "MFU", "layout"]
    table = plain_table(title, columns)
    for point in points:
        found = point.strong or point.weak
        size = (str(point.nodes), str(found.candidate.grid.size) if found else "")
        table.add_row("strong", *size, *_point(point.strong, point.strong_efficiency))
        table.add_row("weak", *size, *_point(point.weak, point.weak_efficiency))
    return table


def _point(layout: Estimate | None, efficiency: float | None) -> list[str]:
    if layout is None or efficiency is None:
        return ["none fits", "", "", ""]
    return [
        format_count(layout.tokens_per_second, 3),
        f"{efficiency:.0%}",
        _percent(layout.mfu),
        layout.candidate.description,
    ]


def _row(layout: Estimate) -> dict[str, str]:
    candidate, time = layout.candidate, layout.time
    config = candidate.config
    device, wire = config.cluster.device.memory_gib, config.collectives
    exposed = {
        f"{k.name} s": format_figure(time.exposed.get(k.name, 0.0)) for k in config.cluster.links
    }
    return {
        "TP": str(candidate.grid.tensor),
        "CP": str(candidate.grid.context),
        "PPxC": f"{candidate.grid.pipeline}x{config.parallel.chunks}",
        "schedule": candidate.schedule,
        "DP": str(candidate.grid.data),
        "micro": str(config.data.micro_batch),
        "P/G/OS": candidate.factors.in_words,
        "recompute": config.recompute,
        "wire": wire.name if wire.name != "plain" else wire.grads_format,
        "step s": format_figure(time.seconds, 3),
        "tokens/s": format_count(layout.tokens_per_second, 3),
        "MFU": _percent(layout.mfu),
        "HFU": _percent(layout.hfu),
        f"peak of {device:.4g} GiB": format_figure(layout.peak.total / GIB, 4),
        "bubble": f"{time.bubble_fraction:.1%}",
        **exposed,
        "ckpt s": format_figure(time.parts["checkpoint"]),
    }


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%}"


def _short(gib: float) -> str:
    """Return a size with two decimals, or as a power of ten if that would be 0.00."""
    return f"{gib:.2f}" if gib >= 0.005 else f"{gib:.0e}" if gib else "0"
