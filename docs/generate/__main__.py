"""Write the generated tables and charts of the documentation, or check whether they are current.

    python -m docs.generate                       # check all of them, some minutes
    python -m docs.generate measured charts       # check some
    python -m docs.generate measured --write      # write them

`measured`, `charts` and `comparison` show benchmarks/results/*.json. The others are computed from
`conf/`, by the formulas in frontier_llm/geometry and by the planner.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from docs.generate.blocks import ROOT, filled
from frontier_llm.cli.options import run_command, tool_parser

MODULES = {
    "measured": "measured_tables",
    "charts": "benchmark_charts",
    "comparison": "comparison_page",
    "rates": "rates_chart",
    "goodput": "goodput_page",
    "first_command": "first_command",
    "sharding": "sharding_page",
    "collectives": "collectives_page",
    "models_and_clusters": "models_and_clusters_page",
    "planner": "planner_page",
    "observations": "observations_page",
    "scoreboard": "scoreboard_page",
}
"""The module of each generator. Its `PAGES` are functions that yield the lines of blocks, by page
and name of the block. Its function `images` returns the content of its charts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run generators; return the exit code: 1 if a file is out of date and was not written."""
    parser = tool_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODULES)}")
    parser.add_argument("--write", action="store_true", help="write the files")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in MODULES]
    if unknown:
        parser.error(f"no generator {', '.join(unknown)}: choose of {', '.join(MODULES)}")
    stale = 0
    for name in options.names or MODULES:
        stale += keep_current(name, files_of(name), write=options.write)
    return 1 if stale else 0


def files_of(name: str) -> dict[Path, str]:
    """Return the content of the pages and charts of a generator."""
    module = importlib.import_module(f"docs.generate.{MODULES[name]}")
    files: dict[Path, str] = module.images() if hasattr(module, "images") else {}
    for page, blocks in getattr(module, "PAGES", {}).items():
        lines = {block: make() for block, make in blocks.items()}
        files[ROOT / page] = filled((ROOT / page).read_text(), lines)
    return files


def keep_current(name: str, wanted: Mapping[Path, str], *, write: bool) -> int:
    """Write the files of a generator, or print which are out of date; return their number."""
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in stale:
        if write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
        else:
            hint = f"python -m docs.generate {name} --write"
            print(f"{path.name} is not current: {hint}", file=sys.stderr)
    return 0 if write else len(stale)


if __name__ == "__main__":
    sys.exit(run_command(main))
