"""Plan the run of another program: `frontier-llm plan --from FILE [key=value ...]`.

The file is translated to a row of overrides, which is predicted as a row of `--table` is. Overrides
on the command line replace what the file says.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from frontier_lab.commands.plan_measured import RANKS, candidate_of
from frontier_lab.foreign.files import read_run, started
from frontier_lab.foreign.foreign_run import ForeignRun
from frontier_lab.option_values import write_json
from frontier_lab.planning.plan_json import layout_json
from frontier_lab.planning.search import Found, Goal, search_all
from frontier_llm.cli.compose import groups
from frontier_llm.cli.console import DelayedProgress, plain_table
from frontier_llm.config.decode import keys, nearest
from frontier_llm.config.engine import EngineConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate, budget_bytes, estimate
from frontier_llm.units import GIB, counted, format_count, format_figure

ERRORS = Path(__file__).parents[1] / "planning" / "engine_errors.json"
"""Errors of each engine on published runs, with constants that were fitted to those of other
programs. benchmarks/planner_accuracy.py --fit writes the file."""
ENGINE = "planner.engine"
GIVE_RANKS = ("launch.ranks", "launch.nodes", "planner.nodes")
PARTS = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients", "reductions"),
    "optimizer states": ("master", "moments"),
    "activations": ("activations", "logits", "working", "exchange"),
}
"""Parts of the memory, with their categories; all others are those of the runtime."""
SHOWN_NAMES = 60
LAYOUTS = "3"
"""Layouts that are printed of each program, unless planner.rows is given."""


def plan_file(
    options: argparse.Namespace,
    console: Console,
    tables: Callable[[Found], Iterator[Table | str]],
) -> int:
    """Print what the file says, a prediction of its run, and better layouts."""
    given = _given(options.overrides)
    model = None if options.model_config is None else Path(options.model_config)
    file, variables = started(options.foreign)
    run = read_run(file, model, given, variables)
    for part in _read_parts(run, file.name, given):
        console.print(part, soft_wrap=isinstance(part, str))
    _refuse_missing(run, given)
    row = foreign_row(run, given)
    planned = estimate(candidate_of(row))
    engine = planned.candidate.config.planner.engine
    known = _published(engine.name)
    for part in _estimate_parts(planned, run, known):
        console.print(part, soft_wrap=isinstance(part, str))
    found = {}
    for title, config in _searched(planned.candidate, row, run, given).items():
        with DelayedProgress(console) as progress:
            grid = planned.candidate.grid
            found[title] = search_all([config], Goal(grid.size, grid.ranks_per_node), progress)
        console.print(f"\nBest layouts of {title}:")
        for part in tables(found[title]):
            console.print(part, soft_wrap=isinstance(part, str))
        if found[title].best:
            ratio = planned.time.seconds / found[title].best[0].time.seconds
            but = ", which does not fit" if planned.refused else ""
            console.print(f"{ratio:.2f} times as fast as the run of {file.name}{but}")
    if _published("ours") is None:
        console.print(
            "note: no published runs of this program were compared: its times have no band"
        )
    if options.json:
        layouts = {name: [layout_json(each) for each in one.best] for name, one in found.items()}
        values = {"read": vars(run) | {"row": row}, "run": layout_json(planned), "errors": known}
        write_json(options.json, values | {"layouts": layouts})
    return 0


def _given(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides by key; refuse words that are none."""
    known = {name for name, _, _ in keys()} | groups().keys() | {ENGINE}
    given = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key not in known or not value:
            similar = nearest(key)
            todo = f"did you mean {similar}=VALUE?" if similar else "see frontier-llm train --help"
            raise ConfigError("--from", override, "overrides key=value of the configuration", todo)
        given[key] = value
    return given


def foreign_row(run: ForeignRun, given: Mapping[str, str]) -> dict[str, str]:
    """Return the run as a row of `plan --table`; a given group replaces all of its keys."""
    chosen = _chosen(given)
    read = {key: value for key, value in run.keys.items() if not key.startswith(chosen)}
    row = {key: value for key, value in {**read, **given}.items() if key not in GIVE_RANKS}
    return row | {RANKS: str(run.ranks)}


def _chosen(given: Mapping[str, str]) -> tuple[str, ...]:
    """Return the beginnings of the keys of the groups that are given."""
    return tuple(f"{key}." for key in given if key in groups() or key == ENGINE)


def _refuse_missing(run: ForeignRun, given: Mapping[str, str]) -> None:
    """Raise the error that names all values without which there is no plan."""
    chosen = _chosen(given)
    missing = {key: why for key, why in run.missing.items() if not key.startswith(chosen)}
    if "cluster" not in given:
        names = ", ".join(groups()["cluster"])
        missing["cluster"] = f"no {run.program} file names its machine; one of {names}"
    if run.ranks is None:
        missing["launch.ranks"] = "the number of GPUs is not in the file"
        follow = ("sharding.", "data.global_batch" if "data.micro_batch" in run.keys else "=")
        missing = {key: why for key, why in missing.items() if not key.startswith(follow)}
    if missing:
        todo = "add " + " ".join(f"{key}=..." for key in missing)
        wants = "; ".join(f"{key} ({why})" for key, why in missing.items())
        raise ConfigError("--from", f"a run without {', '.join(missing)}", wants, todo)


def _read_parts(run: ForeignRun, name: str, given: Mapping[str, str]) -> Iterator[Table | str]:
    table = plain_table(escape(f"{name}: a run of {run.program}"), ["there", "value", "here"])
    for row in run.rows:
        table.add_row(*map(escape, row))
    yield table
    yield from map(escape, _remarks(run, given))


def _remarks(run: ForeignRun, given: Mapping[str, str]) -> Iterator[str]:
    if given:
        yield "given here: " + " ".join(f"{key}={value}" for key, value in given.items())
    if run.ignored:
        shown, more = run.ignored[:SHOWN_NAMES], len(run.ignored) - SHOWN_NAMES
        rest = f" and {more} more (--json has all)" if more > 0 else ""
        yield f"no influence on time or memory: {', '.join(shown)}{rest}"
    if run.unknown:
        yield "not known here, so the plan does not count them: " + "; ".join(run.unknown)
    for note in run.notes:
        yield f"note: {note}"


def _estimate_parts(
    planned: Estimate, run: ForeignRun, known: Mapping[str, Any] | None
) -> Iterator[Table | str]:
    candidate, seconds = planned.candidate, planned.time.seconds
    engine: EngineConfig = candidate.config.planner.engine
    cluster = candidate.config.cluster
    model, length = candidate.config.model, candidate.config.data.sequence_length
    count = count_parameters(model, length)
    yield f"\n{format_count(count, 4)} parameters, {length:,} tokens per sample"
    yield f"{candidate.description} on {counted(candidate.grid.size, 'rank')} of {cluster.name}"
    table = plain_table(f"Memory of a rank of stage {planned.peak.stage}",
                        ["part", "GiB"], right=["GiB"])  # fmt: skip
    rest = dict(planned.peak.by_category)
    for part, names in PARTS.items():
        size = sum(rest.pop(name, 0) for name in names)
        table.add_row(part, f"{size / GIB:.2f}")
    table.add_row("runtime", f"{sum(rest.values()) / GIB:.2f}")
    table.add_row("total", f"{planned.peak.total / GIB:.2f}")
    verb = "does not fit" if planned.refused else "fits"
    yield table
    yield (
        f"{verb}: {budget_bytes(candidate) / GIB:.4g} GiB may be used. Memory is counted as this "
        f"program allocates it; that of {run.program} may differ."
    )
    if note := cluster.estimate_note:
        yield f"all times are {note}"
    if known is None:
        band = "no published runs of this engine: no band"
    else:
        low, high = (seconds / (1 + known["most"]), seconds / (1 - known["most"]))
        band = f"{format_figure(low, 3)} to {format_figure(high, 3)} s"
    speed = planned.tokens_per_device
    mfu = "unknown" if planned.mfu is None else f"{planned.mfu:.1%}"
    per_gpu = f"{format_count(speed, 4)} tokens/s per GPU, MFU {mfu}"
    yield f"step: {format_figure(seconds, 4)} s ({band}), {per_gpu}"
    parts = sorted(planned.time.parts.items(), key=lambda part: -part[1])
    shares = [f"{name.replace('_', ' ')} {part / seconds:.0%}" for name, part in parts[:4] if part]
    yield f"bottleneck: {shares[0]} of the step; then {', '.join(shares[1:]) or 'nothing'}"
    if known is not None:
        of = "" if known["engine"] == engine.name else f" of {known['engine']}"
        yield (
            f"error of {engine.name} on {known['runs']} published runs{of}, with constants fitted "
            f"to other programs: mean {known['mean']:.0%}, 9 of 10 within {known['most']:.0%} (the "
            f"band), largest {known['largest']:.0%}"
        )
    if run.engine_note and engine.name == run.engine:
        yield f"note: {run.engine_note}"


def _published(engine: str) -> dict[str, Any] | None:
    """Return the errors of an engine, or of the one from which it takes its constants."""
    known: dict[str, dict[str, Any]] = json.loads(ERRORS.read_text())
    name = {"megatron_core": "megatron_2022"}.get(engine, engine)
    return {"engine": name, **known[name]} if name in known else None


def _searched(
    candidate: Candidate, row: Mapping[str, str], run: ForeignRun, given: Mapping[str, str]
) -> dict[str, Any]:
    """Return the configurations to search: of the program, and of ours."""
    rows = {"planner.rows": given.get("planner.rows", LAYOUTS)}
    own = {key: value for key, value in row.items() if not key.startswith(f"{ENGINE}.")}
    own |= {ENGINE: "ours", **rows}
    limits = dict(text.split("=", 1) for text in run.search)
    limits = {key: value for key, value in limits.items() if key not in given}
    theirs = candidate_of({**row, **rows, **limits}).config
    return {f"{run.program} ({theirs.planner.engine.name})": theirs,
            "this program (ours)": candidate_of(own).config}  # fmt: skip
