"""Write the report of a run again: `frontier-llm report RUN_DIR`.

Reads metrics.jsonl, summary.json and config.yaml of the run directory and writes report.html there.
A run writes its report at its end; this command also works while the run continues.
"""

from collections.abc import Sequence

from frontier_lab.option_values import check_writable, run_folder
from frontier_llm.cli.options import tool_parser
from frontier_llm.telemetry.report_page import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Write report.html into a run directory and print its path; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument(
        "run_dir", type=run_folder, help="run.dir of a run, which need not have finished"
    )
    run_dir = parser.parse_args(arguments).run_dir
    check_writable("RUN_DIR", run_dir)
    print(write_report(run_dir))
    return 0
