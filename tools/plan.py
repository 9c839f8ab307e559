"""Plan a run without a GPU: `python tools/plan.py [key=value ...]`, the overrides of train.py.

Prints the best layouts for `planner.nodes` nodes of `cluster`, and what was refused. A list of
nodes gives scaling curves. `--this` judges the composed layout alone; docs/planner.md says how.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.estimate import Estimate, estimate
from frontier_llm.planner.page import make_page
from frontier_llm.planner.scaling import Point, fewest_nodes, scaling_curves
from frontier_llm.planner.search import Found, Goal, search_all
from tools.compose import compose
from tools.console import wide_console
from tools.late_progress import LateProgress
from tools.options import ending, new_file, tool_parser
from tools.plan_file import save_experiment
from tools.plan_tables import details, layouts_table, refusals_table, scaling_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print, write what is asked for; return the exit code."""
    options = _parse(arguments)
    console = wide_console(stderr=options.json == "-")
    config = decode(compose(options.overrides))
    nodes = config.planner.nodes or ()
    if len(nodes) > 1 and config.planner.objective != "nodes" and not options.this:
        _check_one_layout(options)
        points = _scaling(_configs(config, options.overrides), console)
        _write_json(options.json, {"scaling": [point.to_json() for point in points]})
        return 0
    found = (
        _judge_this(config)
        if options.this
        else _search(_configs(config, options.overrides), console)
    )
    _print(found, console)
    _write_json(options.json, _found_json(found))
    if not found.best:
        raise _nothing_fits(config, found)
    if options.html:
        _write(options.html, _page(config, found))
    if options.save:
        console.print(f"saved: {_save(options, found.best[0])}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument("--this", action="store_true", help="judge the composed layout, no search")
    parser.add_argument("--json", metavar="FILE", help="write the figures; - = standard output")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a page with pictures")
    parser.add_argument(
        "--save", metavar="NAME", help="write conf/experiment/NAME.yaml of the best"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    return parser.parse_intermixed_args(arguments)


def _check_one_layout(options: argparse.Namespace) -> None:
    """Refuse what only one layout has, where a list of nodes is planned for."""
    for option, got in (("--save", options.save), ("--html", options.html)):
        if got is not None:
            raise ConfigError(
                option,
                got,
                "one number of nodes: a list gives scaling curves",
                "set planner.nodes to one of them",
            )


def _save(options: argparse.Namespace, judged: Estimate) -> Path:
    if judged.refused:
        raise ConfigError(
            "--save",
            options.save,
            f"a layout that can run; this one was refused for {judged.refused}",
            "change the layout, or leave out --this: the search finds one that can",
        )
    return save_experiment(options.save, options.overrides, judged)


def _judge_this(config: RunConfig) -> Found:
    ranks, per_node = ranks_to_plan(config)
    judged = estimate(Candidate.of(config, ranks, per_node))
    found = Found(best=[judged], looked_at=1, judged=1)
    if judged.refused:
        found.refused[judged.refused] += 1
    return found


def _configs(config: RunConfig, overrides: Sequence[str]) -> list[RunConfig]:
    """Return the configurations that compete: one for each of `planner.collectives`."""
    presets = config.planner.collectives
    if presets is None:
        return [config]
    others = [override for override in overrides if not override.startswith("collectives=")]
    return [decode(compose([*others, f"collectives={preset}"])) for preset in presets]


def _search(configs: Sequence[RunConfig], console: Console) -> Found:
    with LateProgress(console) as progress:
        if configs[0].planner.objective == "nodes":
            return fewest_nodes(configs, progress)
        ranks, per_node = ranks_to_plan(configs[0])
        return search_all(configs, Goal(ranks, per_node), progress)


def _scaling(configs: Sequence[RunConfig], console: Console) -> list[Point]:
    with LateProgress(console) as progress:
        points = scaling_curves(configs, progress)
    console.print(scaling_table(configs[0], points))
    return points


def _print(found: Found, console: Console) -> None:
    if found.best:
        console.print(layouts_table(found))
        for part in details(found.best[0]):
            console.print(part)
    if found.refused:
        console.print(refusals_table(found))


def _found_json(found: Found) -> dict[str, Any]:
    return {
        "candidates": [judged.to_json() for judged in found.best],
        "refused": dict(sorted(found.refused.items())),
        "refused_examples": dict(sorted(found.examples.items())),
        "looked_at": found.looked_at,
        "judged": found.judged,
    }


def _page(config: RunConfig, found: Found) -> str:
    best: Estimate = found.best[0]
    words = (
        f"{best.candidate.grid.size} ranks of {config.cluster.device.name}; "
        f"{found.looked_at} legal cuts, {found.judged} layouts timed"
    )
    title = f"{config.model.name} on {config.cluster.name}"
    return make_page(title, found, words)


def _nothing_fits(config: RunConfig, found: Found) -> ConfigError:
    reason, count = max(found.refused.items(), key=lambda item: item[1], default=("nothing", 0))
    return ConfigError(
        "planner",
        f"{sum(found.refused.values())} cuts of {config.model.name}, none of which can run",
        "a layout that is legal and fits",
        f"most ({count}) were refused for {reason}: more nodes (planner.nodes), another "
        "data.global_batch, or fewer planner.* constraints",
    )


def _write_json(target: str | None, values: dict[str, Any]) -> None:
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


if __name__ == "__main__":
    sys.exit(ending(main))
