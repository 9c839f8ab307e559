"""Build the pipeline stages of experiments without memory.

    frontier-llm dry-run                       all experiments
    frontier-llm dry-run experiment=NAME ...   these experiments; NAME alone is enough

The models are built on torch's meta device, which allocates no memory. The number of ranks comes
from the comment at the top of the experiment's file. Parameters and memory of every stage are
compared with the prediction of the planner. Of equal stages only the first is built, unless
`--every` is given. `plan=dry_run` among the settings of frontier-llm train also builds every stage.
"""

import difflib
import time
from collections.abc import Sequence

from frontier_llm.cli.compose import groups
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.dry_run import build
from frontier_llm.cli.experiments import Header, composed
from frontier_llm.cli.options import tool_parser
from frontier_llm.cli.package_files import conf_file
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.choice import choose
from frontier_llm.units import counted


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the experiments, compare them with the planner, print one line for each; return 0."""
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--every", action="store_true", help="also build stages that equal another one"
    )
    parser.add_argument(
        "names", nargs="*", metavar="experiment=NAME", help="experiments (default: all)"
    )
    options = parser.parse_intermixed_args(arguments)
    console = wide_console()
    names = [word.removeprefix("experiment=") for word in options.names]
    _check_names(names)
    for name in names or groups()["experiment"]:
        start = time.perf_counter()
        candidate = candidate_of(name)
        built = build(candidate, every=options.every)
        seconds = time.perf_counter() - start
        size, equal = candidate.grid, candidate.grid.pipeline - len(built)
        console.print(
            f"{name}: {counted(size.pipeline, 'stage')} at {counted(size.size, 'rank')}, as "
            f"planned ({f'{len(built)} built, {equal} equal to these, ' * bool(equal)}"
            f"{seconds:.1f} s)"
        )
    return 0


def _check_names(names: Sequence[str]) -> None:
    """Refuse words that name no experiment, such as settings."""
    known = groups()["experiment"]
    for name in names:
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            todo = f"did you mean experiment={similar[0]}?" if similar else "name one of these"
            if "=" in name:
                todo = f"for a run with settings write frontier-llm train plan=dry_run {name}"
            wants = "experiments, without settings: " + ", ".join(known)
            raise ConfigError("dry-run", name, wants, todo)


def candidate_of(name: str, *overrides: str) -> Candidate:
    """Return the layout of an experiment on the number of ranks that its file names."""
    config = composed(f"experiment={name}", *overrides)
    ranks = Header.read(conf_file("experiment", name)).ranks
    per_node = config.launch.ranks_per_node or config.cluster.ranks_per_node
    per_node = min(per_node, ranks)
    return Candidate.of(choose(config, ranks, per_node), ranks, per_node)
