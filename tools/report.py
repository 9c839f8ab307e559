"""Make the report of a run again: `python tools/report.py RUN_DIR`.

It is made of metrics.jsonl, summary.json and config.yaml in that folder.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.telemetry.report import write_report
from tools.options import ending, folder, tool_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write report.html into a run directory; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("run_dir", type=folder, help="run.dir of a run, finished or not")
    print(write_report(parser.parse_args(arguments).run_dir))
    return 0


if __name__ == "__main__":
    sys.exit(ending(main))
