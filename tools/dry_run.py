"""Build the stages of experiments without memory: `python tools/dry_run.py [NAME ...]`.

Every file of conf/experiment, or those that are named, at the number of ranks that its header
says. Of stages that are alike the first is built; `--every` builds all of them, as
`python train.py experiment=NAME plan=dry_run` does.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.box import HORIZONTALS
from rich.table import Table

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.planner.candidate import Candidate
from frontier_llm.trainer.dry_run import BuiltStage, check_count, dry_run
from frontier_llm.units import format_bytes, format_count
from tools.compose import CONF, groups
from tools.console import wide_console
from tools.late_progress import LateProgress
from tools.options import ending, tool_parser
from tools.tables import Header, composed


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, compare with the plan, print a line each; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("--every", action="store_true", help="build stages that are alike, too")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of conf/experiment")
    options = parser.parse_intermixed_args(arguments)
    console = wide_console()
    for name in options.names or groups()["experiment"]:
        start = time.perf_counter()
        candidate = candidate_of(name)
        built = build(candidate, every=options.every)
        seconds = time.perf_counter() - start
        console.print(
            f"{name}: {len(built)} of {candidate.grid.pipeline} stages at "
            f"{candidate.grid.size} ranks, as planned ({seconds:.1f} s)"
        )
    return 0


def candidate_of(name: str) -> Candidate:
    """Lay out an experiment over the ranks that it is meant for."""
    config = composed(f"experiment={name}")
    ranks = Header.read(CONF / "experiment" / f"{name}.yaml").ranks
    per_node = config.launch.ranks_per_node or config.cluster.ranks_per_node
    return Candidate.of(config, ranks, min(per_node, ranks))


def build(candidate: Candidate, *, every: bool) -> list[BuiltStage]:
    """Build stages, all of them or one of each kind.

    Raises:
        DryRunError: something differs from the plan.
    """
    kinds = [kind.first for kind in candidate.model.kinds]
    stages = list(range(candidate.grid.pipeline)) if every else kinds
    with LateProgress(wide_console(stderr=True)) as progress:
        built = dry_run(candidate, stages, lambda share: progress("stages", share))
    if every:
        check_count(candidate, built)
    return built


def rehearse(candidate: Candidate) -> None:
    """Build every stage of a run, and print what each one is."""
    built = build(candidate, every=True)
    config = candidate.config
    count = count_parameters(config.model, config.data.sequence_length)
    table = Table(
        title=f"{config.model.name}, {format_count(count)} parameters: {candidate.description}, "
        "every stage as planned",
        title_justify="left",
        box=HORIZONTALS,
        pad_edge=False,
    )
    for column in ("stage", "parameters of a rank", "model states", "planned peak"):
        table.add_column(column)
    for stage in built:
        table.add_row(
            str(stage.stage),
            format_count(stage.parameters),
            format_bytes(sum(stage.state_bytes.values())),
            format_bytes(stage.peak_bytes),
        )
    wide_console().print(table)


if __name__ == "__main__":
    sys.exit(ending(main))
